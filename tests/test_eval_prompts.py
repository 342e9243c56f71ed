"""Prompts: templates, tokens and spans."""

import json
from pathlib import Path

import pytest

from sgl_blend.commands.evaluation.items import Item
from sgl_blend.commands.evaluation.prompts import (
    TEMPLATE_FILE,
    Templates,
    find_templates,
    load_encoder,
    make_prompt,
)
from sgl_blend.errors import CommandError

BOS = 1
ITEM = Item(system="ab", chunks=("cde", "f"), question="gh", answers=("x",))


def encode(text: str, special: bool) -> list[int]:
    """One token per letter, BOS where special tokens are wanted."""
    return [BOS] * special + [ord(letter) for letter in text]


def test_a_prompt_is_its_parts_and_the_spans_are_its_chunks() -> None:
    prompt = make_prompt(ITEM, Templates(), encode)

    assert prompt.token_ids == (BOS, *map(ord, "abcdefgh"))
    assert prompt.spans == (3, 6, 6, 7)


def test_templates_wrap_every_part() -> None:
    templates = Templates(
        system_template="<{system}>", chunk_template="{{{chunk}", question_template="?{question}"
    )

    prompt = make_prompt(ITEM, templates, encode)

    assert "".join(map(chr, prompt.token_ids[1:])) == "<ab>{cde{f?gh"
    chunks = [
        prompt.token_ids[start:stop]
        for start, stop in zip(prompt.spans[::2], prompt.spans[1::2], strict=True)
    ]
    assert ["".join(map(chr, chunk)) for chunk in chunks] == ["{cde", "{f"]


def test_braces_in_a_text_are_no_placeholders() -> None:
    item = Item(system="{x}", chunks=("{chunk}",), question="{}", answers=("x",))
    prompt = make_prompt(item, Templates(), encode)
    assert "".join(map(chr, prompt.token_ids[1:])) == "{x}{chunk}{}"


def test_a_chunk_without_tokens_is_left_out() -> None:
    item = Item(chunks=(" ", "a"), question="", answers=("x",))
    prompt = make_prompt(item, Templates(), lambda text, special: encode(text.strip(), special))
    assert prompt.token_ids == (BOS, ord("a"))
    assert prompt.spans == (1, 2)


def test_the_models_own_templates_are_found_and_flags_win(tmp_path: Path) -> None:
    own = {"chunk_template": "<doc> {chunk}", "question_template": "<ask> {question}"}
    (tmp_path / TEMPLATE_FILE).write_text(json.dumps(own))

    found = find_templates(str(tmp_path), question_template="Q: {question}", system_template=None)

    assert found == Templates(chunk_template="<doc> {chunk}", question_template="Q: {question}")


def test_without_a_file_the_parts_stand_alone(tmp_path: Path) -> None:
    assert find_templates(str(tmp_path)) == Templates()
    assert find_templates("organisation/model") == Templates()


@pytest.mark.parametrize(
    ("flag", "template", "sentence"),
    [
        ("chunk_template", "{chunks}", r"unknown placeholder \{chunks\}; expected \{chunk\} alone"),
        ("chunk_template", "{chunk} {system}", r"unknown placeholder \{system\}"),
        ("chunk_template", "{}", r"unknown placeholder \{\}"),
        ("question_template", "{question.__class__}", "unknown placeholder"),
        ("question_template", "What?", r"must have the placeholder \{question\}"),
        ("chunk_template", "{chunk", "is not a format string: expected '}'"),
    ],
)
def test_a_wrong_template_is_refused_by_name(flag: str, template: str, sentence: str) -> None:
    with pytest.raises(CommandError, match=f"^{flag} .*{sentence}"):
        find_templates("organisation/model", **{flag: template})


def test_a_system_text_may_be_fixed() -> None:
    assert find_templates("m", system_template="Be brief.").system_template == "Be brief."


@pytest.mark.parametrize("content", ['{"chunk": "{chunk}"}', '{"chunk_template": 3}', "[]", "{"])
def test_a_wrong_template_file_is_refused_by_path(tmp_path: Path, content: str) -> None:
    (tmp_path / TEMPLATE_FILE).write_text(content)
    with pytest.raises(CommandError, match=f"{TEMPLATE_FILE}: "):
        find_templates(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^no tokenizer in .*") as caught:
        load_encoder(str(tmp_path))
    assert "\n" not in str(caught.value)

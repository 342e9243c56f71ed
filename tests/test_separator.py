from typing import Any

import pytest
from sglang.srt.parser.code_completion_parser import completion_templates
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sgl_blend.errors import ConfigError
from sgl_blend.protocol.separator import Separator, find_separator, seam_warning

WORDS = {"<unk>": 0, "red": 1, "green": 2, "blue": 3, "<not-special>": 4}


def make_tokenizer(*special: str, template: Any = None, **named: str) -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer whose special tokens have ids 5, 6, ... in the given order."""
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([*special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **named)
    tokenizer.chat_template = template
    return tokenizer


def choice(tokenizer: PreTrainedTokenizerFast) -> str | None:
    found = find_separator(tokenizer, None)
    return None if found is None else found.text


def test_the_choice_has_the_tokens_text_and_id() -> None:
    tokenizer = make_tokenizer("<|im_end|>", "<|reserved_0|>")
    assert find_separator(tokenizer, None) == Separator("<|reserved_0|>", 6)
    assert tokenizer.convert_tokens_to_ids("<|reserved_0|>") == 6


def test_the_most_idle_name_is_chosen() -> None:
    names = ["<|spare_pad|>", "<|control_1|>", "<extra_id_0>", "<unused0>", "<|Reserved_9|>"]
    while names:
        best = names[-1]
        assert choice(make_tokenizer("<|end|>", *names)) == best
        names.remove(best)


def test_of_equally_idle_tokens_the_first_is_chosen() -> None:
    # Every process that loads the tokenizer must choose the same token.
    assert choice(make_tokenizer("<|reserved_8|>", "<|reserved_3|>")) == "<|reserved_8|>"


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token", "unk_token"])
def test_a_token_with_a_role_is_not_chosen(role: str) -> None:
    names = {"unk_token": "<reserved_unk>"} if role == "unk_token" else {role: "<reserved_0>"}
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.add_special_tokens([*names.values(), "<unused_1>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)

    assert choice(tokenizer) == "<unused_1>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ '<|reserved_0|>' }}{{ messages }}",
        {"default": "{{ messages }}", "tool_use": "<|reserved_0|>{{ tools }}"},
    ],
    ids=["one template", "several templates"],
)
def test_a_token_of_the_chat_template_is_not_chosen(template: Any) -> None:
    tokenizer = make_tokenizer("<|reserved_0|>", "<|reserved_1|>", template=template)
    assert choice(tokenizer) == "<|reserved_1|>"


def test_an_ordinary_word_is_never_chosen() -> None:
    tokenizer = make_tokenizer("<|im_end|>")
    tokenizer.add_tokens(["<unused_word>"])
    assert choice(tokenizer) is None


def test_without_an_idle_token_there_is_no_separator() -> None:
    assert find_separator(make_tokenizer("<|im_start|>", "<|im_end|>"), None) is None


def test_without_a_tokenizer_there_is_no_separator() -> None:
    assert find_separator(None, None) is None


def test_a_separator_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^blend_separator needs a tokenizer, but skip_tokenizer"
    ):
        find_separator(None, "<sep>")


def test_the_operators_choice_wins() -> None:
    tokenizer = make_tokenizer("<|im_end|>", "<|reserved_0|>", "<|doc|>")
    assert find_separator(tokenizer, "<|doc|>") == Separator("<|doc|>", 7)


@pytest.mark.parametrize("wanted", ["<not-special>", "red", "nowhere", "<|reserved_0|> ", ""])
def test_a_choice_that_is_no_special_token_is_refused(wanted: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^blend_separator .* is not a special token of the vocabulary; it has "
    ) as caught:
        find_separator(make_tokenizer("<|reserved_0|>"), wanted)
    assert "<|reserved_0|>" in str(caught.value)


def test_a_refusal_does_not_list_thousands_of_tokens() -> None:
    tokenizer = make_tokenizer(*(f"<|reserved_{i}|>" for i in range(2000)))
    with pytest.raises(ConfigError, match=r", \.\.\.$") as caught:
        find_separator(tokenizer, "nowhere")
    assert len(str(caught.value)) < 400


def test_a_chunk_between_separators_has_the_same_tokens_wherever_it_stands() -> None:
    tokenizer = make_tokenizer("<|im_end|>", "<|reserved_0|>")
    separator = find_separator(tokenizer, None)
    assert separator is not None
    alone = tokenizer.encode("red green", add_special_tokens=False)

    for before in ("", "blue", "blue ", "<|im_end|>", "red green"):
        text = f"{before}{separator.text}red green{separator.text}blue"
        ids = tokenizer.encode(text, add_special_tokens=False)
        first = ids.index(separator.token_id)
        assert ids[first : first + 4] == [separator.token_id, *alone, separator.token_id]


@pytest.mark.parametrize("name", ["qwen_coder", "star_coder"])
def test_a_token_of_sglangs_code_completion_is_not_chosen(name: str) -> None:
    template = completion_templates[name]
    used = [template.fim_begin_token, template.fim_middle_token, template.fim_end_token]
    idle = used[0].replace("prefix", "pad")

    assert choice(make_tokenizer("<|im_end|>", *used, idle)) not in used


@pytest.mark.parametrize("wanted", ["<s>", "</s>", "<|im_start|>"])
def test_an_operators_choice_that_the_model_needs_is_refused(wanted: str) -> None:
    tokenizer = make_tokenizer(
        "<s>",
        "</s>",
        "<|im_start|>",
        template="<|im_start|>{{ messages }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    with pytest.raises(ConfigError):
        find_separator(tokenizer, wanted)


def with_token(token: AddedToken, normalizer: Any = None) -> PreTrainedTokenizerFast:
    """Build a tokenizer that has this special token and a clean one that is less idle."""
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        core.normalizer = normalizer
    core.add_special_tokens([token, "<|pad_7|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


UNCLEAN: dict[str, tuple[dict[str, bool], str]] = {
    "lstrip": ({"lstrip": True}, "takes the blanks beside it"),
    "rstrip": ({"rstrip": True}, "takes the blanks beside it"),
    "single_word": ({"single_word": True}, "is not found inside a word"),
    "normalized": ({"normalized": True}, "is looked for in normalized text"),
}


@pytest.mark.parametrize("flag", UNCLEAN)
def test_a_token_that_does_not_separate_cleanly_is_passed_over_or_refused(flag: str) -> None:
    flags, sentence = UNCLEAN[flag]
    token = AddedToken("<|reserved_0|>", special=True, **{"normalized": False, **flags})
    tokenizer = with_token(token, normalizers.Lowercase())

    assert choice(tokenizer) == "<|pad_7|>"
    with pytest.raises(
        ConfigError, match=rf"^blend_separator '<\|reserved_0\|>' {sentence}.*; name another"
    ):
        find_separator(tokenizer, "<|reserved_0|>")


def test_what_the_flags_do_is_what_the_rule_says() -> None:
    def ids(text: str, normalizer: Any = None, **flags: bool) -> list[int]:
        token = AddedToken("<|reserved_0|>", special=True, **{"normalized": False, **flags})
        found: list[int] = with_token(token, normalizer).encode(text, add_special_tokens=False)
        return found

    assert 5 in ids("red<|reserved_0|>green")
    assert 5 not in ids("red<|reserved_0|>green", single_word=True)
    assert 5 not in ids("<|RESERVED_0|>", normalizers.Lowercase())
    assert 5 in ids("<|RESERVED_0|>", normalizers.Lowercase(), normalized=True)


def test_without_a_normalizer_a_normalized_token_is_as_good_as_any() -> None:
    tokenizer = with_token(AddedToken("<|reserved_0|>", special=True, normalized=True))
    assert choice(tokenizer) == "<|reserved_0|>"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_blank_after_every_separator_is_warned_about(scheme: str) -> None:
    core = Tokenizer(models.BPE(vocab={"<unk>": 0, "\u2581": 1, "a": 2, "b": 3}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens(["<|reserved_0|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    separator = find_separator(tokenizer, None)
    assert separator is not None

    marked = tokenizer.encode(f"a{separator.text}b", add_special_tokens=False)
    plain = [token for token in marked if token != separator.token_id]
    grows = plain != tokenizer.encode("ab", add_special_tokens=False)

    warning = seam_warning(tokenizer, separator)
    assert grows == (scheme == "always")
    assert (warning is not None) == grows
    assert warning is None or "puts a blank in front of text after separator" in warning


def test_without_a_separator_there_is_nothing_to_warn_about() -> None:
    assert seam_warning(None, None) is None

"""The test model's world and the committed model, checked by means of their own.

The reader below knows the sentences' grammar and nothing of the generator.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from examples.tinyrag.network import TinyLlama, shape_of
from examples.tinyrag.tokenizer import save_tokenizer
from examples.tinyrag.train import make_batch
from examples.tinyrag.words import NAMES, THINGS, VERBS, vocabulary
from examples.tinyrag.world import (
    FULL,
    KINDS,
    LATEST_GAP,
    SHARES,
    STAGES,
    make_example,
    make_held_out,
)
from sgl_blend.commands.evaluation.items import ItemLine
from sgl_blend.commands.evaluation.prompts import find_templates, load_encoder, make_prompt

MODEL = Path(__file__).parents[1] / "examples" / "tinyrag" / "model"
WORDS = vocabulary()
CLASS = {value: kind for kind, values in THINGS.items() for value in values}


def sentences(words: Sequence[str]) -> Iterator[list[str]]:
    """Cut words at full stops."""
    sentence: list[str] = []
    for word in words:
        sentence.append(word)
        if word == ".":
            yield sentence
            sentence = []


def read(chunks: Sequence[Sequence[str]]) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Return who picked what in the end, and the pairs that are stated outright."""
    picked: dict[str, str] = {}
    stated: set[tuple[str, str]] = set()
    last_of_class: dict[str, str] = {}
    spoken_of: set[str] = set()
    for chunk in chunks:
        seen_before = dict(last_of_class)  # a reference means an earlier chunk
        for sentence in sentences(chunk):
            match sentence:
                case [name, verb, value, "."] if value in CLASS and verb in VERBS:
                    assert name not in spoken_of  # an alias would be ambiguous
                    picked[name] = last_of_class[CLASS[value]] = value
                    stated.add((name, value))
                case [name, verb, "that", kind, "too", "."] if kind in THINGS and verb in VERBS:
                    picked[name] = seen_before[kind]
                case [name, verb, other, "choice", "too", "."] if verb in VERBS:
                    picked[name] = picked[other.removesuffix("'s")]
                    spoken_of.add(other.removesuffix("'s"))
                case _:
                    assert not set(sentence) & set(NAMES), sentence
    return picked, stated


def chunks_of_item(item: dict[str, object]) -> list[list[str]]:
    """Return the words of an item's chunks."""
    return [list(chunk.split()) for chunk in msgspec.convert(item["chunks"], list[str])]


def chunks_of(tokens: Sequence[int]) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Cut a training sequence into its chunks and its (name, answer) pairs."""
    text, *questions = " ".join(WORDS[token] for token in tokens).split(" <ask> ")
    asked = []
    for question in questions:
        *_, name, answer, end = question.split()
        assert end == "</s>"
        asked.append((name, answer))
    return [chunk.split() for chunk in text.split(" <doc> ")[1:]], asked


def test_held_out_answers_follow_from_the_text() -> None:
    for item in make_held_out(seed=1, count=300):
        picked, _ = read(chunks_of_item(item))
        name = str(item["question"]).split()[-1]
        assert [picked[name]] == item["answers"]


def test_training_answers_follow_from_the_text() -> None:
    num_asked = 0
    for seed in range(200):
        example = make_example(random.Random(seed), FULL, num_questions=10)
        chunks, asked = chunks_of(example.tokens)
        picked, _ = read(chunks)
        assert {name: picked[name] for name, _ in asked} == dict(asked)
        num_asked += len(asked)
        for (column, _), (_, answer) in zip(example.answers, asked, strict=True):
            assert WORDS[example.tokens[column + 1]] == answer
    assert num_asked > 1000


def test_no_statement_is_in_both_training_and_held_out_prompts() -> None:
    held_out: set[tuple[str, str]] = set()
    for item in make_held_out(seed=2, count=400):
        held_out |= read(chunks_of_item(item))[1]
    trained: set[tuple[str, str]] = set()
    for seed in range(400):
        for size in STAGES:
            example = make_example(random.Random(seed), size, num_questions=4)
            trained |= read(chunks_of(example.tokens)[0])[1]
    assert len(held_out) > 400  # of 512 pairs that are reserved
    assert len(trained) > 3000
    assert not held_out & trained


def test_kinds_of_held_out_questions_have_their_shares() -> None:
    kinds = Counter(item["kind"] for item in make_held_out(seed=3, count=200))
    assert kinds == {kind: round(SHARES[kind] * 200) for kind in KINDS}


def test_a_seed_gives_the_same_prompts_again_and_another_gives_others() -> None:
    assert make_held_out(4, 5) == make_held_out(4, 5)
    assert make_held_out(4, 5) != make_held_out(5, 5)
    batches = [
        make_batch(seed, step, 3, 3072, torch.device("cpu")).tokens.tolist()
        for seed, step in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert batches[0] == batches[1]
    assert batches[0] != batches[2]
    assert batches[0] != batches[3]


def test_the_latest_statement_needs_positions() -> None:
    """The same chunks the other way round give another answer."""
    latest = [item for item in make_held_out(seed=6, count=200) if item["kind"] == "latest"]
    turned = 0
    for item in latest:
        name = str(item["question"]).split()[-1]
        direct = [
            [
                word
                for sentence in sentences(chunk)
                if len(sentence) == 4 and sentence[0] == name
                for word in sentence
            ]
            for chunk in reversed(chunks_of_item(item))
        ]
        turned += [read(direct)[0][name]] != item["answers"]
    assert turned == len(latest) > 0


def test_held_out_statements_of_which_the_latest_holds_stand_far_apart() -> None:
    latest = [item for item in make_held_out(seed=7, count=200) if item["kind"] == "latest"]
    assert len(latest) == 20
    for item in latest:
        name = str(item["question"]).split()[-1]
        words = [word for chunk in chunks_of_item(item) for word in ["<doc>", *chunk]]
        older, newer = (
            place
            for place, (owner, verb, value) in enumerate(zip(words, words[1:], words[2:]))  # noqa: B905
            if owner == name and verb in VERBS and value in CLASS
        )
        assert newer - older >= LATEST_GAP


# --- the committed model ---


def test_committed_model_is_small_and_whole() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(sizes.values()) <= 10_000_000
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "sgl_blend_templates.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_committed_tokenizer_is_the_worlds(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (MODEL / path.name).read_text(), path.name


@pytest.fixture(scope="module")
def item() -> dict[str, object]:
    return make_held_out(seed=8, count=1)[0]


@pytest.fixture(scope="module")
def token_ids(item: dict[str, object]) -> list[int]:
    templates = find_templates(str(MODEL))
    prompt = make_prompt(
        msgspec.convert(item, ItemLine).to_item(), templates, load_encoder(str(MODEL))
    )
    return list(prompt.token_ids)


def test_an_item_becomes_the_tokens_of_training(
    item: dict[str, object], token_ids: list[int]
) -> None:
    parts = ["<s>", *str(item["system"]).split()]
    for chunk in chunks_of_item(item):
        parts += ["<doc>", *chunk]
    parts += ["<ask>", *str(item["question"]).split()]
    assert [WORDS[token] for token in token_ids] == parts


def test_transformers_computes_the_trainers_logits(token_ids: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    config = json.loads((MODEL / "config.json").read_text())
    ours = TinyLlama(
        shape_of({"vocab_size": len(WORDS), "num_layers": config["num_hidden_layers"]})
    )
    weights = load_file(MODEL / "model.safetensors")
    ours.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    tokens = torch.tensor([token_ids])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[0], rtol=1e-4, atol=1e-4)

"""The streams of benchmarks/find.py, what is counted of them, and its bars."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import find
from benchmarks.find_streams import (
    PER_PROMPT,
    RENDERINGS,
    SPLITS,
    Chat,
    Marked,
    glue,
    make_model,
    make_tokenizer,
    rag,
)
from benchmarks.match import REFERENCE_MS
from benchmarks.repeats import RUN, count_repeats

DOCUMENTS = [
    (f"module {number}", f"The function f{number} reads {number} lines.\nIt has no more.\n" * 3)
    for number in range(8)
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Chat, Any]]:
    made = {}
    for split in SPLITS:
        folder = tmp_path_factory.mktemp("tokenizers") / split
        tokenizer = make_tokenizer(split, folder, ("argparse", "pathlib", "socket"))
        made[split] = Chat(tokenizer), tokenizer
    return made


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("rendering", RENDERINGS)
def test_marks_are_where_the_documents_are(
    rendering: str, split: str, chats: dict[str, tuple[Chat, Any]]
) -> None:
    chat, tokenizer = chats[split]
    for prompt in rag(chat, DOCUMENTS, rendering, 3):
        spans = prompt.spans
        texts = [tokenizer.decode(prompt.tokens[start:stop]).strip() for start, stop in spans]
        known = {text.strip() for _, text in DOCUMENTS}
        # A border may be one token with what stands behind it or before it.
        found = [text for text in texts if any(text[:80] in one for one in known)]
        assert len([text for text in found if len(text) > 80]) == PER_PROMPT
        assert all(one[1] <= two[0] for one, two in pairwise(spans))


def test_prompts_begin_alike_up_to_the_first_mark(chats: dict[str, tuple[Chat, Any]]) -> None:
    for chat, _ in chats.values():
        for rendering in RENDERINGS:
            prompts = rag(chat, DOCUMENTS, rendering, 4)
            heads = {prompt.tokens[: prompt.spans[0][0]].tobytes() for prompt in prompts}
            assert len(heads) == 1


def test_glue_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="no rendering 'rtf'"):
        glue("rtf", DOCUMENTS)


block = st.lists(st.integers(0, 3), min_size=RUN, max_size=RUN + 8)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.lists(block, min_size=1, max_size=4).map(lambda parts: list(chain(*parts))), max_size=4
    )
)
def test_repeats_are_those_of_a_plain_search(texts: list[list[int]]) -> None:
    stream = [Marked(np.array(text, np.int64)) for text in texts]
    for number, told in enumerate(count_repeats(one.tokens for one in stream)):
        text, earlier = texts[number], texts[:number]
        exact = max((common(text, one) for one in earlier), default=0)
        exact = min(exact, len(text) - 1)
        windows = {tuple(one[at : at + RUN]) for one in earlier for at in range(len(one) - RUN + 1)}
        marked: set[int] = set()
        for at in range(len(text) - RUN + 1):
            if tuple(text[at : at + RUN]) in windows:
                marked.update(range(at, at + RUN))
        expected = [place for place in marked if exact <= place < len(text) - 1]
        assert (told.exact, told.repeated) == (exact, len(expected))


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def good() -> dict[str, Any]:
    row = {"of_marked": 1.0, "built": 0.1, "piece": 300.0}
    return {
        "streams": {
            "rag": {"xml, gpt2": row},
            "others": {
                "agent that edits files, gpt2": {"recall": 0.9, "built": 0.3},
                "sliding window of messages, gpt2": {"recall": 0.8, "built": 0.3},
                "sliding window of messages (learn share 1), gpt2": {"recall": 0.8, "built": 0.3},
                "never repeated, gpt2": {"recall": 0.0, "built": 0.005},
            },
        },
        "lookup": {
            "both_ms": {"p99": 0.9},
            "fixed_ms": {"p50": 0.2},
            "bytes_of_a_start": 34.0,
        },
        "ttft": {"overhead": 0.01},
    }


def test_what_holds_all_bars_is_not_reported() -> None:
    assert find.judge(good()) == []


def test_the_bar_of_a_lookup_grows_with_the_fixed_arithmetic() -> None:
    record = good()
    record["lookup"] |= {"both_ms": {"p99": 1.9}, "fixed_ms": {"p50": 2 * REFERENCE_MS}}
    assert find.judge(record) == []
    record["lookup"]["both_ms"] = {"p99": 2.1}
    assert len(find.judge(record)) == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("streams", "rag", "xml, gpt2", "of_marked"), 0.92),
        (("streams", "rag", "xml, gpt2", "built"), 0.16),
        (("streams", "rag", "xml, gpt2", "piece"), 219.0),
        (("streams", "others", "agent that edits files, gpt2", "recall"), 0.87),
        (("streams", "others", "sliding window of messages, gpt2", "recall"), 0.74),
        (("streams", "others", "sliding window of messages (learn share 1), gpt2", "recall"), 0.74),
        (("streams", "others", "never repeated, gpt2", "built"), 0.011),
        (("lookup", "both_ms", "p99"), 1.01),
        (("lookup", "bytes_of_a_start"), 41.0),
        (("ttft", "overhead"), 0.021),
    ],
)
def test_each_bar_is_held(path: tuple[str, ...], value: float) -> None:
    record = good()
    inner = record
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert len(find.judge(record)) == 1


@pytest.mark.engine
@pytest.mark.slow
def test_a_few_prompts_through_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chats: dict[str, tuple[Chat, Any]]
) -> None:
    monkeypatch.setitem(find.SETTINGS, "max_total_tokens", 20_000)
    make_tokenizer("gpt2", tmp_path)
    make_model(tmp_path)
    chat, _ = chats["gpt2"]
    stream = rag(chat, DOCUMENTS, "xml", 8)
    repeats = count_repeats(one.tokens for one in stream)
    marked = find._figures(stream, repeats, *find._serve(tmp_path, stream, marked=True))
    learned = find._figures(stream, repeats, *find._serve(tmp_path, stream, marked=False))
    assert marked["hit"] > 0.3
    assert marked["built"] == 0.0
    assert learned["hit"] > 0.3
    assert 0.0 < learned["built"] < 1.0

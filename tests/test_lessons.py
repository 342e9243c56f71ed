"""What becomes a chunk: runs begun at borders, split at messages, and new text split at seams."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from finding_cases import Tokens, milliseconds, slowness
from hypothesis import given, settings
from hypothesis import strategies as st
from lesson_cases import BORDERS, EOT, LINE, START, TOOL, USER, message, prompt_of, teach, words
from numpy.typing import NDArray

from sgl_blend.finding.borders import Border
from sgl_blend.finding.lessons import Lessons, find_messages, is_served
from sgl_blend.finding.spans import Span

Strengths = NDArray[np.uint8]


def borders_at(size: int, **at: list[int]) -> Strengths:
    strengths = np.zeros(size, np.uint8)
    for name, places in at.items():
        strengths[places] = Border[name.upper()]
    return strengths


def chat_ml(role: int, body: Tokens) -> Tokens:
    return np.concatenate(
        [np.array([START, role, LINE], np.int32), body, np.array([EOT, LINE], np.int32)]
    )


# --- splitting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("borders", "expected"),
    [
        ({}, 100),
        ({"sentence": [105]}, 100),  # too weak
        ({"line": [105]}, 105),
        ({"line": [103, 105]}, 103),
        ({"line": [103], "blank_line": [110]}, 110),
        ({"blank_line": [103], "special": [115]}, 115),
        ({"line": [103], "blank_line": [116]}, 103),  # too far
    ],
)
def test_a_run_begins_at_the_strongest_border_of_its_first_tokens(
    borders: dict[str, list[int]], expected: int
) -> None:
    assert Lessons().split(Span(100, 300), borders_at(400, **borders)) == [(expected, 300)]


def test_no_border_makes_a_run_too_short() -> None:
    assert Lessons().split(Span(0, 70), borders_at(70, line=[5, 10])) == [(5, 70)]
    assert Lessons().split(Span(0, 63), borders_at(70)) == []


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ([150], [(0, 150), (150, 300)]),
        ([150, 152, 154], [(0, 154), (154, 300)]),  # a header belongs to what stands before it
        ([40], [(40, 300)]),  # a crumb before a message
        ([270], [(0, 300)]),  # a crumb behind it
    ],
)
def test_runs_are_split_where_messages_begin(
    special: list[int], expected: list[tuple[int, int]]
) -> None:
    assert Lessons().split(Span(0, 300), borders_at(300, special=special)) == expected


@pytest.mark.parametrize(
    ("size", "borders", "expected"),
    [
        (1_024, {}, [(0, 1_024)]),
        (1_087, {}, [(0, 1_023), (1_023, 1_087)]),  # no crumb is left
        (1_088, {}, [(0, 1_024), (1_024, 1_088)]),
        (1_500, {"line": [600, 700]}, [(0, 700), (700, 1_500)]),
        (1_500, {"blank_line": [600], "line": [700]}, [(0, 600), (600, 1_500)]),
        (1_500, {"line": [512]}, [(0, 1_024), (1_024, 1_500)]),
    ],
)
def test_long_runs_are_split_by_length(
    size: int, borders: dict[str, list[int]], expected: list[tuple[int, int]]
) -> None:
    assert Lessons().split(Span(0, size), borders_at(size, **borders)) == expected


@settings(deadline=None, max_examples=200)
@given(
    strengths=st.lists(st.sampled_from([0] * 20 + [1, 2, 3, 4]), min_size=30, max_size=200),
    start=st.integers(0, 29),
)
def test_chunks_are_disjoint_of_a_legal_length_and_lose_crumbs_alone(
    strengths: list[int], start: int
) -> None:
    lessons = Lessons(least=8, most=32)
    span = Span(start, len(strengths))
    chunks = lessons.split(span, np.array(strengths, np.uint8))
    assert all(8 <= chunk.num_tokens <= 32 for chunk in chunks)
    ends = [start, *(chunk.stop for chunk in chunks)]
    begins = [*(chunk.start for chunk in chunks), span.stop]
    special = [place for place in range(start, span.stop) if strengths[place] == Border.SPECIAL]
    messages = [one for one, next_one in pairwise([*special, span.stop]) if next_one - one > 4]
    for number, (end, begin) in enumerate(zip(ends, begins, strict=True)):
        # Between two chunks there are messages too short for one, in front of them a bad beginning.
        inside = [place for place in messages if end < place < begin]
        crumbs = [two - one for one, two in pairwise([end, *inside, begin])]
        assert begin >= end
        assert max(crumbs) < (8 if number else 8 + 16)


@pytest.mark.parametrize(
    ("seams", "expected"),
    [
        ([], [(0, 400)]),
        ([100, 200], [(0, 100), (100, 200), (200, 400)]),
        ([50, 100, 150, 200], [(0, 100), (100, 200), (200, 400)]),  # too near to each other
        ([30, 200], [(30, 200), (200, 400)]),  # a crumb in front
        ([200, 230], [(0, 230), (230, 400)]),  # a crumb belongs to what stands before it
        ([340], [(0, 400)]),  # too near to the end
    ],
)
def test_a_seam_leaves_no_crumb(seams: list[int], expected: list[tuple[int, int]]) -> None:
    assert Lessons().split(Span(0, 400), borders_at(400), seams) == expected


@settings(deadline=None, max_examples=200)
@given(
    strengths=st.lists(st.sampled_from([0] * 20 + [1, 2, 3]), min_size=30, max_size=200),
    start=st.integers(0, 29),
    seams=st.sets(st.integers(0, 200)),
)
def test_seams_lose_a_crumb_in_front_at_most(
    strengths: list[int], start: int, seams: set[int]
) -> None:
    span, at = Span(start, len(strengths)), np.array(strengths, np.uint8)
    lessons = Lessons(least=8, most=32)
    whole = lessons.split(span, at)
    parts = lessons.split(span, at, sorted(seam for seam in seams if start < seam < span.stop))
    assert all(8 <= part.num_tokens <= 32 for part in parts)
    assert all(one.stop == other.start for one, other in pairwise(parts))
    lost = sum(chunk.num_tokens for chunk in whole) - sum(part.num_tokens for part in parts)
    assert 0 <= lost < 8


# --- what was served ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "served"),
    [
        ([], False),
        ([Span(0, 400)], True),
        ([Span(0, 137)], False),  # 64 more tokens would be served
        ([Span(0, 138)], True),
        ([Span(0, 101), Span(101, 200)], True),
        ([Span(0, 68), Span(68, 130), Span(130, 192)], True),
        ([Span(0, 67), Span(67, 133), Span(133, 199)], False),  # in pieces, none of them long
    ],
)
def test_a_run_is_served_by_one_long_piece(pieces: list[Span], served: bool) -> None:
    assert is_served(Span(1, 201), pieces, 64) == served


def test_only_runs_that_were_not_served_are_learned() -> None:
    tokens = words(1, 600)
    runs = [Span(0, 200), Span(250, 600)]
    lessons = Lessons()
    assert lessons.study(prompt_of(tokens, runs)).chunks == [(0, 200), (250, 600)]
    assert lessons.study(prompt_of(tokens, runs, served=[Span(250, 600)])).chunks == [(0, 200)]
    part = [Span(300, 380)]
    assert lessons.study(prompt_of(tokens, runs, served=part)).chunks == [(0, 200), (250, 600)]


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [message, chat_ml])
def test_messages_are_told_apart_by_their_headers(write: Callable[[int, Tokens], Tokens]) -> None:
    roles = [USER, TOOL, USER, TOOL, TOOL]
    tokens = np.concatenate([write(role, words(9 + at, 80)) for at, role in enumerate(roles)])
    messages = find_messages(tokens, BORDERS.before(tokens), 64)
    assert [item.span.num_tokens for item in messages] == [81 if write is message else 83] * 5
    # The first message has nothing in front of its header.
    headers = [item.header for item in messages[1:]]
    assert headers[0] == headers[2] == headers[3] != headers[1]


def test_short_messages_do_not_count() -> None:
    tokens = np.concatenate([message(USER, words(1, 60)), message(TOOL, words(2, 63))])
    assert [item.span.num_tokens for item in find_messages(tokens, BORDERS.before(tokens), 64)] == [
        64
    ]


def show_documents(lessons: Lessons) -> Tokens:
    """Show documents after a name and a line end; return a tool's message with three new ones."""
    name, lines = words(1, 1), np.tile(np.append(words(2, 9), np.int32(LINE)), 10)
    lines[8::10] = words(3, 10)  # other lines end with any word
    for _ in range(4):
        shown = np.concatenate([words(4, 70), name, [LINE], lines]).astype(np.int32)
        lessons.study(prompt_of(shown, [Span(72, 172)]))
    new = np.concatenate([words(at, 98) if at % 2 else [*name, LINE] for at in range(5, 10)])
    return np.concatenate([message(USER, words(1, 20)), message(TOOL, new.astype(np.int32))])


@pytest.mark.parametrize("forget", [None, lambda one: one.forget("a"), lambda one: one.clear()])
def test_new_text_is_split_where_documents_are_likely_to_begin(
    forget: Callable[[Lessons], None] | None,
) -> None:
    lessons = Lessons()
    tokens = show_documents(lessons)
    if forget is not None:
        forget(lessons)
    teach(lessons, share=1.0)
    chunks = lessons.study(prompt_of(tokens, [])).chunks
    sizes = [chunk.num_tokens for chunk in chunks]
    assert sizes == ([100, 100, 99] if forget is None else [299])


def test_lessons_are_chosen_fast() -> None:
    lessons = Lessons()
    tokens = np.concatenate([message(TOOL, words(at, 480)) for at in range(16)])
    runs = [Span(484 * at + 10, 484 * at + 480) for at in range(16)]
    prompt = prompt_of(tokens, runs)
    assert milliseconds(lambda: lessons.study(prompt)) < 1.5 * slowness()

"""What becomes a chunk: runs begun at borders, split at messages; new text where most comes again."""

import copy
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from finding_cases import Tokens, milliseconds, random_tokens, slowness
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_blend.finding.borders import Border, Borders
from sgl_blend.finding.lessons import Lessons, Prompt, find_messages, is_served
from sgl_blend.finding.roles import Roles
from sgl_blend.finding.sightings import MOST_LABELS
from sgl_blend.finding.spans import Span

Strengths = NDArray[np.uint8]
EOT, START, END, LINE, USER, TOOL = range(6)
"""Ids of special tokens and of names of roles; words come behind."""
_OF_IDS = np.zeros(10, np.uint8)
_OF_IDS[[EOT, START, END]] = Border.SPECIAL
_OF_IDS[LINE] = Border.LINE
BORDERS = Borders(_OF_IDS)


def borders_at(size: int, **at: list[int]) -> Strengths:
    strengths = np.zeros(size, np.uint8)
    for name, places in at.items():
        strengths[places] = Border[name.upper()]
    return strengths


def words(seed: int, size: int) -> Tokens:
    return random_tokens(seed, size, 10_000) + np.int32(10)


def message(role: int, body: Tokens) -> Tokens:
    return np.concatenate([np.array([START, role, END], np.int32), body, np.array([EOT], np.int32)])


def chat_ml(role: int, body: Tokens) -> Tokens:
    return np.concatenate(
        [np.array([START, role, LINE], np.int32), body, np.array([EOT, LINE], np.int32)]
    )


def prompt_of(
    tokens: Tokens,
    runs: list[Span],
    *,
    served: list[Span] | None = None,
    start: int = 0,
    tenant: str = "a",
    came_again: Counter[int] | None = None,
) -> Prompt:
    strengths = BORDERS.before(tokens)
    return Prompt(tenant, tokens, strengths, start, served or [], runs, came_again or Counter())


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
        (1_087, {}, [(0, 1_024)]),
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


def tool_prompt(seed: int) -> Tokens:
    return np.concatenate([message(USER, words(seed, 20)), message(TOOL, words(seed + 1, 200))])


TOOL_BODY = Span(27, 228)


def teach(lessons: Lessons, share: float, times: int = 40) -> None:
    """Show prompts with a long new message each; so much of each one's text comes again later."""
    for seed in range(times):
        (text,) = lessons.study(prompt_of(tool_prompt(10 * seed), [])).new
        assert text.span == TOOL_BODY
        came = Counter({text.label: round(share * text.span.num_tokens)})
        lessons.study(prompt_of(words(seed, 70), [Span(0, 70)], came_again=came))


def learns_new(lessons: Lessons, tenant: str = "a") -> bool:
    """Ask whether a new message is learned, on a copy: what is asked counts as well."""
    chunks = copy.deepcopy(lessons).study(prompt_of(tool_prompt(7), [], tenant=tenant)).chunks
    assert chunks in ([], [TOOL_BODY])
    return bool(chunks)


def test_a_role_whose_text_comes_again_is_learned_at_first_sight() -> None:
    lessons = Lessons()
    teach(lessons, share=1.0)
    assert learns_new(lessons)


@pytest.mark.parametrize(("share", "learned"), [(0.45, False), (0.55, True)])
def test_half_of_a_roles_text_must_come_again(share: float, learned: bool) -> None:
    lessons = Lessons()
    teach(lessons, share)
    assert learns_new(lessons) == learned


def test_a_role_is_not_judged_by_little_text() -> None:
    lessons = Lessons()
    teach(lessons, share=1.0, times=22)  # 22 times 201 tokens; what was new fades
    assert not learns_new(lessons)
    teach(lessons, share=1.0, times=5)
    assert learns_new(lessons)


def test_late_prompts_count_more_than_early_ones() -> None:
    lessons = Lessons()
    teach(lessons, share=1.0, times=100)
    teach(lessons, share=0.0, times=30)
    assert learns_new(lessons)
    teach(lessons, share=0.0, times=20)
    assert not learns_new(lessons)
    teach(lessons, share=1.0, times=60)
    assert learns_new(lessons)


def test_new_text_is_what_neither_runs_nor_pieces_hold() -> None:
    tokens = np.concatenate([message(USER, words(1, 300)), message(TOOL, words(2, 300))])
    assert len(tokens) == 608
    runs, served = [Span(0, 100), Span(400, 500)], [Span(90, 120), Span(562, 600)]
    lessons = Lessons()
    new = lessons.study(prompt_of(tokens, runs, served=served)).new
    # User 3 to 304, tool 307 to 608; 500 to 562 are too few.
    assert [text.span for text in new] == [(120, 304), (307, 400)]
    assert len({text.label for text in new}) == 2
    later = lessons.study(prompt_of(tokens, runs, served=served, start=320)).new
    assert later == [(Span(320, 400), new[1].label)]


def test_only_gaps_of_a_message_are_learned_where_a_part_of_it_was_seen() -> None:
    lessons = Lessons()
    teach(lessons, share=1.0)
    run = Span(127, 228)
    assert lessons.study(prompt_of(tool_prompt(5), [run])).chunks == [(27, 127), run]


def test_tenants_are_counted_apart_and_forgotten() -> None:
    lessons = Lessons()
    teach(lessons, share=1.0)
    assert not learns_new(lessons, "b")
    lessons.forget("b")
    assert learns_new(lessons)
    lessons.forget("a")
    assert not learns_new(lessons)
    teach(lessons, share=1.0)
    lessons.clear()
    assert not learns_new(lessons)


def test_a_label_counts_for_its_tenant_alone() -> None:
    lessons = Lessons()
    teach(lessons, share=0.0)
    assert not learns_new(lessons)
    (text,) = copy.deepcopy(lessons).study(prompt_of(tool_prompt(7), [])).new
    came = Counter({text.label: 10**6, 999: 10**6})
    lessons.study(prompt_of(words(1, 70), [], tenant="b", came_again=came))
    assert not learns_new(lessons)
    lessons.study(prompt_of(words(1, 70), [], came_again=came))
    assert learns_new(lessons)


def headed(name: int) -> Tokens:
    return np.concatenate([np.array([START, 10 + name, END], np.int32), words(name, 80)])


def test_headers_are_bounded() -> None:
    lessons = Lessons(roles=Roles(3))
    teach(lessons, share=1.0)
    lessons.study(prompt_of(headed(0), []))
    assert learns_new(lessons)
    assert len(lessons.study(prompt_of(np.concatenate([headed(1), headed(2)]), [])).new) == 2
    assert not learns_new(lessons)


def test_roles_of_one_tenant_make_no_room_for_those_of_others() -> None:
    lessons = Lessons(roles=Roles(2, most_tenants=2))
    teach(lessons, share=1.0)
    for number in range(9):
        lessons.study(prompt_of(headed(number), [], tenant="b"))
    assert learns_new(lessons)
    lessons.study(prompt_of(headed(1), [], tenant="c"))
    assert not learns_new(lessons)


def test_labels_are_used_again_when_all_were() -> None:
    lessons = Lessons(roles=Roles(2))
    teach(lessons, share=1.0)
    lessons._roles._last_label = MOST_LABELS - 1
    headers = (np.array([START, 10 + number, END], np.int32) for number in range(3))
    prompts = [np.concatenate([header, words(1, 80)]) for header in headers]
    labels = [text.label for tokens in prompts for text in lessons.study(prompt_of(tokens, [])).new]
    assert labels == [MOST_LABELS, 1, 2]


def count(lessons: Lessons, *came: bool) -> list[list[Span]]:
    """Show prompts with one long message each, which was seen before or not."""
    shown = []
    for seed, seen in enumerate(came):
        runs = [TOOL_BODY] if seen else []
        shown.append(lessons.study(prompt_of(tool_prompt(10 * seed), runs)).chunks)
    return shown


def test_a_role_that_comes_as_a_whole_is_learned_at_first_sight() -> None:
    lessons = Lessons()
    assert count(lessons, *[True] * 15, False) == [[TOOL_BODY]] * 15 + [[]]
    assert count(lessons, False) == [[TOOL_BODY]]


def test_half_of_a_roles_messages_must_have_come() -> None:
    lessons = Lessons()
    count(lessons, *[True] * 8, *[False] * 8)
    assert count(lessons, False) == [[TOOL_BODY]]
    assert count(lessons, False) == [[]]


def test_only_the_last_messages_of_a_role_count() -> None:
    lessons = Lessons()
    count(lessons, *[False] * 100)
    assert count(lessons, *[True] * 32, False)[-1] == [TOOL_BODY]


@pytest.mark.parametrize(
    ("run", "came"),
    [
        (Span(43, 200), True),
        (Span(44, 200), False),
        (Span(0, 128), True),
        (Span(0, 127), False),
    ],
)
def test_a_message_was_seen_if_half_of_it_was_from_its_start_on(run: Span, came: bool) -> None:
    lessons = Lessons()
    for seed in range(16):
        lessons.study(prompt_of(tool_prompt(seed), [run]))
    assert count(lessons, False) == [[TOOL_BODY] if came else []]


def test_what_was_served_counts_as_seen() -> None:
    lessons = Lessons()
    for seed in range(16):
        lessons.study(prompt_of(tool_prompt(seed), [], served=[TOOL_BODY]))
    assert count(lessons, False) == [[TOOL_BODY]]


def test_messages_of_an_exact_prefix_are_not_counted() -> None:
    lessons = Lessons()
    for seed in range(16):
        lessons.study(prompt_of(tool_prompt(seed), [TOOL_BODY], start=100))
    assert count(lessons, False) == [[]]


def test_a_message_learned_as_a_whole_serves_its_parts() -> None:
    lessons = Lessons()
    count(lessons, *[True] * 16)
    part = Span(60, 130)  # part of a message, not from its start on
    assert lessons.study(prompt_of(tool_prompt(5), [part])).chunks == [TOOL_BODY]


def test_new_text_of_a_message_learned_as_a_whole_is_learned_once() -> None:
    lessons = Lessons()
    teach(lessons, share=1.0)
    count(lessons, *[True] * 64)
    assert lessons.study(prompt_of(tool_prompt(5), [Span(127, 228)])).chunks == [TOOL_BODY]


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

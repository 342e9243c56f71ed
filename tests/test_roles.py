"""New text and whole messages are learned at first sight where most of a role's come again."""

import copy
from collections import Counter

import numpy as np
import pytest
from finding_cases import Tokens
from lesson_cases import (
    END,
    START,
    TOOL,
    TOOL_BODY,
    USER,
    message,
    prompt_of,
    teach,
    tool_prompt,
    words,
)

from sgl_blend.finding.lessons import Lessons
from sgl_blend.finding.roles import Roles
from sgl_blend.finding.sightings import MOST_LABELS
from sgl_blend.finding.spans import Span


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
    for number in range(400):  # more text than the first one has sent
        lessons.study(prompt_of(headed(number % 9), [], tenant="b"))
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

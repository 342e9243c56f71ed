"""Heads of streams of prompts whose fixed beginning is known."""

from collections.abc import Callable

import numpy as np
import pytest
from finding_cases import Tokens, milliseconds, random_tokens, slowness

from sgl_blend.finding.borders import Border, Borders
from sgl_blend.finding.heads import Heads

LINE_END, END_OF_MESSAGE, HEADER_START, HEADER_END, WORDS = 0, 49_997, 49_998, 49_999, 50_000
_STRENGTHS = np.zeros(WORDS, np.uint8)
_STRENGTHS[LINE_END] = Border.LINE
_STRENGTHS[END_OF_MESSAGE:] = Border.SPECIAL
BORDERS = Borders(_STRENGTHS)


def text(seed: int, size: int) -> Tokens:
    """Return words that end with a line."""
    words = random_tokens(seed, size, END_OF_MESSAGE - 1) + np.int32(1)
    words[-1] = LINE_END
    return words


def join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


INSTRUCTION = text(1, 100)


def test_prompts_that_part_behind_the_instruction_name_it() -> None:
    heads = Heads(BORDERS)
    found = [heads.of("a", join(INSTRUCTION, text(seed, 400))) for seed in range(10, 42)]
    assert found[:2] == [0, 0]
    assert set(found[3:]) == {100}


def test_a_head_is_snapped_down_to_a_line_end() -> None:
    heads = Heads(BORDERS)
    same = text(2, 7)[:-1]  # all documents begin alike
    found = [heads.of("a", join(INSTRUCTION, same, text(seed, 400))) for seed in range(10, 42)]
    assert found[-1] == 100


def header(role: int) -> Tokens:
    return np.array([END_OF_MESSAGE, HEADER_START, role, HEADER_END, LINE_END, LINE_END], np.int32)


@pytest.mark.parametrize("own_text", [0, 20])
def test_a_head_ends_before_the_header_of_the_first_message(own_text: int) -> None:
    heads = Heads(BORDERS)
    user, tool = (join(INSTRUCTION, header(role)) for role in (7, 8))
    asked = join(user, text(9, own_text)) if own_text else user
    found = []
    for seed in range(10, 42):
        found.append(heads.of("a", join(tool, text(1_000 + seed, 400))))
        found += [heads.of("a", join(asked, text(seed + past, 400))) for past in (100, 200)]
    # Behind the end of the instruction's message, where all of them part, or behind more text.
    assert found[-3:] == ([101, 126, 126] if own_text else [101] * 3)
    assert len(set(found[9:])) == (2 if own_text else 1)


def test_a_prompt_that_is_only_a_header_has_no_head() -> None:
    heads = Heads(BORDERS)
    found = [heads.of("a", join(header(7), text(seed, 400))) for seed in range(10, 42)]
    assert set(found) == {0}


def test_once_named_it_stays_while_more_is_shared_for_a_while() -> None:
    heads = Heads(BORDERS)
    for seed in range(10, 20):
        heads.of("a", join(INSTRUCTION, text(seed, 400)))
    # Other prompts push out all that were remembered.
    for seed in range(100, 140):
        heads.of("a", join(text(3, 50), text(seed, 100)))
    assert heads.of("a", join(INSTRUCTION, text(999, 400))) == 100


def test_two_applications_have_a_head_each() -> None:
    heads = Heads(BORDERS)
    other = text(5, 60)
    for seed in range(10, 30):
        heads.of("a", join(INSTRUCTION if seed % 2 else other, text(seed, 300)))
    assert heads.of("a", join(INSTRUCTION, text(1_000, 300))) == 100
    assert heads.of("a", join(other, text(1_000, 300))) == 60


def test_where_fewer_than_a_quarter_part_there_is_no_head() -> None:
    heads = Heads(BORDERS)
    popular = text(6, 80)
    for number in range(64):
        beginning = popular if number % 8 == 0 else text(2_000 + number, 80)
        assert heads.of("a", join(beginning, text(100 + number, 100))) == 0


def test_a_quarter_that_parts_there_is_enough() -> None:
    heads = Heads(BORDERS)
    popular = text(6, 80)
    # Of 32 recent prompts 7 or 8 are popular ones, and nothing else begins like another.
    found = [
        heads.of(
            "a", join(popular if number % 4 == 3 else text(2_000 + number, 80), text(number, 100))
        )
        for number in range(64)
    ]
    assert set(found[35::4]) == {80}
    assert sum(found[32:]) == 8 * 80


@pytest.mark.parametrize("size", [3, 4])
def test_a_head_has_at_least_four_tokens(size: int) -> None:
    heads = Heads(BORDERS)
    found = [heads.of("a", join(text(7, size), text(seed, 100))) for seed in range(10, 20)]
    assert found[-1] == (4 if size == 4 else 0)


def test_the_same_prompt_again_says_nothing() -> None:
    heads = Heads(BORDERS)
    prompt = join(INSTRUCTION, text(8, 100))
    assert [heads.of("a", prompt) for _ in range(20)] == [0] * 20
    assert [heads.of("a", prompt[:150]) for _ in range(20)] == [0] * 20


def test_tenants_do_not_share_heads() -> None:
    heads = Heads(BORDERS)
    for seed in range(10, 30):
        heads.of("a", join(INSTRUCTION, text(seed, 300)))
    assert heads.of("b", join(INSTRUCTION, text(500, 300))) == 0
    assert heads.of("b", join(INSTRUCTION, text(501, 300))) == 0
    assert heads.of("a", join(INSTRUCTION, text(502, 300))) == 100


def test_heads_and_tenants_are_bounded() -> None:
    heads = Heads(BORDERS, most_heads=2, most_tenants=2)
    for application in range(3):
        for seed in range(10):
            heads.of("a", join(text(50 + application, 40), text(100 * application + seed, 100)))
    ends = [heads.of("a", join(text(50 + number, 40), text(9_000, 100))) for number in (1, 2)]
    assert ends == [40, 40]
    assert heads.num_forgotten == 1
    heads.of("b", text(7, 9_000))
    heads.of("c", INSTRUCTION)
    assert heads.num_forgotten == 2
    assert heads.of("a", join(text(52, 40), text(9_001, 100))) == 0


def test_what_was_learned_can_be_forgotten() -> None:
    heads = Heads(BORDERS)
    prompt = join(INSTRUCTION, text(500, 300))
    ways: list[Callable[[], None]] = [lambda: heads.forget("a"), heads.clear]
    for forget in ways:
        for seed in range(10, 20):
            heads.of("a", join(INSTRUCTION, text(seed, 300)))
        assert heads.of("a", prompt) == 100
        forget()
        assert heads.of("a", prompt) == 0


def test_a_prompt_that_ends_first_says_nothing() -> None:
    heads = Heads(BORDERS)
    short = [heads.of("a", INSTRUCTION) for _ in range(5)]
    assert [*short, heads.of("a", join(INSTRUCTION, text(9, 100)))] == [0] * 6


@pytest.mark.parametrize("size", [0, 1, 5])
def test_tiny_prompts_are_prompts(size: int) -> None:
    heads = Heads(BORDERS)
    assert [heads.of("a", random_tokens(seed, size)) for seed in range(5)] == [0] * 5


def test_heads_are_found_fast() -> None:
    heads = Heads(BORDERS)
    prompts = iter([join(INSTRUCTION, text(seed, 2_000)) for seed in range(60)])
    assert milliseconds(lambda: heads.of("a", next(prompts))) < 0.5 * slowness()


def test_tiny_prompts_of_many_tenants_take_no_head_away() -> None:
    heads = Heads(BORDERS)
    for seed in range(10, 14):
        heads.of("a", join(INSTRUCTION, text(seed, 400)))
    for number in range(300):
        heads.of(f"made up {number}", text(number, 5))
    assert heads.of("a", join(INSTRUCTION, text(999, 400))) == 100
    assert heads.num_forgotten == 300 - 255

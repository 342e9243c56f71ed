"""Prompts of messages for the tests of lessons: headers, words, and roles whose text comes again."""

from collections import Counter

import numpy as np
from finding_cases import Tokens, random_tokens

from sgl_blend.finding.borders import Border, Borders
from sgl_blend.finding.lessons import Lessons, Prompt
from sgl_blend.finding.spans import Span

EOT, START, END, LINE, USER, TOOL = range(6)
"""Ids of special tokens and of names of roles; words come behind."""
_OF_IDS = np.zeros(10, np.uint8)
_OF_IDS[[EOT, START, END]] = Border.SPECIAL
_OF_IDS[LINE] = Border.LINE
BORDERS = Borders(_OF_IDS)


def words(seed: int, size: int) -> Tokens:
    return random_tokens(seed, size, 10_000) + np.int32(10)


def message(role: int, body: Tokens) -> Tokens:
    return np.concatenate([np.array([START, role, END], np.int32), body, np.array([EOT], np.int32)])


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

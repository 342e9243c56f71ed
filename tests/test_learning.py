"""New text that is learned at first sight, on the real scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

TOLERANCE = 2e-4
SYSTEM, BEFORE = random_tokens(1, 30), random_tokens(2, 70)
DOCUMENTS = [random_tokens(100 + number, 400) for number in range(30)]


def shown(*numbers: int, seed: int, **rest: Any) -> Prompt:
    """Return a prompt of documents after a text that all have, with texts of its own around them."""
    segments = [SYSTEM, random_tokens(10_000 + seed, 9), BEFORE]
    for number in numbers:
        segments.append(DOCUMENTS[number])
    return Prompt([*segments, random_tokens(20_000 + seed, 12)], **rest)


def ask(driver: Driver, prompt: Prompt) -> Answer:
    (answer,) = driver.ask(prompt)
    driver.settle()
    return answer


def _second_sight(driver: Driver, come_again: bool, turns: int) -> tuple[Answer, Answer]:
    """Show documents that come again or not; then two new ones, and one of them again."""
    driver.settle()
    driver.flush()
    for number in range(28):
        prompt = shown(number // 2 if come_again else number, seed=number)
        for turn in range(turns):
            ask(driver, prompt)
            more = random_tokens(50_000 + 100 * number + turn, 20)
            prompt = Prompt([*prompt.segments, more])
    ask(driver, shown(28, 29, seed=100))
    params = {"sgl_blend_ratio": 1.0}
    found = ask(driver, shown(28, seed=101, params=params))
    return found, ask(driver, shown(28, seed=101, params={"sgl_blend": False}, salt="full"))


@pytest.mark.parametrize(("come_again", "turns"), [(True, 1), (False, 1), (True, 3)])
def test_new_text_is_found_at_second_sight_where_most_comes_again(
    start_engine: StartEngine, come_again: bool, turns: int
) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    found, full = engine.call(_second_sight, come_again, turns)
    documents = [len(DOCUMENTS[28])] if come_again else []
    assert found.report["found_tokens"] == len(BEFORE) + sum(documents)
    assert largest_difference(found.logprobs[0], full.logprobs[0]) <= TOLERANCE

"""New text that is learned at first sight, on the real scheduler."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, random_tokens
from tiny_models import VOCAB_SIZE

from sgl_blend.finding.borders import Border, Borders

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


def _begin(driver: Driver) -> None:
    """Forget everything, and what may be built at first."""
    driver.settle()
    driver.flush()
    driver.runtime.learner.credit.start = 0.0


def _greedy_prompts(number: int) -> list[Prompt]:
    """Return two prompts of the same pieces, each the shortest that is learned."""
    prompts = []
    for turn in range(2):
        segments = [random_tokens(60_000 + 2 * number + turn, 10)]
        for piece in range(15):
            segments.append(random_tokens(70_000 + 100 * number + piece, 66))
            segments.append(random_tokens(80_000 + 200 * number + 100 * turn + piece, 3))
        prompts.append(Prompt(segments, salt="greedy"))
    return prompts


def _found_beside_greedy(driver: Driver) -> int:
    """Show documents again and again, and beside them what another tenant would have built."""
    _begin(driver)
    found = 0
    for number in range(16):
        prompt = shown(0, 1, 2, 3, seed=number, salt="victim")
        found += ask(driver, prompt).report["found_tokens"]
        for pair in range(4):
            for greedy in _greedy_prompts(4 * number + pair):
                ask(driver, greedy)
    return found


def test_no_tenant_learns_on_the_credit_of_another(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", max_total_tokens=30_000)
    assert engine.call(_found_beside_greedy) >= 8 * 1_600


LINE_END = 9


def _built_behind_a_long_head(driver: Driver, times: int) -> tuple[list[int], int]:
    """Repeat a short document behind a head that all prompts have.

    Returns:
        Tokens of the build prefix of each chunk that is built, and tokens found in the last prompt.
    """
    _begin(driver)
    borders = np.zeros(VOCAB_SIZE, np.uint8)
    borders[LINE_END] = Border.LINE  # the engine has no tokenizer
    learner, finder = driver.runtime.learner, driver.runtime.finder
    learner._borders = finder._heads._borders = Borders(borders)
    head, document = [*random_tokens(90_000, 500), LINE_END], random_tokens(90_001, 70)
    with patch.object(learner.builder, "enqueue", wraps=learner.builder.enqueue) as enqueue:
        for turn in range(times):
            own = [10 + turn, *random_tokens(91_000 + turn, 8)]
            prompt = Prompt([head, own, document, random_tokens(92_000 + turn, 3)], salt="one")
            found = ask(driver, prompt).report["found_tokens"]
    built = [key.prefix_length for call in enqueue.call_args_list for key in call.args[0]]
    return built, found


def test_a_tenant_pays_for_the_build_prefix_too(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned")
    # Four prompts of 582 tokens earn 349: enough for the document, not for the head before it.
    built, found = engine.call(_built_behind_a_long_head, 4)
    assert all(prefix < 10 for prefix in built)
    assert found == 0
    built, found = engine.call(_built_behind_a_long_head, 16)
    assert 501 in built
    assert found == 70


def _first_paid(driver: Driver) -> list[int]:
    """Repeat two documents until one of them is paid for; return its tokens."""
    _begin(driver)
    learner = driver.runtime.learner
    with patch.object(learner.builder, "enqueue", wraps=learner.builder.enqueue) as enqueue:
        for turn in range(8):
            segments = [random_tokens(93_000 + 3 * turn, 9), DOCUMENTS[0]]
            segments += [random_tokens(93_001 + 3 * turn, 9), DOCUMENTS[1]]
            ask(driver, Prompt([*segments, random_tokens(93_002 + 3 * turn, 9)], salt="late"))
            if enqueue.called:
                (key,) = enqueue.call_args.args[0]
                return list(np.frombuffer(key.tokens, np.int64))
    return []


def test_late_text_is_paid_for_first(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned")
    assert engine.call(_first_paid) == DOCUMENTS[1]


def _names_kept(driver: Driver, salt: str) -> set[int]:
    driver.settle()
    ask(driver, shown(1, seed=1, salt=salt))
    return {len(prompt.tenant) for prompt in driver.runtime.learner._sightings._prompts}


def test_a_long_name_of_a_tenant_is_not_kept(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned")
    assert engine.call(_names_kept, "x" * 100_000) == {32}

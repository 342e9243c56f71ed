"""Orders that come with the answer: what SGLang's overlap schedule launched for it is still running."""

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, random_tokens
from orders import order
from test_orders import OVERLAP, begin_build, settings

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _flush_after_an_answer(driver: Driver, others: int) -> tuple[bool, list[bool], list[int]]:
    """Order a flush in the round after the one that a request's answer is sent in."""
    prompts = [Prompt([random_tokens(5 + i, 30)], max_new_tokens=2) for i in range(others)]
    driver.settle()
    reqs = [driver.submit(prompt) for prompt in prompts]
    while not all(req.finished() for req in reqs):
        driver.step()
    last: Any = driver.scheduler.last_batch
    in_flight = [] if last is None else [req.finished() for req in last.reqs]
    flushed = order(driver, "FlushCacheReqInput").success
    driver.settle()
    later = driver.ask(*prompts)
    driver.settle()
    return flushed, in_flight, [len(answer.output_ids) for answer in later]


@OVERLAP
@pytest.mark.parametrize("others", [1, 3])
def test_a_flush_right_after_an_answer_succeeds(
    start_engine: StartEngine, overlap: bool, others: int
) -> None:
    engine = start_engine(**settings(overlap))
    flushed, in_flight, later = engine.call(_flush_after_an_answer, others)
    assert flushed
    assert later == [2] * others
    if overlap:
        assert in_flight == [True] * others, "nothing was in flight, so nothing was shown"


def _flush_while_one_decodes(driver: Driver) -> tuple[bool, int]:
    driver.settle()
    short = driver.submit(Prompt([random_tokens(5, 30)]))
    longer = driver.submit(Prompt([random_tokens(6, 30)], max_new_tokens=6))
    while not short.finished():
        driver.step()
    flushed = order(driver, "FlushCacheReqInput").success
    driver.run_until(longer.finished)
    driver.settle()
    return flushed, len(longer.output_ids)


@OVERLAP
def test_a_flush_takes_nothing_from_who_still_decodes(
    start_engine: StartEngine, overlap: bool
) -> None:
    assert start_engine(**settings(overlap)).call(_flush_while_one_decodes) == (False, 6)


def _flush_after_a_step(driver: Driver) -> tuple[bool, int]:
    """Order a flush after the result of a build's step was looked at, and before the next round."""
    builder = begin_build(driver)
    while any(not build.finished() for build in builder._in_flight.values()):
        driver.step()
    stale = bool(builder._in_flight) and driver.scheduler.last_batch is None
    assert order(driver, "FlushCacheReqInput").success
    pending: int = builder.num_unfinished
    driver.settle()
    return stale, pending


@OVERLAP
def test_after_a_flush_nothing_is_pending(start_engine: StartEngine, overlap: bool) -> None:
    stale, pending = start_engine(**settings(overlap)).call(_flush_after_a_step)
    assert stale or not overlap, "the step was counted already, so nothing was shown"
    assert pending == 0


class _FirstRank:
    """A group whose first rank says something else than this one would."""

    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def agree(self, values: list[float]) -> list[float]:
        assert len(values) == len(self._values)
        return self._values


def _a_flush_that_the_first_rank_awaits(driver: Driver) -> list[bool]:
    """Ask as a rank whose own clock has ended the waiting, or not yet."""
    rounds = driver.runtime.rounds
    own, found = rounds._tp_group, []
    try:
        for first_waits in (1.0, 0.0):
            rounds._tp_group = _FirstRank(first_waits)
            rounds.order_came()
            found.append(rounds.flush_waits())
    finally:
        rounds._tp_group = own
    return [*found, rounds.flush_waits()]


def test_the_first_rank_says_whether_a_flush_waits(start_engine: StartEngine) -> None:
    assert start_engine().call(_a_flush_that_the_first_rank_awaits) == [True, False, False]

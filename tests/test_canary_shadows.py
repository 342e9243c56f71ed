"""The canary's shadows: in nobody's way, and dropped where they cannot go on.

Every test ends in Driver.settle, where SGLang's strict memory check raises on a leak, and the driver
raises where anything of a shadow is streamed.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from canary_traffic import NEVER_TRIPS, begin, counted_since, counts_of, rag
from eight_chunks import CHUNKS, QUESTION, SYSTEM
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens
from retraction import retract

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

# --- in nobody's way ---


def _a_request_that_waits(driver: Driver) -> tuple[bool, int, tuple[int, int]]:
    before = begin(driver)
    driver.ask(rag(1, 0))
    time.sleep(0.1)  # longer than background work keeps quiet
    req = driver.submit(Prompt([random_tokens(5, 30)]))
    driver.step()
    pending = driver.runtime.canary.num_pending
    return bool(req.finished()), pending, counted_since(driver, before)


def test_a_waiting_request_goes_before_a_shadow(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_a_request_that_waits) == (True, 1, (1, 0))


def _a_request_between_two_steps(driver: Driver) -> tuple[int, list[int]]:
    """Send a request after a shadow's first step; return when it was done, and the steps' sizes."""
    from sgl_blend.engine.requests import step_range

    before = begin(driver)
    sizes: list[int] = []

    def step() -> None:
        driver.step()
        batch = driver.scheduler.last_batch
        own = [req for req in batch.reqs if req.rid.startswith("sgl-blend-")] if batch else []
        if own:
            assert len(batch.reqs) == 1, "a shadow shared its batch"
            assert driver.scheduler.chunked_req is None, "a shadow was cut"
            start, stop = step_range(own[0])
            sizes.append(stop - start)

    def step_until(done: Callable[[], bool]) -> int:
        for rounds in range(10**5):
            if done():
                return rounds
            step()
        raise AssertionError("not done after 100,000 rounds")

    canary = driver.runtime.canary
    driver.ask(rag(1, 0, 2))
    step_until(lambda: len(sizes) == 1)
    req = driver.submit(Prompt([random_tokens(5, 30)]))
    rounds = step_until(req.finished)
    assert counts_of(driver) == before
    step_until(lambda: canary.num_pending == 0 and not canary.is_running)
    assert counted_since(driver, before) == (1, 0)
    return rounds, sizes


def test_a_request_waits_for_one_step_of_a_shadow_at_most(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, chunked_prefill_size=128)
    rounds, sizes = engine.call(_a_request_between_two_steps)
    assert rounds == 1
    assert sizes == [128, 128, 44]  # 300 tokens


def _steps_while_another_decodes(driver: Driver) -> list[bool]:
    """Tell for each round in which a request decodes whether a shadow ran in it instead."""
    before = begin(driver)
    driver.ask(rag(1, 0, 2))
    decoding = driver.submit(Prompt([random_tokens(3, 30)], max_new_tokens=400))
    driver.run_until(lambda: driver.runtime.canary.is_running, limit=10**5)
    rounds = []
    while counts_of(driver) == before:
        assert not decoding.finished()
        rounds.append(driver.runtime.canary.is_running)
        driver.step()
    driver.run_until(decoding.finished)
    driver.settle()
    return rounds


def test_requests_decode_between_the_steps_of_a_shadow(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, chunked_prefill_size=128)
    rounds = engine.call(_steps_while_another_decodes)
    assert sum(rounds) == 3  # 300 tokens
    assert not any(a and b for a, b in itertools.pairwise(rounds))


def _a_request_that_turns_up(driver: Driver, place: int) -> tuple[list[str], tuple[int, int]]:
    """Queue a request beside an offered shadow, as SGLang does when a grammar is compiled."""
    before = begin(driver)
    driver.ask(rag(1, 0))
    time.sleep(0.1)
    canary, scheduler = driver.runtime.canary, driver.scheduler
    offer = canary.offer

    def offer_beside_a_request(now: Any) -> bool:
        is_free = bool(offer(now))
        assert len(scheduler.waiting_queue) == 1, "no shadow was offered"
        scheduler.waiting_queue.insert(place, driver.submit(Prompt([random_tokens(5, 30)])))
        scheduler.waiting_queue.pop()
        return is_free

    canary.offer = offer_beside_a_request
    try:
        driver.step()
    finally:
        canary.offer = offer
    first = [req.rid.split("-")[0] for req in scheduler.last_batch.reqs]
    return first, counted_since(driver, before)


@pytest.mark.parametrize(("place", "first"), [(0, "test"), (1, "sgl")])
def test_a_shadow_shares_its_batch_with_nobody(
    start_engine: StartEngine, place: int, first: str
) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_a_request_that_turns_up, place) == ([first], (1, 0))


def _chunks_and_shadows_pending(driver: Driver) -> list[str]:
    begin(driver)
    fresh = rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[2], random_tokens(70, 80)], QUESTION)
    driver.ask(fresh)
    assert driver.runtime.builder.num_pending == 1
    assert driver.runtime.canary.num_pending == 1
    ran = []
    for _ in range(10**5):
        if not driver.runtime.builder.num_pending and not driver.runtime.canary.num_pending:
            break
        if driver.step():
            ran += [req.rid.split("-")[2] for req in driver.scheduler.last_batch.reqs]
    driver.settle()
    return [kind for kind in ran if kind in ("build", "shadow")]


def test_missing_chunks_are_built_before_shadows_run(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_chunks_and_shadows_pending) == ["build", "shadow"]


# --- dropped ---


def _shadow_without_room(driver: Driver) -> tuple[bool, tuple[int, int]]:
    before = begin(driver)
    driver.ask(rag(1, 0))
    large = driver.submit(Prompt([random_tokens(6, 1000)], max_new_tokens=250))
    while driver.runtime.canary.num_pending and not large.finished():
        driver.step()
        time.sleep(0.01)  # what pays for a shadow is time, and a fast machine decodes in less
    decoding = not large.finished()
    driver.run_until(large.finished)
    return decoding, counted_since(driver, before)


def test_a_shadow_that_does_not_fit_is_dropped(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, max_total_tokens=1300, chunked_prefill_size=256)
    decoding, counted = engine.call(_shadow_without_room)
    assert decoding, "the pool was free again, the test shows nothing"
    assert counted == (0, 1)


def _serve_under_pressure(driver: Driver) -> tuple[int, tuple[int, int]]:
    before = counts_of(driver)
    blended = 0
    for turn in range(30):
        a, b, c, d = ((turn * 3 + i * 5) % 8 for i in range(4))
        prompts = [rag(a, b, c, d, max_new_tokens=9), rag(d, c, b, a, salt="b", max_new_tokens=9)]
        blended += sum(answer.report["reused_tokens"] > 0 for answer in driver.ask(*prompts))
        time.sleep(0.06)
        for _ in range(turn % 5):
            driver.step()
        if turn % 3 == 0:
            driver.settle()
    return blended, counted_since(driver, before)


def test_every_picked_request_is_compared_or_counted_as_skipped(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, max_total_tokens=1300, chunked_prefill_size=256)
    blended, (compared, skipped) = engine.call(_serve_under_pressure)
    assert compared > 5
    assert compared + skipped == blended


def _flush_with_a_pending_shadow(driver: Driver) -> tuple[int, int]:
    before = begin(driver)
    driver.ask(rag(1, 0))
    assert driver.runtime.canary.num_pending == 1
    driver.step()  # the request's batch is cleared away
    driver.flush()
    return counted_since(driver, before)


def test_a_flush_drops_pending_shadows(start_engine: StartEngine) -> None:
    assert start_engine(**NEVER_TRIPS).call(_flush_with_a_pending_shadow) == (0, 1)


def _flush_after_a_shadow(driver: Driver) -> tuple[bool, tuple[int, int]]:
    before = begin(driver)
    driver.ask(rag(1, 0))
    driver.run_until(lambda: driver.runtime.canary.is_running, limit=10**5)
    flushed = bool(driver.scheduler.flush_cache())
    return flushed, counted_since(driver, before)


def test_a_running_shadow_does_not_stand_in_the_way_of_a_flush(start_engine: StartEngine) -> None:
    # Its forward has run, so its answer is there: it is compared before the cache is empty.
    assert start_engine(**NEVER_TRIPS).call(_flush_after_a_shadow) == (True, (1, 0))


def _new_weights_with_a_pending_shadow(driver: Driver, model: str) -> tuple[int, int]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    before = begin(driver)
    driver.ask(rag(1, 0))
    driver.step()
    update = UpdateWeightFromDiskReqInput(model_path=model, load_format="auto", flush_cache=False)
    assert driver.scheduler.weight_updater.update_weights_from_disk(update).success
    return counted_since(driver, before)


def test_an_answer_of_old_weights_is_not_compared_with_one_of_new_weights(
    start_engine: StartEngine, model_folder: Path
) -> None:
    engine = start_engine(**NEVER_TRIPS)
    counted = engine.call(_new_weights_with_a_pending_shadow, str(model_folder / "llama"))
    assert counted == (0, 1)


def _launch_a_shadow(driver: Driver) -> tuple[Any, Any]:
    """Run a shadow's forward and leave its result unprocessed, as the overlap schedule does."""
    driver.ask(rag(1, 0))
    time.sleep(0.1)
    scheduler = driver.scheduler
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch, scheduler.last_batch = plan.running_batch, plan.batch_to_run
    assert driver.runtime.canary.is_running
    return plan.batch_to_run, scheduler.run_batch(plan.batch_to_run)


def _abort_a_shadow(driver: Driver) -> tuple[int, int]:
    from sglang.srt.managers.io_struct import AbortReq

    before = begin(driver)
    batch, result = _launch_a_shadow(driver)
    driver.scheduler.abort_request(AbortReq(rid="", abort_all=True))
    driver.scheduler.process_batch_result(batch, result)
    return counted_since(driver, before)


def _retract_a_shadow(driver: Driver) -> tuple[int, int]:
    before = begin(driver)
    batch, result = _launch_a_shadow(driver)
    retract(driver, batch.reqs)
    driver.scheduler.process_batch_result(batch, result)
    driver.scheduler.last_batch = None
    return counted_since(driver, before)


def _drop_and_retract_a_shadow(driver: Driver) -> tuple[int, int]:
    canary = driver.runtime.canary
    capture = canary.capture

    def drop_after_the_launch(*args: Any) -> None:
        capture(*args)
        if canary.is_running:
            canary.forget()

    canary.capture = drop_after_the_launch
    try:
        return _retract_a_shadow(driver)
    finally:
        canary.capture = capture


@pytest.mark.parametrize("fate", [_abort_a_shadow, _retract_a_shadow, _drop_and_retract_a_shadow])
def test_a_shadow_that_is_taken_away_is_forgotten(start_engine: StartEngine, fate: Any) -> None:
    assert start_engine(**NEVER_TRIPS).call(fate) == (0, 1)

"""What an operator orders while background builds run, seen from inside; over HTTP: test_operator.py.

Every test ends in Driver.settle: SGLang's own strict memory check runs at idle and raises on a leak.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, largest_difference, namespace_of, rag_prompt, random_tokens
from orders import order
from tiny_models import make_model

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 150) for i in range(6)]
QUESTION = random_tokens(99, 20)
STEP = 64
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def rag(*numbers: int, **rest: Any) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, **rest)


def settings(overlap: bool, **rest: Any) -> dict[str, Any]:
    return {"chunked_prefill_size": STEP, "disable_overlap_schedule": not overlap, **rest}


def begin_build(driver: Driver) -> Any:
    """Ask for chunks that are missing, and run until the second step of their builds is in flight."""
    driver.settle()
    driver.flush()
    driver.ask(rag(0, 1))
    builder = driver.runtime.builder
    before = builder.num_steps
    driver.run_until(lambda: builder.num_steps > before + 1, limit=10**5)
    assert driver.scheduler.last_batch.reqs
    return builder


# --- one step at a time ---


def _all_that_is_cut(driver: Driver) -> tuple[int, list[int]]:
    builder = driver.runtime.builder
    before, rows = builder.num_steps, []
    done = driver.submit(rag(0, 1))
    for _ in range(10**5):
        driver.step()
        chunked = driver.scheduler.chunked_req
        assert chunked is None or chunked.rid == done.rid, "a build was cut by chunked prefill"
        batch = driver.scheduler.last_batch
        if batch is not None:
            own = [req for req in batch.reqs if req.rid.startswith(builder.rid_prefix)]
            rows += [len(req.origin_input_ids) for req in own]
        if done.finished() and not builder.num_unfinished:
            break
    driver.settle()
    return builder.num_steps - before, rows


@OVERLAP
@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_a_build_is_requests_of_one_step_each(
    start_engine: StartEngine, on_miss: str, overlap: bool
) -> None:
    engine = start_engine(**settings(overlap, blend_on_miss=on_miss))
    engine.flush()
    steps, stops = engine.call(_all_that_is_cut)
    # The build prefix, and 150 tokens after it for each of two chunks.
    assert steps == 1 + 2 * 3
    assert sorted(stops) == sorted([40, *2 * [104, 168, 190]])


def _rounds_of_a_short_request(driver: Driver) -> int:
    begin_build(driver)
    short = driver.submit(Prompt([random_tokens(5, 20)], salt="short"))
    rounds = 0
    while not short.output_ids:
        driver.step()
        rounds += 1
    driver.settle()
    return rounds


@OVERLAP
def test_a_short_request_waits_for_one_step_of_a_long_build(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(**settings(overlap))
    engine.flush()
    # With overlap its result is looked at in the round after the one that ran it.
    assert engine.call(_rounds_of_a_short_request) == (2 if overlap else 1)


# --- flush, pause ---


def _flush_twice(driver: Driver) -> list[tuple[bool, int]]:
    seen = []
    for _ in range(2):
        begin_build(driver)
        flushed = order(driver, "FlushCacheReqInput").success
        seen.append((flushed, driver.runtime.builder.num_unfinished))
        again = order(driver, "FlushCacheReqInput").success
        seen.append((again, driver.runtime.builder.num_unfinished))
        driver.settle()
    return seen


@OVERLAP
def test_a_flush_takes_back_what_is_in_flight(start_engine: StartEngine, overlap: bool) -> None:
    assert start_engine(**settings(overlap)).call(_flush_twice) == 4 * [(True, 0)]


def _flush_with_a_timeout(driver: Driver) -> tuple[bool, int]:
    begin_build(driver)
    decoding = driver.submit(Prompt([random_tokens(6, 30)], max_new_tokens=12))
    driver.run_until(lambda: len(decoding.output_ids) > 1)
    order(driver, "FlushCacheReqInput", timeout_s=60.0)
    before = driver.runtime.builder.num_steps
    driver.run_until(decoding.finished)
    for _ in range(4):
        driver.step()
        driver.scheduler.process_input_requests([])
    waiting = driver.scheduler.flush_wrapper._pending is not None
    steps = driver.runtime.builder.num_steps - before
    driver.settle()
    return waiting, steps


@OVERLAP
def test_a_flush_with_a_timeout_does_not_wait_for_builds(
    start_engine: StartEngine, overlap: bool
) -> None:
    assert start_engine(**settings(overlap)).call(_flush_with_a_timeout) == (False, 0)


def _flush_while_paused(driver: Driver, mode: str) -> bool:
    begin_build(driver)
    order(driver, "PauseGenerationReqInput", mode=mode)
    flushed = order(driver, "FlushCacheReqInput").success
    order(driver, "ContinueGenerationReqInput")
    driver.settle()
    assert driver.ask(rag(2, 3))[0].finish == "FINISH_LENGTH"
    driver.settle()
    return bool(flushed)


@OVERLAP
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_server_is_flushed(start_engine: StartEngine, overlap: bool, mode: str) -> None:
    assert start_engine(**settings(overlap)).call(_flush_while_paused, mode)


# --- memory ---


def _release(driver: Driver, tags: list[str] | None) -> tuple[int, int, int]:
    builder = begin_build(driver)
    order(driver, "ReleaseMemoryOccupationReqInput", tags=tags)
    pending, before = builder.num_unfinished, builder.num_steps
    for _ in range(300):
        driver.step()
    meanwhile = builder.num_steps - before
    order(driver, "ResumeMemoryOccupationReqInput", tags=tags)
    driver.settle()
    return pending, meanwhile, builder.num_steps - before


@OVERLAP
def test_nothing_is_built_while_weights_are_released(
    start_engine: StartEngine, overlap: bool
) -> None:
    pending, meanwhile, later = start_engine(**settings(overlap)).call(_release, ["weights"])
    assert pending > 0
    assert meanwhile == 0
    assert later > 0


@OVERLAP
def test_what_was_pending_is_forgotten_with_the_cache(
    start_engine: StartEngine, overlap: bool
) -> None:
    assert start_engine(**settings(overlap)).call(_release, None) == (0, 0, 0)


# --- weights ---


@contextlib.contextmanager
def other_weights(driver: Driver, own: str, other: str) -> Any:
    """Serve other weights for the time of a with block."""

    def update(path: str, *, flush: bool) -> None:
        fields = {"model_path": path, "load_format": "auto", "flush_cache": flush}
        answer = order(driver, "UpdateWeightFromDiskReqInput", **fields)
        assert answer.success, answer.message

    update(other, flush=False)
    try:
        yield
    finally:
        driver.settle()
        update(own, flush=True)


def _chunks_of_old_weights(driver: Driver, own: str, other: str) -> dict[str, Any]:
    driver.ask(rag(0, 1))
    driver.settle()
    half = rag(1, 0, params={"sgl_blend_ratio": 0.5})
    assert driver.ask(half)[0].report["chunk_hits"] == 2
    driver.ask(Prompt([half.tokens]))  # the client's exact namespace holds the whole prompt
    old = driver.runtime.describe()["model_fingerprint"]
    driver.settle()
    queued = driver.submit(half)
    with other_weights(driver, own, other):
        new = driver.runtime.describe()["model_fingerprint"]
        driver.run_until(queued.finished)
        fresh = driver.ask(rag(0, 1))[0]
        driver.settle()
        later = driver.ask(rag(1, 0, params={"sgl_blend_ratio": 1.0}))[0]
        full = driver.ask(Prompt([rag(1, 0).tokens], salt="reference"))[0]
    return {
        "renewed": old != new and new in namespace_of(queued),
        "queued": driver.answer(queued).report,
        "fresh": fresh.report,
        "later": later.report,
        "difference": largest_difference(later.logprobs[0], full.logprobs[0]),
    }


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_chunks_of_old_weights_are_never_used_again(
    start_engine: StartEngine, model_folder: Path, on_miss: str
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(blend_on_miss=on_miss)
    seen = engine.call(_chunks_of_old_weights, str(model_folder / "llama"), str(other))
    assert seen["renewed"]
    if on_miss == "compute":
        assert seen["queued"]["prefix_tokens"] == seen["queued"]["reused_tokens"] == 0
        assert seen["queued"]["chunk_hits"] == seen["fresh"]["chunk_hits"] == 0
    assert seen["later"]["chunk_hits"] == 2
    assert seen["difference"] <= 1e-4


def _weights_that_change_in_the_middle(driver: Driver, own: str, other: str) -> dict[str, Any]:
    driver.ask(rag(0, 1, 2))
    driver.settle()
    driver.ask(rag(2, 1, 0))  # the build prefix is exact, its chunk too
    driver.settle()
    req = driver.submit(rag(1, 2, 0, params={"sgl_blend_ratio": 0.2}))
    driver.run_until(lambda: driver.scheduler.chunked_req is req)
    assert driver.locked_tokens() > 0
    before = driver.answer(req).report["reused_tokens"]
    with other_weights(driver, own, other):
        driver.run_until(req.finished)
    return {"before": before, **driver.answer(req).report}


def test_a_prefill_goes_on_without_chunks_of_old_weights(
    start_engine: StartEngine, model_folder: Path
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(**settings(False))
    seen = engine.call(_weights_that_change_in_the_middle, str(model_folder / "llama"), str(other))
    assert seen["reused_tokens"] == seen["before"], "old chunk KV was copied after the update"
    assert seen["computed_tokens"] > 0


# --- what a request holds ---


def _exact_prefix_alone(driver: Driver) -> dict[str, Any]:
    driver.ask(rag(0, 1))
    driver.settle()
    driver.ask(Prompt([rag(0, 1).tokens], max_new_tokens=2))  # the exact namespace knows it all
    driver.settle()
    before = driver.runtime.describe()
    uses: list[Any] = []
    hit = driver.runtime.admission._shares.hit
    driver.runtime.admission._shares.hit = uses.append
    try:
        answer = driver.ask(rag(0, 1, params={"sgl_blend_ratio": 0.3}))[0]
    finally:
        driver.runtime.admission._shares.hit = hit
    after = driver.runtime.describe()
    driver.settle()
    return {
        **answer.report,
        "blended": after["blended"] - before["blended"],
        "uses": len(uses),
    }


def test_a_request_that_reuses_nothing_is_not_counted_as_blended(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.flush()
    report = engine.call(_exact_prefix_alone)
    assert report["prefix_tokens"] == report["prompt_tokens"] - 1
    assert report["reused_tokens"] == report["recomputed_tokens"] == 0
    assert report["fallback"] == "cached"
    assert (report["blended"], report["uses"], report["chunk_hits"]) == (0, 0, 0)


def _aborted_by_stock(driver: Driver) -> str:
    received = driver.receive(rag(0, 1))
    received.input_ids.extend([9] * driver.scheduler.max_req_input_len)
    req = driver.hand_over(received)
    driver.run_until(req.finished)
    driver.settle()
    return str(driver.answer(req).report["fallback"])


def test_what_stock_aborts_is_not_called_malformed(start_engine: StartEngine) -> None:
    assert start_engine().call(_aborted_by_stock) == "aborted"


def _retracted_after_its_forward(driver: Driver) -> tuple[int, int]:
    """Retract a blended request whose prefill was launched and not looked at, as overlap does."""
    driver.ask(rag(0, 1))
    driver.settle()
    req = driver.submit(rag(1, 0, max_new_tokens=8))
    state = req.sgl_blend
    driver.step()
    assert driver.scheduler.result_queue, "the result was looked at, the test shows nothing"
    driver.runtime.release(req)  # what SGLang's release_kv_cache calls
    retired = len(state.retired)
    driver.run_until(req.finished)
    driver.settle()
    return retired, len(state.retired)


def test_a_plan_outlives_its_queued_forward(start_engine: StartEngine) -> None:
    engine = start_engine(disable_overlap_schedule=False)
    engine.flush()
    retired, later = engine.call(_retracted_after_its_forward)
    assert retired == 1, "tensors went while a queued forward reads them"
    assert later == 0


# --- what pending builds hold ---


def _enqueue_many(driver: Driver, salts: Callable[[int], str]) -> tuple[int, int, int]:
    driver.settle()
    builder = driver.runtime.builder
    forgotten = builder.num_forgotten
    for number in range(40):
        prompt = rag_prompt(SYSTEM, [random_tokens(700 + number, 900)], QUESTION)
        prompt.salt = salts(number)
        req = driver.submit(prompt)
        builder.enqueue(req.sgl_blend.keys)
        driver.scheduler.waiting_queue.clear()
    held = builder.pending_bytes
    return held, builder.num_forgotten - forgotten, builder.num_pending


def _one_salt(number: int) -> str:
    return "one"


def _many_salts(number: int) -> str:
    return f"salt {number}"


@pytest.mark.parametrize("salts", [_one_salt, _many_salts])
def test_pending_builds_hold_no_more_bytes_than_two_pools_of_tokens(
    start_engine: StartEngine, salts: Callable[[int], str]
) -> None:
    engine = start_engine()
    engine.flush()
    held, forgotten, pending = engine.call(_enqueue_many, salts)
    assert 0 < held <= 2 * 6000 * 8
    assert forgotten > 0
    assert forgotten + pending == 40
    engine.call(Driver.settle)

"""L5: no slot and no lock outlives its request: abort, retraction, flush, eviction, starvation.

Every test ends in Driver.settle: SGLang's own strict memory check runs at idle and raises on a leak.
"""

from collections.abc import Callable
from typing import Any

import pytest
from eight_chunks import CHUNKS, SYSTEM, rag
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, largest_difference, rag_prompt, random_tokens
from law_prompts import served_kind

__all__ = ["model_folder", "served_kind", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _abort(driver: Driver, rid: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    driver.scheduler.abort_request(AbortReq(rid=rid))


# --- abort ---


def _abort_while_waiting(driver: Driver) -> None:
    reqs = [driver.submit(rag(0, 1)), driver.submit(rag(1, 0))]
    for req in reqs:
        _abort(driver, req.rid)
    assert driver.scheduler.waiting_queue == []
    driver.settle()


def _abort_while_decoding(driver: Driver) -> None:
    driver.ask(rag(0, 1))
    driver.settle()
    req = driver.submit(rag(1, 0, max_new_tokens=50))
    driver.run_until(lambda: len(req.output_ids) >= 2)
    assert req.sgl_blend.report.chunk_hits == 2
    _abort(driver, req.rid)
    driver.run_until(req.finished)
    driver.settle()


def _abort_between_chunked_steps(driver: Driver) -> None:
    driver.ask(rag(0, 1, 2))
    driver.settle()
    req = driver.submit(rag(2, 1, 0, max_new_tokens=5))
    driver.run_until(lambda: driver.scheduler.chunked_req is req)
    assert driver.locked_tokens() > 0, "the plan's chunks are not locked"
    _abort(driver, req.rid)
    driver.run_until(req.finished)
    driver.settle()


def _abort_while_its_chunks_are_built(driver: Driver) -> None:
    req = driver.submit(rag(3, 4, 5))
    driver.step()  # the build prefix
    assert driver.runtime.builder.in_flight
    _abort(driver, req.rid)
    driver.settle()
    assert driver.ask(rag(4, 3))[0].report["chunk_hits"] == 2


def test_abort_in_the_queue(start_engine: StartEngine) -> None:
    start_engine().call(_abort_while_waiting)


def test_abort_while_decoding(start_engine: StartEngine) -> None:
    start_engine().call(_abort_while_decoding)


def test_abort_between_the_steps_of_a_chunked_prefill(start_engine: StartEngine) -> None:
    start_engine(chunked_prefill_size=64).call(_abort_between_chunked_steps)


def test_abort_while_chunks_are_built(start_engine: StartEngine) -> None:
    start_engine(blend_on_miss="build").call(_abort_while_its_chunks_are_built)


@pytest.mark.slow
@pytest.mark.parametrize(
    "abort",
    [
        _abort_while_waiting,
        _abort_while_its_chunks_are_built,
        _abort_between_chunked_steps,
        _abort_while_decoding,
    ],
)
def test_l5_an_abort_leaves_nothing_in_any_model(
    start_engine: StartEngine, served_kind: str, abort: Callable[[Driver], None]
) -> None:
    engine = start_engine(served_kind, blend_on_miss="build", chunked_prefill_size=64)
    engine.flush()
    engine.call(abort)


# --- retraction ---


def _retract(driver: Driver, ratio: float) -> tuple[int, list[Any], list[Any]]:
    driver.ask(rag(0, 1))
    driver.settle()
    # Each decodes as far as it is allowed, together they do not fit: SGLang has to retract.
    params = {"sgl_blend_ratio": ratio}
    prompts = [
        rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[0]], random_tokens(70 + i, 5), max_new_tokens=120)
        for i in range(9)
    ]
    for prompt in prompts:
        prompt.params = params
        prompt.ignore_eos = False  # SGLang 0.5.23 sets the whole length aside for who ignores it
    reqs = [driver.submit(prompt) for prompt in prompts]
    driver.run_until(lambda: all(req.finished() for req in reqs))
    retracted = sum(req.retraction_count for req in reqs)
    answers = [driver.answer(req) for req in reqs]
    driver.settle()
    driver.flush()
    references = [
        Prompt([prompt.tokens], max_new_tokens=120, salt="reference", ignore_eos=False)
        for prompt in prompts
    ]
    full = [driver.ask(reference)[0] for reference in references]
    driver.settle()
    return retracted, answers, full


def test_retraction_gives_locks_back_and_answers_stay_exact(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=640, schedule_conservativeness=0.05)

    retracted, answers, full = engine.call(_retract, 1.0)

    assert retracted > 0, "nothing was retracted, the test shows nothing"
    for got, want in zip(answers, full, strict=True):
        assert got.output_ids == want.output_ids
        report = got.report
        counts = [
            report[f"{kind}_tokens"] for kind in ("prefix", "reused", "recomputed", "computed")
        ]
        assert sum(counts) == report["prompt_tokens"]


# --- flush ---


def _flush_with_pending_builds(driver: Driver) -> tuple[int, int]:
    driver.ask(rag(0, 1, 2, 3))
    pending = driver.runtime.builder.num_pending
    driver.step()  # the request's batch is cleared away
    driver.flush()
    driver.settle()
    return pending, driver.runtime.builder.num_built


def test_flush_empties_the_cache_and_forgets_pending_builds(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=4000)
    pending, built = engine.call(_flush_with_pending_builds)
    assert pending == 4
    assert built == 0, "chunks of a flushed cache were built again"


# --- memory pressure ---


def _serve_under_pressure(driver: Driver) -> int:
    hits = 0
    for turn in range(40):
        order = [(turn * 3 + i * 5) % 8 for i in range(4)]
        prompts = [
            rag(*order, params={"sgl_blend_ratio": 1.0}),
            rag(*order[::-1], params={"sgl_blend_ratio": 1.0}, salt="b"),
        ]
        for prompt, answer in zip(prompts, driver.ask(*prompts), strict=True):
            hits += answer.report["chunk_hits"]
            full = driver.ask(Prompt([prompt.tokens], salt="reference"))[0]
            assert largest_difference(answer.logprobs[0], full.logprobs[0]) <= 1e-4
        driver.settle()
    return hits


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_answers_stay_right_while_chunks_are_evicted_all_the_time(
    start_engine: StartEngine, on_miss: str
) -> None:
    engine = start_engine(blend_on_miss=on_miss, max_total_tokens=1300)
    assert engine.call(_serve_under_pressure) > 0


@pytest.mark.parametrize("on_miss", ["compute", "build"])
@pytest.mark.parametrize("pool", [420, 520, 640, 800])
def test_a_pool_too_small_for_chunks_and_request_still_answers(
    start_engine: StartEngine, on_miss: str, pool: int
) -> None:
    # The prompt has 380 tokens and its chunks as many again: a plan cannot be kept at all sizes.
    engine = start_engine(blend_on_miss=on_miss, max_total_tokens=pool)
    for _ in range(3):
        answer = engine.ask(rag(0, 1, 2, 3))[0]
        assert answer.finish == "FINISH_LENGTH"
        engine.settle()
    assert answer.report["prompt_tokens"] == 380

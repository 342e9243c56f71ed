"""Requests that do not fit beside background work are admitted as soon as it is over.

SGLang remembers that its running batch is full until a request of it ends. Nothing of that may outlive
the steps of builds, which leave the batch before SGLang sees them end.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, largest_difference, rag_prompt, random_tokens
from orders import order
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_orders import OVERLAP, begin_build, settings

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
QUESTION = random_tokens(99, 20)
SHORTEST_FIRST = hasattr(SchedulePolicy, "shortest_prefill_chunk_limit")
ROUNDS = 60
"""Many more than any of these requests needs."""


def _is_served(driver: Driver, prompt: Prompt) -> bool:
    """Tell whether a request is answered within so many rounds."""
    req = driver.submit(prompt)
    for _ in range(ROUNDS):
        driver.step()
        if req.finished():
            break
    served: bool = req.finished()
    # As a pause and its end would: no test after this one may suffer.
    driver.scheduler.running_batch.batch_is_full = False
    driver.settle()
    return served


def _ask_what_just_fits(driver: Driver, seed: int) -> bool:
    """Submit a request that needs the whole pool while a build's step holds a part of it."""
    begin_build(driver)
    capacity = driver.runtime.describe()["pool"]["capacity"]
    return _is_served(driver, Prompt([random_tokens(seed, capacity - 10)], logprobs=False))


@OVERLAP
def test_a_request_that_did_not_fit_beside_a_step_is_admitted_after_it(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(**settings(overlap, max_total_tokens=700))
    assert all(engine.call(_ask_what_just_fits, 500 + i) for i in range(3))


def _build_in_every_row(driver: Driver, chunks: int) -> bool:
    driver.settle()
    driver.flush()
    prompt = rag_prompt(SYSTEM, [random_tokens(700 + i, 33) for i in range(chunks)], QUESTION)
    return _is_served(driver, prompt)


@OVERLAP
@pytest.mark.parametrize("chunks", [3, 4, 5, 9])
def test_builds_may_take_every_row(start_engine: StartEngine, overlap: bool, chunks: int) -> None:
    engine = start_engine(
        blend_on_miss="build",
        max_running_requests=4,
        disable_overlap_schedule=not overlap,
        blend_min_chunk_tokens=32,
    )
    assert engine.call(_build_in_every_row, chunks)


def _order_after_every_batch(driver: Driver) -> int:
    """Send short requests, and an order after each round."""
    driver.settle()
    reqs = [driver.submit(Prompt([random_tokens(800 + i, 60)], logprobs=False)) for i in range(9)]
    for _ in range(ROUNDS):
        driver.step()
        driver.runtime.step_aside(driver.scheduler)
        if all(req.finished() for req in reqs):
            break
    served: int = sum(req.finished() for req in reqs)
    driver.scheduler.running_batch.batch_is_full = False
    driver.settle()
    return served


@OVERLAP
def test_orders_between_batches_that_take_every_row_keep_nobody_out(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(max_running_requests=2, disable_overlap_schedule=not overlap)
    assert engine.call(_order_after_every_batch) == 9


def _order_beside_one_who_decodes(driver: Driver) -> tuple[int, bool]:
    """Send short requests into the one row that is left, and an order after each round."""
    driver.settle()
    long = driver.submit(Prompt([random_tokens(850, 60)], max_new_tokens=40, logprobs=False))
    driver.run_until(lambda: len(long.output_ids) > 1)
    reqs = [driver.submit(Prompt([random_tokens(860 + i, 60)], logprobs=False)) for i in range(5)]
    for _ in range(20):
        driver.step()
        driver.runtime.step_aside(driver.scheduler)
    served: int = sum(req.finished() for req in reqs)
    decodes = not long.finished()
    driver.settle()
    return served, decodes


@OVERLAP
def test_orders_keep_nobody_out_beside_one_who_decodes(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(max_running_requests=2, disable_overlap_schedule=not overlap)
    assert engine.call(_order_beside_one_who_decodes) == (5, True)


def _withdraw(driver: Driver) -> tuple[int, int]:
    """Return how many requests wait after a step was offered, and after it was taken back."""
    from sgl_blend.scheduler.rounds import Round

    driver.settle()
    driver.flush()
    driver.ask(rag_prompt(SYSTEM, [random_tokens(900, 200)], QUESTION, logprobs=False))
    driver.runtime.step_aside(driver.scheduler)
    builder = driver.runtime.builder
    now = Round(
        now_s=0.0,
        is_waited_in=False,
        is_decoded_in=False,
        is_open=True,
        holds_first_tokens=False,
        quiet_until_s=-1.0,
    )
    builder.offer(now)
    offered = len(driver.scheduler.waiting_queue)
    assert not builder.withdraw(now)
    left = len(driver.scheduler.waiting_queue)
    driver.scheduler.waiting_queue.clear()
    driver.settle()
    return offered, left


def test_a_step_that_was_not_admitted_leaves_the_queue(start_engine: StartEngine) -> None:
    assert start_engine().call(_withdraw) == (1, 0)


def _beside(driver: Driver, policy: str, plain_tokens: int) -> tuple[Any, list[float]]:
    """Blend a prompt whose chunks are stored, admitted in the round of another one or alone."""
    prompt = rag_prompt(
        SYSTEM,
        [random_tokens(600 + i, 120) for i in range(4)],
        QUESTION,
        params={"sgl_blend_ratio": 0.1, "sgl_blend_policy": policy},
    )
    reorder = replace(prompt, segments=[prompt.segments[i] for i in (0, 3, 2, 4, 1, 5)])
    driver.ask(prompt)
    driver.settle()
    if plain_tokens:
        driver.submit(Prompt([random_tokens(300 + plain_tokens, plain_tokens)], logprobs=False))
    req = driver.submit(reorder)
    driver.run_until(req.finished)
    answer = driver.answer(req)
    driver.settle()
    return answer.report, answer.logprobs[0]


@pytest.mark.parametrize("plain_tokens", [30, 100, 250, 300])
@pytest.mark.parametrize("policy", ["hkvd", "funnel"])
def test_with_build_who_shares_the_prefill_chunk_changes_no_answer(
    start_engine: StartEngine, policy: str, plain_tokens: int
) -> None:
    engine = start_engine(blend_on_miss="build", chunked_prefill_size=320)
    alone = engine.call(_beside, policy, 0)
    assert alone[0]["reused_tokens"] > 100
    beside = engine.call(_beside, policy, plain_tokens)
    assert beside[0] == alone[0]
    # With funnel both may fit one batch, and SGLang's own products round by its size.
    assert largest_difference(beside[1], alone[1]) <= (0.0 if policy == "hkvd" else 1e-4)


def _cut_after_a_retraction(driver: Driver) -> tuple[bool, int]:
    """Retract a blended request, build its chunks anew, and admit it in the round of another one."""
    driver.settle()
    driver.flush()
    chunks = [random_tokens(640 + i, 60) for i in range(2)]
    req = driver.submit(rag_prompt(SYSTEM, chunks, QUESTION, max_new_tokens=90, logprobs=False))
    driver.run_until(lambda: len(req.output_ids) > 60)
    order(driver, "PauseGenerationReqInput", mode="retract")
    # A flush would do on newer versions; 0.5.17 flushes nothing while a request waits.
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=10**6))
    order(driver, "ContinueGenerationReqInput")
    builder, before = driver.runtime.builder, driver.runtime.builder.num_steps
    driver.run_until(lambda: builder.num_steps == before + 1 + len(chunks))
    # Prompt and answer take more than what this one leaves of the batch, the prompt alone does not.
    driver.submit(Prompt([random_tokens(660, 110)], logprobs=False))
    queue = driver.scheduler.waiting_queue
    queue.reverse()
    assert queue[1:] == [req]
    cut = False
    while not req.finished():
        driver.step()
        cut = cut or driver.scheduler.chunked_req is req
    reused = driver.answer(req).report["reused_tokens"]
    driver.settle()
    return cut, reused


def test_with_build_a_retracted_request_is_cut_as_alone(start_engine: StartEngine) -> None:
    engine = start_engine(
        blend_on_miss="build", chunked_prefill_size=320, disable_overlap_schedule=True
    )
    cut, reused = engine.call(_cut_after_a_retraction)
    assert reused > 0
    assert not cut


def _beside_short_ones(driver: Driver, policy: str, others: int) -> tuple[Any, list[float]]:
    """Blend a prompt that takes several steps, while short requests arrive, or alone."""
    prompt = rag_prompt(
        SYSTEM,
        [random_tokens(600 + i, 120) for i in range(4)],
        QUESTION,
        params={"sgl_blend_ratio": 0.1, "sgl_blend_policy": policy},
    )
    reorder = replace(prompt, segments=[prompt.segments[i] for i in (0, 3, 2, 4, 1, 5)])
    driver.ask(prompt)
    driver.settle()
    req = driver.submit(reorder)
    driver.run_until(lambda: driver.scheduler.chunked_req is req)
    for number in range(others):
        driver.submit(Prompt([random_tokens(670 + number, 30)], logprobs=False))
        driver.step()
    driver.run_until(req.finished)
    answer = driver.answer(req)
    driver.settle()
    return answer.report, answer.logprobs[0]


@pytest.mark.skipif(not SHORTEST_FIRST, reason="this SGLang does not serve the shortest first")
@pytest.mark.parametrize(("policy", "step_tokens"), [("hkvd", 200), ("funnel", 120)])
def test_with_build_short_requests_cut_no_step_of_a_long_one(
    start_engine: StartEngine, policy: str, step_tokens: int
) -> None:
    engine = start_engine(
        blend_on_miss="build",
        chunked_prefill_size=step_tokens,
        schedule_policy="shortest-prefill-first",
    )
    alone = engine.call(_beside_short_ones, policy, 0)
    assert alone[0]["reused_tokens"] > 100
    beside = engine.call(_beside_short_ones, policy, 3)
    assert beside[0] == alone[0]
    assert largest_difference(beside[1], alone[1]) < 1e-3


def _rounds_beside_a_step(driver: Driver) -> tuple[int, int]:
    """Return rounds until a short request is answered while a build runs beside one who decodes."""
    driver.settle()
    driver.flush()
    long = driver.submit(
        rag_prompt(SYSTEM, [random_tokens(680, 600)], QUESTION, max_new_tokens=900, logprobs=False)
    )
    builder = driver.runtime.builder
    before = builder.num_steps

    def step() -> None:
        driver.scheduler.process_input_requests([])
        driver.step()

    with patch.object(builder._budget, "affords_step", lambda: True):  # no step waits for time
        while builder.num_steps < before + 2 and not long.finished():
            step()
    steps = builder.num_steps - before
    req = driver.submit(Prompt([random_tokens(690, 30)], logprobs=False))
    rounds = 0
    while not req.finished():
        step()
        rounds += 1
    driver.scheduler.abort_request(abort_all())
    driver.settle()
    return steps, rounds


@pytest.mark.skipif(not SHORTEST_FIRST, reason="this SGLang has no --prefill-decode-interval")
@OVERLAP
def test_no_request_waits_for_decode_rounds_because_of_a_step(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(prefill_decode_interval=300, disable_overlap_schedule=not overlap)
    steps, rounds = engine.call(_rounds_beside_a_step)
    assert steps == 2
    assert rounds < 10


def abort_all() -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid="", abort_all=True)


def _truncated(driver: Driver) -> Any:
    driver.settle()
    fallback = driver.ask(rag_prompt(SYSTEM, [random_tokens(695, 900)], QUESTION))[0].report
    driver.settle()
    return fallback["fallback"]


def test_a_prompt_that_sglang_shortens_is_called_that(start_engine: StartEngine) -> None:
    engine = start_engine(allow_auto_truncate=True, max_total_tokens=700)
    assert engine.call(_truncated) == "truncated"

"""L5 while chunks are built: what waits, what is taken back, what an adversary of the scheduler does.

Every test ends in Driver.settle: SGLang's own strict memory check runs at idle and raises on a leak.
"""

import time
from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from eight_chunks import CHUNKS, QUESTION, SYSTEM, rag
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens

from sgl_blend.radix_ext.chunk_store import ChunkKey

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _count_builds(driver: Driver) -> tuple[int, int]:
    before = driver.num_batches
    driver.ask(rag(0, 1, 2, 3, 4))
    return driver.num_batches - before, driver.runtime.builder.num_built


def test_missing_chunks_of_a_request_are_built_in_one_batch(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build", blend_policy="hkvd", max_total_tokens=5000)
    engine.flush()

    batches, _ = engine.call(_count_builds)

    assert batches == 3, (
        "expected one batch for the build prefix, one for the chunks, one to answer"
    )


def _builds_under_load(driver: Driver) -> tuple[int, int]:
    """Keep plain requests waiting all the time until both chunks of a request are built and probed."""
    driver.ask(rag(5, 6))
    rounds = 0
    waiting: list[Any] = []
    builder, prober = driver.runtime.builder, driver.runtime.prober
    # A clock turned by hand: a round takes 0.1 s, so what is paid for a step goes by rounds alone.
    clock = SimpleNamespace(monotonic=lambda: 0.1 * rounds)
    with patch("sgl_blend.scheduler.rounds.time", clock):
        while (builder.num_pending or prober.num_pending) and rounds < 5000:
            while len(driver.scheduler.waiting_queue) < 3:
                prompt = Prompt([random_tokens(1000 + len(waiting), 90)], salt="load")
                waiting.append(driver.submit(prompt))
            driver.step()
            rounds += 1
    built = builder.num_built, driver.runtime._memories.num_chunks
    driver.run_until(lambda: all(req.finished() for req in waiting))
    driver.settle()
    return built


def test_background_builds_are_not_starved_by_a_full_queue(start_engine: StartEngine) -> None:
    # In a small pool the load evicts what a build left before the build is given its next step.
    assert start_engine(max_total_tokens=200_000).call(_builds_under_load) == (2, 2)


def _order_of_builds(driver: Driver) -> list[int]:
    """Miss three chunks, then three others and one of the first again; return the order of builds."""
    driver.settle()
    driver.flush()
    builder, salt = driver.runtime.builder, driver.chunk_salt()
    keys = [
        ChunkKey(salt, None, array("q", SYSTEM).tobytes(), array("q", tokens).tobytes())
        for tokens in CHUNKS[:6]
    ]
    builder.enqueue(keys[:3])
    builder.enqueue([*keys[3:], keys[1]])
    order = []
    while builder.num_pending:
        waiting = [key for key in keys if key in builder._pending]
        driver.step()
        order += [keys.index(key) for key in waiting if key not in builder._pending]
    driver.settle()
    return order


def test_what_was_missed_last_is_built_first(start_engine: StartEngine) -> None:
    assert start_engine().call(_order_of_builds) == [3, 4, 5, 1, 0, 2]


def _pending_while_the_last_chunk_is_built(driver: Driver) -> tuple[int, int]:
    driver.ask(rag(0, 1))
    builder = driver.runtime.builder
    driver.run_until(lambda: builder.num_built == 1, limit=10**6)
    driver.run_until(lambda: bool(builder.in_flight), limit=10**6)
    during = driver.runtime.describe()["chunks_pending"]
    driver.settle()
    return during, driver.runtime.describe()["chunks_pending"]


def test_a_chunk_is_pending_until_it_is_built(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=5600)
    assert engine.call(_pending_while_the_last_chunk_is_built) == (1, 0)


def _background_builds_wait_for_requests(driver: Driver) -> bool:
    driver.ask(rag(0, 7))
    assert driver.runtime.builder.num_pending
    req = driver.submit(Prompt([random_tokens(5, 30)]))
    driver.step()
    return bool(req.finished())


def test_a_waiting_request_goes_before_background_builds(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=5000)
    engine.flush()
    assert engine.call(_background_builds_wait_for_requests)
    engine.settle()


def _turns(driver: Driver) -> list[dict[str, Any]]:
    """A conversation: each turn brings a chunk more, and the answer to the turn before."""
    reports = []
    driver.ask(rag(0))
    driver.settle()
    segments: list[list[int]] = [SYSTEM]
    chunk_at: list[int] = []
    for turn, number in enumerate((0, 1, 2)):
        driver.ask(rag(number))  # somebody else's request stores the chunk
        driver.settle()
        chunk_at.append(len(segments))
        segments += [CHUNKS[number], random_tokens(40 + turn, 6)]
        answer = driver.ask(Prompt(list(segments), list(chunk_at), max_new_tokens=8))[0]
        reports.append(answer.report)
        segments.append(answer.output_ids)
    return reports


def test_the_next_turn_of_a_conversation_reuses_the_last_one_as_prefix(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(max_total_tokens=5000)
    engine.flush()

    first, second, third = engine.call(_turns)

    assert first["prefix_tokens"] == len(SYSTEM) + len(CHUNKS[0])
    assert second["prefix_tokens"] >= first["prompt_tokens"] + 7
    assert second["reused_tokens"] + second["recomputed_tokens"] == len(CHUNKS[1])
    assert third["prefix_tokens"] >= second["prompt_tokens"] + 7
    assert third["chunk_hits"] == 1


# --- builds, as an adversary of the scheduler would have them ---


def _build_aborted_in_flight(driver: Driver, on_miss: str) -> tuple[int, dict[str, Any]]:
    """Abort everything, as an operator may, whenever a step of a build is in flight."""
    from sglang.srt.managers.io_struct import AbortReq

    first = driver.submit(rag(0, 1))
    builder = driver.runtime.builder
    driver.run_until(lambda: bool(builder.in_flight), limit=10**6)
    built = builder.num_built
    driver.scheduler.abort_request(AbortReq(rid="", abort_all=True))
    driver.step()
    built = builder.num_built - built
    driver.settle()
    assert first.finished() or on_miss == "build"
    answer = driver.ask(rag(1, 0))[0]
    driver.settle()
    again = driver.ask(rag(0, 1, params={"sgl_blend_ratio": 0.4}))[0]  # not in the radix prefix
    assert answer.finish == "FINISH_LENGTH"
    return built, again.report


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_an_aborted_build_is_not_waited_for(
    start_engine: StartEngine, on_miss: str, overlap: bool
) -> None:
    engine = start_engine(
        blend_on_miss=on_miss, chunked_prefill_size=32, disable_overlap_schedule=not overlap
    )
    engine.flush()
    built, report = engine.call(_build_aborted_in_flight, on_miss)
    assert built == 0, "an aborted step counts as built"
    assert report["chunk_hits"] == 2


def _steps_of_a_small_request_beside_a_large_build(driver: Driver) -> int:
    decoding = driver.submit(Prompt([random_tokens(3, 200)], max_new_tokens=100))
    driver.run_until(lambda: len(decoding.output_ids) > 2)
    large = rag_prompt(SYSTEM, [random_tokens(61, 230)], QUESTION)
    driver.runtime.builder.enqueue(driver.submit(large).sgl_blend.keys)
    driver.scheduler.waiting_queue.clear()
    driver.step()
    small = driver.submit(Prompt([random_tokens(4, 20)]))
    steps = 0
    while not small.finished():
        driver.step()
        steps += 1
    driver.run_until(decoding.finished)
    driver.settle()
    return steps


def test_a_build_that_does_not_fit_does_not_close_the_batch(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=460)
    assert engine.call(_steps_of_a_small_request_beside_a_large_build) <= 3


def _hits_when_the_pool_is_full_for_a_moment(driver: Driver) -> tuple[Any, Any]:
    decoding = driver.submit(Prompt([random_tokens(3, 500)], max_new_tokens=60))
    driver.run_until(lambda: len(decoding.output_ids) > 2)
    under_load = driver.ask(rag(0, 1))[0]
    driver.run_until(decoding.finished)
    driver.settle()
    driver.flush()
    return under_load, driver.ask(rag(0, 1))[0]


def test_with_build_an_answer_does_not_depend_on_the_load(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build", max_total_tokens=900)
    engine.flush()
    under_load, alone = engine.call(_hits_when_the_pool_is_full_for_a_moment)
    assert under_load.report == alone.report
    assert under_load.logprobs == alone.logprobs


def _builds_before_a_waiting_request(driver: Driver) -> int:
    for turn in range(20):  # work that nobody waits for earns nothing
        driver.ask(Prompt([random_tokens(500 + turn, 900)], salt="load"))
    driver.ask(rag(0, 1, 2, 3, 4, 5, 6, 7))
    driver.submit(Prompt([random_tokens(5, 30)]))
    req = driver.submit(Prompt([random_tokens(6, 30)]))
    before = driver.num_batches
    driver.run_until(req.finished)
    return driver.num_batches - before


def test_credit_is_not_saved_up_while_nobody_waits(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=5000)
    engine.flush()
    assert engine.call(_builds_before_a_waiting_request) <= 2
    engine.settle()


def _offers_after_a_prefill(driver: Driver) -> tuple[int, int]:
    """Do what the overlap schedule does: look for the next batch before the last one's result."""
    scheduler, rounds = driver.scheduler, driver.runtime.rounds

    def num_offered() -> int:
        rounds.begin(scheduler.running_batch, rounds.read_clock(needed=False))
        offered = len(scheduler.waiting_queue)
        rounds.end()
        return offered

    driver.ask(rag(0, 1, 2))
    req = driver.submit(Prompt([random_tokens(7, 50)]))
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=None)
    scheduler.last_batch = plan.batch_to_run
    result = scheduler.run_batch(plan.batch_to_run)
    scheduler.result_queue = deque([(plan.batch_to_run, result)])
    time.sleep(0.1)  # longer than builds keep quiet after a result
    held = num_offered()
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    assert req.finished()
    time.sleep(0.1)
    out = num_offered()
    del scheduler.result_queue
    driver.settle()
    return held, out


def test_no_build_stands_before_a_first_token_that_is_computed(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=2500)
    engine.flush()
    assert engine.call(_offers_after_a_prefill) == (0, 1)


def _update_weights_after_a_blended_answer(driver: Driver) -> tuple[bool, int]:
    driver.ask(rag(0, 1, 2, 3))
    batches = driver.num_batches
    driver.run_until(lambda: driver.num_batches > batches, limit=10**6)  # a build has just run
    flushed = driver.scheduler.flush_cache()
    driver.settle()
    return bool(flushed), driver.runtime.builder.num_pending


def test_background_builds_do_not_stand_in_the_way_of_a_flush(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=3000)
    engine.flush()
    assert engine.call(_update_weights_after_a_blended_answer) == (True, 0)


def _client_names_itself_like_a_build(driver: Driver) -> list[Any]:
    driver.ask(rag(0, 1))
    driver.settle()
    requests = [
        Prompt([random_tokens(71, 40)], logprob_start_len=0),
        Prompt([random_tokens(72, 50)], logprob_start_len=0),
    ]
    reqs = [driver.submit(prompt) for prompt in requests]
    for number, req in enumerate(reqs):
        req.rid = f"sgl-blend-build-{number}"
    reqs.append(driver.submit(rag(1, 0)))
    driver.run_until(lambda: all(req.finished() for req in reqs))
    driver.settle()
    return [driver.answer(req) for req in reqs]


def test_a_client_cannot_pass_for_a_build(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=4500)
    first, second, blended = engine.call(_client_names_itself_like_a_build)
    assert len(first.input_logprobs) == 39
    assert len(second.input_logprobs) == 49
    assert blended.report["chunk_hits"] == 2


def _forget_under_priorities(driver: Driver) -> tuple[int, int]:
    driver.ask(rag(0, 1, 2, priority=0))
    for turn in range(4):
        driver.ask(Prompt([random_tokens(80 + turn, 30)], priority=1))
    driver.settle()
    return driver.runtime.builder.num_forgotten, driver.runtime.builder.num_built


def test_builds_after_requests_with_priority_are_not_forgotten(start_engine: StartEngine) -> None:
    engine = start_engine(enable_priority_scheduling=True)
    assert engine.call(_forget_under_priorities) == (0, 3)

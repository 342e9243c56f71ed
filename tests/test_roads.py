"""Roads through SGLang's scheduler that no other test takes: blended, or dropped by name."""

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import (
    Answer,
    Driver,
    Prompt,
    largest_difference,
    rag_prompt,
    random_tokens,
)

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 80) for i in range(6)]
QUESTION = random_tokens(99, 20)
TOLERANCE = 1e-4


def rag(*numbers: int, **rest: Any) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, **rest)


def _warm_and_ask(driver: Driver, prompt: Prompt) -> tuple[Answer, Answer]:
    """Store all chunks, ask, and ask for the same in full."""
    driver.settle()
    driver.flush()
    driver.ask(rag(*range(6)))
    driver.settle()
    answer = driver.ask(prompt)[0]
    driver.settle()
    full = driver.ask(
        Prompt([prompt.tokens], salt="reference", max_new_tokens=prompt.max_new_tokens)
    )[0]
    driver.settle()
    return answer, full


def assert_same(got: Answer, want: Answer) -> None:
    assert got.output_ids == want.output_ids
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert largest_difference(mine, theirs) <= TOLERANCE


# --- chunked prefill ---


@pytest.mark.parametrize("on_miss", ["compute", "build"])
@pytest.mark.parametrize("page_size", [1, 8])
def test_a_chunk_cut_by_a_step_is_reused_in_both_steps(
    start_engine: StartEngine, on_miss: str, page_size: int
) -> None:
    engine = start_engine(blend_on_miss=on_miss, chunked_prefill_size=64, page_size=page_size)
    prompt = rag(3, 1, 4, params={"sgl_blend_ratio": 0.15})

    report = engine.call(_warm_and_ask, prompt)[0].report

    chunks = range(len(SYSTEM), len(SYSTEM) + 3 * 80)
    first = report["prefix_tokens"]  # the system prompt and the chunk behind it are exact
    ends = [end for end in range(first + 64, len(prompt.tokens), 64) if end - 1 in chunks]
    assert len(ends) >= 2, "no step ends in a chunk"
    of_chunks = report["reused_tokens"] + report["recomputed_tokens"]
    assert of_chunks >= chunks.stop - max(first, chunks.start) - 2 * len(ends) - 3 * page_size
    assert report["reused_tokens"] > 0.7 * of_chunks
    assert report["chunk_hits"] >= 2


@pytest.mark.parametrize("page_size", [1, 8])
def test_l1_holds_in_chunked_prefill_with_pages(start_engine: StartEngine, page_size: int) -> None:
    engine = start_engine(chunked_prefill_size=64, page_size=page_size)
    prompt = rag(5, 2, 4, 0, params={"sgl_blend_ratio": 1.0}, max_new_tokens=4)
    answer, full = engine.call(_warm_and_ask, prompt)
    assert answer.report["recomputed_tokens"] > 0
    assert_same(answer, full)


# --- the overlap schedule, SGLang's default ---


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_the_overlap_schedule_changes_no_answer(start_engine: StartEngine, ratio: float) -> None:
    prompt = rag(4, 0, 3, params={"sgl_blend_ratio": ratio}, max_new_tokens=6)
    overlapped, full = start_engine(disable_overlap_schedule=False).call(_warm_and_ask, prompt)
    plain, _ = start_engine().call(_warm_and_ask, prompt)
    assert overlapped.report == plain.report
    assert overlapped.report["chunk_hits"] == 3
    assert_same(overlapped, plain)
    if ratio == 1.0:
        assert_same(overlapped, full)


def _abort_overlapped(driver: Driver) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    driver.ask(rag(0, 1, 2))
    for steps in range(1, 7):
        req = driver.submit(rag(2, 1, 0, max_new_tokens=8, salt=f"{steps}"))
        for _ in range(steps):
            driver.step()
        driver.scheduler.abort_request(AbortReq(rid=req.rid))
        driver.settle()


def test_aborts_at_every_step_of_the_overlap_schedule_leave_no_leak(
    start_engine: StartEngine,
) -> None:
    start_engine(disable_overlap_schedule=False).call(_abort_overlapped)


# --- priorities ---


def _preempt(driver: Driver) -> tuple[int, list[Answer], list[Answer]]:
    """Let an urgent request push a decoding one out of a full batch; all blended, at ratio 1."""
    driver.settle()
    driver.flush()
    driver.ask(rag(0, 1, 2))
    driver.settle()
    params = {"sgl_blend_ratio": 1.0}
    low = [
        rag(1, 0, params=params, max_new_tokens=60, priority=1, salt=f"low {i}") for i in range(4)
    ]
    high = [rag(2, 1, params=params, max_new_tokens=20, priority=50, salt="high")]
    reqs = [driver.submit(prompt) for prompt in low]
    driver.run_until(lambda: any(len(req.output_ids) > 3 for req in reqs))
    reqs += [driver.submit(prompt) for prompt in high]
    driver.run_until(lambda: all(req.finished() for req in reqs))
    answers = [driver.answer(req) for req in reqs]
    preempted = sum(req.retraction_count for req in reqs[: len(low)])
    driver.settle()
    full = [
        driver.ask(Prompt([p.tokens], salt="reference", max_new_tokens=p.max_new_tokens))[0]
        for p in low + high
    ]
    driver.settle()
    return preempted, answers, full


def test_preempted_requests_are_blended_again_and_answer_exactly(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(
        max_running_requests=3,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=5,
    )
    preempted, answers, full = engine.call(_preempt)
    assert preempted > 0, "nothing was preempted, the test shows nothing"
    for got, want in zip(answers, full, strict=True):
        assert got.output_ids == want.output_ids


# --- sessions ---


def _session(driver: Driver) -> list[dict[str, Any]]:
    """Two turns of a session with chunks in both; SGLang puts the first before the second."""
    from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

    driver.settle()
    driver.ask(rag(0, 1))
    driver.settle()
    driver.scheduler.open_session(OpenSessionReqInput(capacity_of_str_len=10_000, session_id="s"))
    reports = []
    rid = None
    for order in ((1, 0), (0, 1)):
        received = driver.receive(rag(*order, max_new_tokens=3))
        received.session_params = SessionParams(id="s", rid=rid)
        req = driver.hand_over(received)
        driver.run_until(req.finished)
        reports.append(driver.answer(req).report)
        rid = received.rid
    return reports


def test_requests_of_a_session_are_served_in_full_and_counted(start_engine: StartEngine) -> None:
    reports = start_engine().call(_session)
    assert [report["fallback"] for report in reports] == [
        "requests of a session are not blended"
    ] * 2

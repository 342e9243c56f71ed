"""Features of SGLang's scheduler that no other test takes: blended, or dropped by name."""

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import (
    Answer,
    Driver,
    Prompt,
    largest_difference,
    rag_prompt,
    random_tokens,
)
from tiny_models import NUM_LAYERS

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


# --- lookup ---


def _traced_peak_of_a_lookup(driver: Driver, prompt: Prompt) -> int:
    received = driver.receive(prompt)
    state, req = driver.runtime.intake.read(received), driver.queued(received)
    look_up = driver.runtime.admission.plan
    assert look_up(req, state) is None, "nothing is stored"
    tracemalloc.start()
    try:
        look_up(req, state)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_lookup_copies_no_prompt(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.flush()
    prompt = Prompt([SYSTEM, CHUNKS[0], random_tokens(7, 4000)], [1])
    assert engine.call(_traced_peak_of_a_lookup, prompt) < 8 * len(prompt.tokens) / 2


def _ask_what_a_plain_request_stored(driver: Driver, prompt: Prompt) -> tuple[Answer, Answer]:
    driver.settle()
    driver.flush()
    plain = driver.ask(Prompt([prompt.tokens], max_new_tokens=prompt.max_new_tokens))[0]
    driver.settle()
    answer = driver.ask(prompt)[0]
    driver.settle()
    return plain, answer


@pytest.mark.parametrize("page_size", [1, 8])
def test_of_a_prompt_stored_whole_one_token_is_computed(
    start_engine: StartEngine, page_size: int
) -> None:
    engine = start_engine(page_size=page_size)
    question = random_tokens(98, 24)
    prompt = rag_prompt(SYSTEM, CHUNKS[:3], question, max_new_tokens=4)
    assert len(prompt.tokens) % page_size == 0

    plain, answer = engine.call(_ask_what_a_plain_request_stored, prompt)

    assert answer.report["prefix_tokens"] == len(prompt.tokens) - 1
    assert_same(answer, plain)


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
    first = report["prefix_tokens"]  # the system prompt and the chunk after it are exact
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


# --- embeddings ---


def _ask_beside_embeddings(driver: Driver, prompt: Prompt) -> Answer:
    """Ask for it in one batch with a request that brings an embedding of its own."""
    from sglang.srt.managers.embed_types import PositionalEmbeds

    other = driver.receive(Prompt([random_tokens(6, 30)]))
    hidden_size = driver.scheduler.tp_worker.model_runner.model_config.hidden_size
    other.positional_embed_overrides = PositionalEmbeds(torch.ones(1, hidden_size), [3])
    reqs = [driver.hand_over(other), driver.submit(prompt)]
    before = driver.num_batches
    driver.run_until(lambda: all(req.finished() for req in reqs))
    assert driver.num_batches == before + 1, "they did not share a batch"
    return driver.answer(reqs[1])


def test_what_is_computed_beside_embeddings_is_reported_as_computed(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    prompt = rag(4, 1, 3, params={"sgl_blend_ratio": 0.15})
    _, full = engine.call(_warm_and_ask, prompt)
    engine.flush()
    engine.ask(rag(*range(6)))
    engine.settle()

    answer = engine.call(_ask_beside_embeddings, prompt)

    engine.settle()
    report = answer.report
    assert report["fallback"] == "beside_embeddings"
    assert report["reused_tokens"] == report["recomputed_tokens"] == 0
    assert report["prefix_tokens"] + report["computed_tokens"] == len(prompt.tokens)
    assert report["layer_rows"] == report["computed_tokens"] * NUM_LAYERS
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


def _preempt_for_builds(driver: Driver) -> tuple[list[bool], int]:
    """Let two urgent requests with the same cold chunks push decoding ones out of a full batch.

    Returns:
        Which requests ended, the urgent ones last, and how often requests were preempted.
    """
    reqs = [driver.submit(Prompt([CHUNKS[i]], max_new_tokens=200, priority=0)) for i in range(3)]
    driver.run_until(lambda: all(len(req.output_ids) > 3 for req in reqs))
    for priority, num_steps in ((100, 3), (200, 800)):  # the second arrives while the first builds
        reqs.append(driver.submit(rag(3, 4, 5, max_new_tokens=4, priority=priority)))
        for _ in range(num_steps):
            driver.step()
    ended = [req.finished() for req in reqs]
    preempted = sum(req.retraction_count for req in reqs)
    driver.settle()
    return ended, preempted


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_requests_preempted_for_builds_are_not_lost(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(
        blend_on_miss="build",
        max_running_requests=3,
        chunked_prefill_size=32,
        enable_priority_scheduling=True,
        disable_overlap_schedule=not overlap,
    )
    ended, preempted = engine.call(_preempt_for_builds)
    assert ended == [True] * 5, "a request was lost"
    assert preempted <= 3, "a request was preempted again for a further step of the same builds"


# --- sessions ---


def _session(driver: Driver) -> tuple[list[Answer], list[Answer], int]:
    """Two turns with chunks in both; SGLang puts the first, and its answer, before the second.

    Returns:
        The answers, those of a full prefill of the same tokens, and the tokens before the second turn.
    """
    from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

    driver.settle()
    driver.flush()
    driver.ask(rag(0, 1, 2))
    driver.settle()
    driver.scheduler.open_session(OpenSessionReqInput(capacity_of_str_len=10_000, session_id="s"))
    answers, full, history, rid = [], [], 0, None
    for order in ((1, 0), (2, 0)):
        prompt = rag(*order, max_new_tokens=3, params={"sgl_blend_ratio": 1.0})
        received = driver.receive(prompt)
        received.session_params = SessionParams(id="s", rid=rid)
        req = driver.hand_over(received)
        tokens, rid = list(req.origin_input_ids), received.rid
        history = len(tokens) - len(prompt.tokens)
        driver.run_until(req.finished)
        answers.append(driver.answer(req))
        driver.settle()
        full += driver.ask(Prompt([tokens], salt="reference", max_new_tokens=3))
        driver.settle()
    return answers, full, history


def test_every_turn_of_a_session_is_blended(start_engine: StartEngine) -> None:
    answers, full, history = start_engine().call(_session)
    assert history == len(rag(1, 0).tokens) + 3
    for answer, want in zip(answers, full, strict=True):
        assert answer.report["fallback"] is None
        assert answer.report["chunk_hits"] == 2
        assert_same(answer, want)
    assert answers[1].report["prompt_tokens"] == history + len(rag(2, 0).tokens)
    assert answers[1].report["prefix_tokens"] >= history - 3, "the first turn was prefilled again"
    assert answers[1].report["recomputed_tokens"] == 2 * 80


def test_a_chunk_that_a_session_changed_is_not_taken_for_the_stored_one() -> None:
    from array import array

    from sgl_blend.fallback import FallbackReason
    from sgl_blend.protocol.request import Span
    from sgl_blend.radix_ext.chunk_store import ChunkKey
    from sgl_blend.scheduler.request_state import RequestState

    def state_of_turn() -> RequestState:
        # A turn of six tokens, the first a BOS, and its first four are a chunk.
        key = ChunkKey("salt", None, b"", array("q", [1, 5, 6, 7]).tobytes())
        return RequestState(6, (Span(0, 4),), (key,), None, "hkvd", 0.15)

    whole, alone = state_of_turn(), state_of_turn()
    whole.follow(array("q", [3, 3, 3, 1, 5, 6, 7, 8, 9]))
    alone.follow(array("q", [1, 5, 6, 7, 8, 9]))

    assert whole.fallback is alone.fallback is None
    assert whole.spans == (Span(3, 7),)
    assert alone.spans == (Span(0, 4),)
    assert whole.report.prompt_tokens == whole.num_tokens == 9
    # Without its BOS, after a history of three tokens, of one and of none.
    for history in ([3, 3, 3], [3], []):
        cut = state_of_turn()
        cut.follow(array("q", [*history, 5, 6, 7, 8, 9]))
        assert cut.fallback is FallbackReason.MALFORMED, history
        assert cut.num_tokens == len(history) + 5


def _history_instead_of_bos(driver: Driver) -> tuple[Answer, Answer, Answer]:
    """A turn of which SGLang replaces the BOS, in a chunk, by one token of history.

    Returns:
        Its answer, another client's to the same tokens, and that of a full prefill.
    """
    from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

    driver.settle()
    driver.flush()
    ratio, bos = {"sgl_blend_ratio": 1.0}, 1
    turn = Prompt([[], [bos, *CHUNKS[0]], QUESTION], [1], ratio, max_new_tokens=4)
    driver.ask(turn)
    driver.settle()
    driver.scheduler.open_session(OpenSessionReqInput(capacity_of_str_len=10_000, session_id="b"))
    received = driver.receive(Prompt([random_tokens(3, 30)], max_new_tokens=2))
    received.session_params = SessionParams(id="b")
    first = driver.hand_over(received)
    driver.run_until(first.finished)
    driver.settle()
    received = driver.receive(turn)
    received.session_params = SessionParams(id="b", rid=first.rid, offset=1)
    tokenizer = driver.scheduler.tokenizer
    driver.scheduler.tokenizer = SimpleNamespace(bos_token_id=bos)  # the engine has none
    try:
        req = driver.hand_over(received)
    finally:
        driver.scheduler.tokenizer = tokenizer
    driver.run_until(req.finished)
    driver.settle()
    tokens = list(req.origin_input_ids)
    assert tokens == [first.origin_input_ids[0], *turn.tokens[1:]]
    victim = Prompt([[], tokens[: 1 + 80], QUESTION], [1], ratio, max_new_tokens=4)
    answers = driver.answer(req), driver.ask(victim)[0]
    driver.settle()
    full = driver.ask(Prompt([tokens], salt="reference", max_new_tokens=4))[0]
    driver.settle()
    return *answers, full


def test_history_in_the_place_of_a_bos_is_not_taken_for_it(start_engine: StartEngine) -> None:
    mine, victims, full = start_engine().call(_history_instead_of_bos)
    assert mine.report["fallback"] == "malformed"
    assert_same(mine, full)
    assert_same(victims, full)

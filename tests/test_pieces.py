"""What stands before a chunk that is on its way from storage is prefilled meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, namespace_of, rag_prompt, random_tokens
from prompts import largest_difference
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from stored_files import NEEDS_NAMESPACES, PAGE, settings, slow_reads, store

from sgl_blend.engine.tiers import host_token_bytes
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.scheduler.host_tier import HostTier
from sgl_blend.scheduler.loading_controller import LoadingController, Patience
from sgl_blend.scheduler.lookup import Lookup
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.scheduler.storage_tier import StorageTier
from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.loading import ModelTimes

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 72) for i in range(4)]
QUESTION = random_tokens(99, 12)
LAYERS = 4
ROW_S = 1e-3
"""Seconds that a row takes in a layer, as far as the controller knows: 0.29 s for a chunk."""
READ_S = 0.02
"""Seconds that a page of 16 tokens really takes to be read: 0.08 s for a chunk."""


def _prompt(salt: str, *, first: list[int] = CHUNKS[2], **rest: Any) -> Prompt:
    chunks = [first, *(CHUNKS[i] for i in (0, 3, 1))]
    return rag_prompt(SYSTEM, chunks, QUESTION, salt=salt, **rest)


def _give_controller(driver: Driver) -> None:
    """Let the controller believe in a slow model and a store that hands over chunk after chunk."""
    token_bytes = host_token_bytes(driver.scheduler.tree_cache)
    times = ModelTimes(LAYERS, 1, token_bytes // LAYERS, lambda rows: ROW_S * rows)
    share = driver.runtime.storage._least_share  # of KV that a store holds
    storage = LinkSpeed(1e-3, share * PAGE * token_bytes / READ_S)
    with patch("sgl_blend.scheduler.loading_controller.UNKNOWN_STORAGE", storage):
        made = LoadingController(times, LinkSpeed(1e-5, 1e12), token_bytes, TPGroup())
    driver.runtime.admission._host._controller = made
    driver.runtime.storage._controller = made


def _store(driver: Driver, salt: str) -> None:
    """Have all chunks built and stored, and nothing left on device and host."""
    _give_controller(driver)
    driver.settle()
    driver.flush()
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, salt=salt))
    driver.settle()
    driver.flush()


def _ask_for_stored(driver: Driver, salt: str, prompt: Prompt) -> tuple[Answer, list[int]]:
    """Ask; return the answer, and what was prefilled ahead at the end of each round until then."""
    _store(driver, salt)
    tokens, done = prompt.tokens, [0]
    with slow_reads(READ_S):
        req = driver.submit(prompt)
        namespace = namespace_of(req)
        for _ in range(10**6):
            driver.step()
            if req.finished() or req.sgl_blend.report.load_ms != 0:
                break
            there = _stored(driver, tokens, namespace)
            if there != done[-1]:
                done.append(there)
        driver.run_until(req.finished)
    answer = driver.answer(req)
    driver.settle()
    return answer, done


@contextmanager
def _all_is_loaded() -> Iterator[None]:
    """Let all chunks be loaded, whether that is worth it or not."""

    def choose(tier: StorageTier, state: RequestState, covered: int, exact: int) -> Any:
        return state.keys, Patience(10.0, 10.0), True

    def choose_on_host(tier: HostTier, state: RequestState, lookup: Lookup, *args: Any) -> Any:
        return args[0], None

    with (
        patch.object(StorageTier, "_choose", choose),
        patch.object(HostTier, "_choose", choose_on_host),
    ):
        yield


def _ask_and_load_all(driver: Driver, salt: str, prompt: Prompt) -> tuple[Answer, list[int]]:
    with _all_is_loaded():
        return _ask_for_stored(driver, salt, prompt)


def _stored(driver: Driver, tokens: list[int], namespace: str | None) -> int:
    store = driver.runtime.admission._store
    return int(store.stored_tokens(array("q", tokens), salt=namespace, extra_key=None))


def _tokens_of(report: dict[str, Any]) -> int:
    names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    return sum(int(report[name]) for name in names)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_has_come_is_prefilled_while_the_rest_comes(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    salt = f"pieces {overlap}"
    unknown = random_tokens(98, len(CHUNKS[0]))
    answer, done = engine.call(_ask_for_stored, salt, _prompt(salt, first=unknown))
    report = answer.report
    # A piece ends before each chunk but the first, at a page.
    borders = [(len(SYSTEM) + n * len(CHUNKS[0])) // PAGE * PAGE for n in (1, 2, 3)]
    assert done[1:] == borders
    # The first is computed while the others come.
    assert report["chunk_hits"] == len(CHUNKS) - 1
    assert report["chunk_misses"] == 1
    assert report["storage_tokens"] == report["host_tokens"] > 0
    assert _tokens_of(report) == report["prompt_tokens"]
    assert report["prefix_tokens"] == 0
    assert report["reused_tokens"] > 100
    assert report["fallback"] is None


def test_pieces_that_compute_everything_answer_like_full_prefill(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(**settings())
    prompt = _prompt("whole", params={"sgl_blend_ratio": 1.0})
    answer, done = engine.call(_ask_and_load_all, "whole", prompt)
    assert len(done) > 2
    assert answer.report["recomputed_tokens"] > 200
    (full,) = engine.ask(Prompt([prompt.tokens], salt="reference"))
    assert largest_difference(answer.logprobs[0], full.logprobs[0]) < 1e-4
    # With stored KV that is taken as it is, they differ: the bound above can be missed.
    taken = _prompt("part", params={"sgl_blend_policy": "none"})
    answer, _ = engine.call(_ask_and_load_all, "part", taken)
    assert largest_difference(answer.logprobs[0], full.logprobs[0]) > 1e-2


def test_nothing_is_prefilled_that_comes_as_exact_kv(start_engine: StartEngine) -> None:
    """The first chunk was built after the very text that it stands behind."""
    engine = start_engine(**settings())
    answer, done = engine.call(_ask_for_stored, "exact", _prompt("exact"))
    head = len(SYSTEM) + len(CHUNKS[0])
    assert min(done[1:]) > head
    assert answer.report["prefix_tokens"] == head // PAGE * PAGE
    assert answer.report["chunk_hits"] == len(CHUNKS)
    assert _tokens_of(answer.report) == answer.report["prompt_tokens"]


def test_no_piece_goes_beyond_the_first_logprob_that_is_wanted(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    prompt = _prompt("logprobs", logprob_start_len=150)
    answer, done = engine.call(_ask_for_stored, "logprobs", prompt)
    assert done == [0, 144], "what comes as exact KV is no piece"
    assert len(answer.input_logprobs) == len(prompt.tokens) - 150 - 1


def _begin(driver: Driver, salt: str) -> Any:
    """Return a request of which one piece is in flight."""
    _store(driver, salt)
    req = driver.submit(_prompt(salt))
    pieces = driver.runtime.storage._pieces
    driver.run_until(lambda: bool(pieces.is_running), limit=10**6)
    return req


def _abort(driver: Driver, req: Any) -> None:
    driver.scheduler.abort_request(AbortReq(rid=req.rid))


def _abort_all(driver: Driver, req: Any) -> None:
    driver.scheduler.abort_request(AbortReq(rid="", abort_all=True))


def _new_weights(driver: Driver, req: Any) -> None:
    driver.runtime.step_aside(driver.scheduler)
    driver.runtime.storage.leave()
    driver.runtime.weights_changed()
    driver.run_until(req.finished)
    report = driver.answer(req).report
    assert report["reused_tokens"] == 0
    assert report["load_ms"] > 0, "it waited before the weights came"


def _push_out(driver: Driver, req: Any) -> None:
    """Let nothing of what was prefilled ahead be left."""
    pieces = driver.runtime.storage._pieces
    driver.run_until(lambda: not pieces.is_running)
    with patch.object(type(pieces), "want", lambda *args: None):
        capacity = driver.runtime.describe()["pool"]["capacity"]
        driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
        driver.run_until(req.finished, limit=10**6)
    assert _tokens_of(driver.answer(req).report) == len(_prompt("").tokens)


def _interrupt(driver: Driver, salt: str, how: Callable[[Driver, Any], None]) -> Answer:
    with slow_reads(READ_S):
        req = _begin(driver, salt)
        how(driver, req)
        driver.settle()
    pool = driver.runtime.describe()["pool"]
    assert pool["locked"] == 0
    assert pool["free"] + pool["evictable"] == pool["capacity"]
    assert not driver.runtime.storage.num_coming
    driver.flush()
    (answer,) = driver.ask(_prompt(salt))
    driver.settle()
    return answer


@pytest.mark.parametrize("how", [_abort, _abort_all, _push_out])
def test_a_piece_in_flight_leaves_nothing_behind(
    start_engine: StartEngine, how: Callable[[Driver, Any], None]
) -> None:
    answer = start_engine(**settings()).call(_interrupt, how.__name__, how)
    assert answer.report["chunk_hits"] >= len(CHUNKS) - 1


def test_a_piece_of_old_weights_is_not_used(start_engine: StartEngine) -> None:
    answer = start_engine(**settings()).call(_interrupt, "weights", _new_weights)
    assert answer.report["chunk_hits"] == 0


def _lose_each_piece(driver: Driver, salt: str, from_host: bool) -> tuple[dict[str, Any], int]:
    """Let what was prefilled ahead be evicted after each piece, which the next one does again."""
    tree, pieces = driver.scheduler.tree_cache, driver.runtime.storage._pieces
    capacity = driver.runtime.describe()["pool"]["capacity"]
    with slow_reads(READ_S), _all_is_loaded():
        _store(driver, salt)
        before = seen = pieces.num_run
        req = driver.submit(_prompt(salt))
        for _ in range(10**6):
            if req.finished():
                break
            driver.step()
            if pieces.num_run > seen and not pieces.is_running:
                seen = pieces.num_run
                tree.evict(EvictParams(num_tokens=capacity))
                if from_host:
                    tree.evict_host(10**6)
    report = driver.answer(req).report
    driver.settle()
    return report, seen - before


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("from_host", [True, False])
def test_what_was_evicted_and_done_again_counts_once(
    start_engine: StartEngine, from_host: bool, overlap: bool
) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    report, num_run = engine.call(_lose_each_piece, f"lost {from_host} {overlap}", from_host)
    assert num_run >= 2
    assert _tokens_of(report) == report["prompt_tokens"]
    assert report["prefix_tokens"] >= 0
    assert report["layer_rows"] <= LAYERS * report["prompt_tokens"]


def _come_too_early(driver: Driver, salt: str) -> tuple[bool, bool, Answer]:
    """Let a request wait for nothing any more while a piece of it is in flight."""
    with slow_reads(READ_S):
        req = _begin(driver, salt)
        storage = driver.runtime.storage
        storage._arrivals[req.rid].is_awaited = False
        with slow_reads(1.0):  # the rest takes longer than the request, also on a busy machine
            driver.step()
            is_queued = req in driver.scheduler.waiting_queue
            driver.run_until(req.finished, limit=10**6)
            is_still_coming = storage.num_coming > 0
    driver.settle()
    return is_queued, is_still_coming, driver.answer(req)


def test_a_request_waits_for_its_piece(start_engine: StartEngine) -> None:
    # With overlap a piece is in flight between two rounds.
    engine = start_engine(**settings(disable_overlap_schedule=False))
    is_queued, is_still_coming, answer = engine.call(_come_too_early, "early")
    assert is_queued
    assert is_still_coming, "nothing was early"
    assert _tokens_of(answer.report) == answer.report["prompt_tokens"]


def _ask_beside(driver: Driver, salt: str) -> bool:
    """Ask for plain prompts while pieces are due; return whether a batch held both."""
    _store(driver, salt)
    pieces, shared = driver.runtime.storage._pieces, False
    with slow_reads(READ_S):
        req = driver.submit(_prompt(salt))
        for _ in range(10**4):
            if req.finished():
                break
            other = driver.submit(Prompt([random_tokens(7, 30)], salt=salt))
            driver.step()
            batch = driver.scheduler.last_batch
            rids = [] if batch is None else [one.rid for one in batch.reqs]
            shared |= other.rid in rids and any(map(pieces.owns, batch.reqs if rids else ()))
    driver.settle()
    return shared


def test_others_do_not_wait_for_a_piece(start_engine: StartEngine) -> None:
    assert start_engine(**settings()).call(_ask_beside, "beside")


def _ask_for_logprobs_beside(driver: Driver, salt: str) -> tuple[list[Any], Any]:
    """Ask for all logprobs of a prompt, again and again while pieces are due, and once alone."""
    _store(driver, salt)
    pieces, beside = driver.runtime.storage._pieces, []
    with slow_reads(READ_S):
        req = driver.submit(_prompt(salt))
        for number in range(10**4):
            if req.finished():
                break
            wanted = Prompt([random_tokens(7, 60)], salt=f"{salt} {number}", logprob_start_len=0)
            other = driver.submit(wanted)
            driver.step()
            batch = driver.scheduler.last_batch
            rids = [] if batch is None else [one.rid for one in batch.reqs]
            if other.rid in rids and any(map(pieces.owns, batch.reqs if rids else ())):
                driver.run_until(other.finished)
                beside.append(driver.answer(other).input_logprobs)
    driver.settle()
    alone = Prompt([random_tokens(7, 60)], salt=f"{salt} alone", logprob_start_len=0)
    return beside, driver.ask(alone)[0].input_logprobs


def test_a_piece_moves_nobody_elses_logprobs(start_engine: StartEngine) -> None:
    beside, alone = start_engine(**settings()).call(_ask_for_logprobs_beside, "logprobs beside")
    assert beside, "no batch held a piece and a client's request"
    for logprobs in beside:
        assert logprobs == pytest.approx(alone, abs=1e-3)


def _ask_many(driver: Driver, salt: str) -> tuple[list[Answer], int]:
    """Ask for the same chunks four times at once, beside a request that decodes."""
    _store(driver, salt)
    before = driver.runtime.storage._pieces.num_run
    with slow_reads(READ_S), _all_is_loaded():
        other = driver.submit(Prompt([random_tokens(7, 60)], salt=salt, max_new_tokens=40))
        ratios = (0.1, 0.2, 0.3, 0.4)
        prompts = [_prompt(salt, params={"sgl_blend_ratio": ratio}) for ratio in ratios]
        reqs = [driver.submit(replace(prompt, max_new_tokens=3)) for prompt in prompts]
        driver.run_until(lambda: all(req.finished() for req in (other, *reqs)), limit=10**6)
    driver.settle()
    return [driver.answer(req) for req in reqs], driver.runtime.storage._pieces.num_run - before


def test_many_requests_have_their_own_pieces(start_engine: StartEngine) -> None:
    answers, run = start_engine(**settings(max_total_tokens=2048)).call(_ask_many, "many")
    assert run >= 4
    for answer in answers:
        assert _tokens_of(answer.report) == answer.report["prompt_tokens"]
        assert answer.report["chunk_hits"] == len(CHUNKS)

"""Pieces of a prompt, and requests that had some, meet what operators order, and retraction."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, namespace_of
from orders import order, release_and_resume
from prompts import largest_difference
from retraction import retract
from stored_files import NEEDS_NAMESPACES, settings, slow_reads, store
from test_orders import OVERLAP, other_weights
from test_pieces import READ_S, _all_is_loaded, _begin, _prompt, _store, _stored, _tokens_of
from tiny_models import make_model

from sgl_blend.scheduler.request_state import state_of

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]


def _retract_a_piece(driver: Driver, salt: str) -> Any:
    """Return a request of which the first piece was launched and retracted; it holds no chunk."""
    # As with chunks that were rounded: what stands before the first one is a piece, too.
    with patch("sgl_blend.scheduler.storage_tier.exact_head", lambda *args: 0), _all_is_loaded():
        req = _begin(driver, salt)
    scheduler, pieces = driver.scheduler, driver.runtime.storage._pieces
    batch = scheduler.last_batch
    assert scheduler.result_queue, "the result was looked at, the test shows nothing"
    assert all(map(pieces.owns, batch.reqs))
    assert all(state_of(piece) is None for piece in batch.reqs)
    retract(driver, batch.reqs)
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None
    assert pieces.is_running
    return req


def _flush(driver: Driver, req: Any) -> None:
    order(driver, "PauseGenerationReqInput", mode="in_place")
    assert order(driver, "FlushCacheReqInput").success
    order(driver, "ContinueGenerationReqInput")


def _flush_after_a_retraction(driver: Driver, salt: str) -> tuple[bool, Answer]:
    with slow_reads(READ_S):
        req = _retract_a_piece(driver, salt)
        _flush(driver, req)
        is_running = driver.runtime.storage._pieces.is_running
        driver.run_until(req.finished, limit=10**6)
    driver.settle()
    return is_running, driver.answer(req)


def test_a_flush_drops_a_piece_that_was_retracted(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=False))
    is_running, answer = engine.call(_flush_after_a_retraction, "retracted, flushed")
    assert not is_running
    assert _tokens_of(answer.report) == answer.report["prompt_tokens"]


def _new_weights_after_a_retraction(driver: Driver, salt: str, own: str, other: str) -> int:
    """Return what stands in the namespace of the old weights at the end."""
    with slow_reads(READ_S):
        req = _retract_a_piece(driver, salt)
        tokens, namespace = _prompt(salt).tokens, namespace_of(req)
        with other_weights(driver, own, other):
            driver.run_until(req.finished, limit=10**6)
            assert namespace_of(req) != namespace
            return _stored(driver, tokens, namespace)


def test_a_piece_that_was_retracted_writes_nothing_of_new_weights_for_old_ones(
    start_engine: StartEngine, model_folder: Path
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(**settings(disable_overlap_schedule=False))
    own = str(model_folder / "llama")
    salt = "retracted, new weights"
    assert engine.call(_new_weights_after_a_retraction, salt, own, str(other)) == 0


def _retract_after_pieces(driver: Driver, salt: str, prompt: Prompt) -> tuple[Answer, int]:
    """Retract a request while it decodes, and let nothing be left of its prefill."""
    with slow_reads(READ_S), _all_is_loaded():
        _store(driver, salt)
        pieces = driver.runtime.storage._pieces
        before = pieces.num_run
        req = driver.submit(prompt)
        driver.run_until(lambda: len(req.output_ids) > 1, limit=10**6)
        order(driver, "PauseGenerationReqInput", mode="retract")
        assert order(driver, "FlushCacheReqInput").success
        order(driver, "ContinueGenerationReqInput")
        assert not req.finished()
        driver.run_until(req.finished, limit=10**6)
    driver.settle()
    return driver.answer(req), pieces.num_run - before


@OVERLAP
def test_a_request_that_is_retracted_after_its_pieces_counts_anew(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    salt = f"owner {overlap}"
    prompt = _prompt(salt, params={"sgl_blend_ratio": 1.0}, max_new_tokens=6)
    answer, num_run = engine.call(_retract_after_pieces, salt, prompt)
    assert num_run > 0
    assert _tokens_of(answer.report) == answer.report["prompt_tokens"]
    assert answer.report["prefix_tokens"] == answer.report["reused_tokens"] == 0
    (full,) = engine.ask(Prompt([prompt.tokens], salt="reference", max_new_tokens=6))
    assert largest_difference(answer.logprobs[0], full.logprobs[0]) < 1e-4


def _release(driver: Driver, salt: str, tags: list[str]) -> Answer:
    """Release memory and take it back while a piece is in flight."""
    with slow_reads(READ_S):
        req = _begin(driver, salt)
        release_and_resume(driver, tags)
        driver.run_until(req.finished, limit=10**6)
    driver.settle()
    return driver.answer(req)


@OVERLAP
@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["kv_cache", "weights"]])
def test_memory_is_released_while_a_piece_is_in_flight(
    start_engine: StartEngine, tags: list[str], overlap: bool
) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    salt = f"release {tags} {overlap}"
    answer = engine.call(_release, salt, tags)
    assert answer.finish == "FINISH_LENGTH"
    assert _tokens_of(answer.report) == answer.report["prompt_tokens"]
    (full,) = engine.ask(Prompt([_prompt(salt).tokens], salt="reference"))
    exact = _prompt(salt, params={"sgl_blend_ratio": 1.0})
    assert largest_difference(engine.ask(exact)[0].logprobs[0], full.logprobs[0]) < 1e-4

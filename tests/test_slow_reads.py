"""Reads that nobody needs any more end at once: an order waits for none, and SGLang dies of none."""

from __future__ import annotations

import time

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, random_tokens
from orders import order, release_and_resume
from prompts import largest_difference
from stored_chunks import CHUNKS, QUESTION, SYSTEM, ask, fill, flush, prompt_of
from stored_files import NEEDS_NAMESPACES, PAGE, settings, slow_reads, store
from test_orders import OVERLAP

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]

SLOW_S = 1.5
"""Seconds that a page takes, less than a call may. SGLang waits ten seconds for its threads to stop."""
PLAIN = random_tokens(5, 300)
"""SGLang looks for no less than 256 tokens itself."""


def _give_up_slow_reads(driver: Driver, salt: str) -> None:
    """Answer a request whose chunks come too late; the read goes on."""
    fill(driver, salt)
    req = driver.submit(prompt_of(salt))
    driver.run_until(req.finished, limit=10**6)
    assert driver.runtime.storage.num_coming


def _flush_while_reading(driver: Driver, salt: str) -> tuple[bool, float, Answer]:
    with slow_reads(SLOW_S):
        _give_up_slow_reads(driver, salt)
        begun = time.monotonic()
        flushed = order(driver, "FlushCacheReqInput").success
        seconds = time.monotonic() - begun
    return flushed, seconds, ask(driver, salt)


def test_a_flush_ends_a_read(start_engine: StartEngine) -> None:
    flushed, seconds, answer = start_engine(**settings()).call(_flush_while_reading, "flush")
    assert flushed
    assert seconds < SLOW_S
    assert answer.report["chunk_hits"] == len(CHUNKS), "storage is not read any more"


def _detach_while_reading(driver: Driver, salt: str) -> tuple[bool, float, bool, Answer]:
    with slow_reads(SLOW_S):
        _give_up_slow_reads(driver, salt)
        begun = time.monotonic()
        detached = order(driver, "DetachHiCacheStorageReqInput").success
        seconds = time.monotonic() - begun
    attached = order(driver, "AttachHiCacheStorageReqInput", hicache_storage_backend="file").success
    flush(driver)
    return detached, seconds, attached, ask(driver, salt)


def test_storage_is_detached_while_it_is_read_and_attached_again(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(max_total_tokens=1040))
    detached, seconds, attached, answer = engine.call(_detach_while_reading, "detach")
    assert detached
    assert attached
    assert seconds < SLOW_S
    assert answer.report["chunk_hits"] == len(CHUNKS)
    assert answer.report["storage_tokens"] > 0


# --- memory and weights while chunks are on their way ---


def _release_while_loading(
    driver: Driver, salt: str, plain: bool, tags: list[str], at_once: bool = False
) -> Answer:
    prompt = Prompt([PLAIN], salt=salt) if plain else prompt_of(salt)
    flush(driver)
    driver.ask(prompt)
    flush(driver)
    with slow_reads(0.2):
        req = driver.submit(prompt)
        ongoing = driver.scheduler.tree_cache.ongoing_prefetch
        driver.run_until(
            lambda: any(one.host_indices is not None for one in ongoing.values()), limit=10**6
        )
        release_and_resume(driver, tags, at_once)
        driver.run_until(req.finished, limit=10**6)
    driver.settle()
    return driver.answer(req)


@OVERLAP
@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"]])
@pytest.mark.parametrize("plain", [True, False])
def test_a_paused_server_releases_memory_while_a_request_waits_for_storage(
    start_engine: StartEngine, plain: bool, tags: list[str], overlap: bool
) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    salt = f"release {plain} {tags} {overlap}"
    answer = engine.call(_release_while_loading, salt, plain, tags)
    assert answer.finish == "FINISH_LENGTH"
    (again,) = engine.ask(Prompt([PLAIN if plain else prompt_of(salt).tokens], salt="reference"))
    if plain:
        assert largest_difference(answer.logprobs[0], again.logprobs[0]) < 1e-4


def test_a_pause_and_a_release_may_come_at_once(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    answer = engine.call(_release_while_loading, "at once", True, ["kv_cache"], True)
    assert answer.finish == "FINISH_LENGTH"


# --- exact KV and chunks ---


def _ask_where_both_are_stored(driver: Driver, salt: str) -> tuple[Answer, int]:
    """Ask for a prompt of which exact KV is stored, and all chunks."""
    fill(driver, salt)
    driver.ask(Prompt([SYSTEM + CHUNKS[0] + CHUNKS[1] + CHUNKS[2] + QUESTION], salt=salt))
    flush(driver)
    before = driver.runtime.storage.describe()["hits"]
    with slow_reads(0.02):
        req = driver.submit(prompt_of(salt, (0, 1, 2)))
        driver.run_until(req.finished, limit=10**6)
    driver.settle()
    return driver.answer(req), driver.runtime.storage.describe()["hits"] - before


def test_no_chunk_is_read_where_exact_kv_has_come(start_engine: StartEngine) -> None:
    answer, pages = start_engine(**settings()).call(_ask_where_both_are_stored, "both")
    exact = len(SYSTEM) + sum(map(len, CHUNKS))
    assert answer.report["prefix_tokens"] >= exact // PAGE * PAGE
    assert pages < exact // PAGE + 6, "chunks were read too"

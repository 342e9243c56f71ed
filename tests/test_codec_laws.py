"""Chunks that came in few bits are kept apart: nothing takes them for what a build would compute."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from coded_chunks import coded, of_chunk, profile, rounded_kv
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, rag_prompt, random_tokens
from sparse_path import assert_same
from stored_chunks import CHUNKS, QUESTION, SYSTEM, ask, chunk_kv, fill, flush, num_built, same
from stored_files import NEEDS_NAMESPACES, store

from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.radix_ext.namespaces import rounded_salt_of

__all__ = ["model_folder", "profile", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]

LEVEL = "q4-2.0"
NEW = random_tokens(77, 72)
WHOLE = {"sgl_blend_ratio": 1.0}


def _reference(driver: Driver, prompt: Prompt) -> Answer:
    (answer,) = driver.ask(
        Prompt([prompt.tokens], salt="reference", max_new_tokens=prompt.max_new_tokens)
    )
    return answer


def _at_ratio_one(driver: Driver, salt: str) -> list[tuple[Answer, Answer]]:
    """Ask with each chunk first in the prompt, where exact KV would not be computed again."""
    pairs = []
    for order in ((0, 1, 2), (1, 2, 0), (2,)):
        salt += " again"
        fill(driver, salt)
        chunks = [CHUNKS[index] for index in order]
        prompt = rag_prompt(SYSTEM, chunks, QUESTION, salt=salt, params=WHOLE, max_new_tokens=4)
        (answer,) = driver.ask(prompt)
        driver.settle()
        pairs.append((answer, _reference(driver, prompt)))
    return pairs


def test_l1_holds_with_a_rounded_chunk_first(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    pairs = start_engine(**coded(profile, LEVEL)).call(_at_ratio_one, "first")
    for answer, reference in pairs:
        assert answer.report["storage_tokens"] > 0
        assert answer.report["chunk_hits"] > 0
        assert answer.report["prefix_tokens"] == 0, "neither the system prompt nor a chunk is exact"
        assert_same(answer, reference)


def _built_beside_rounded(
    driver: Driver, salt: str
) -> tuple[Answer, list[Any], list[Any], list[Any]]:
    """Have a chunk built by a server that holds nothing else but rounded KV, and by one without."""
    fill(driver, salt)
    driver.ask(rag_prompt(SYSTEM, [CHUNKS[0]], QUESTION, salt=salt))
    driver.settle()
    (answer,) = driver.ask(rag_prompt(SYSTEM, [NEW, CHUNKS[0]], QUESTION, salt=salt))
    driver.settle()
    kv = driver.kv(SYSTEM + NEW, driver.chunk_salt(salt))
    flush(driver)
    ask(driver, salt)  # so that the store is known to be fast
    patient = {"sgl_blend_slo_ms": 1e6}
    driver.ask(rag_prompt(SYSTEM, [NEW], QUESTION, salt=salt, params=patient))
    driver.settle()
    stored = driver.kv(SYSTEM + NEW, rounded_salt_of(driver.chunk_salt(salt)))
    flush(driver)
    alone = f"{salt} alone"
    driver.ask(rag_prompt(SYSTEM, [NEW], QUESTION, salt=alone))
    driver.settle()
    return answer, kv, stored, driver.kv(SYSTEM + NEW, driver.chunk_salt(alone))


def test_l4_holds_for_chunks_that_are_built_beside_rounded_ones(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    engine = start_engine(**coded(profile, f"lossless,{LEVEL}"))
    answer, kv, stored, alone = engine.call(_built_beside_rounded, "beside")
    assert answer.report["chunk_hits"] == 1
    assert same(kv, alone)
    assert same(of_chunk(stored), of_chunk(alone))


def _written_after_a_load(driver: Driver, salt: str, folder: Path) -> tuple[int, int, int, int]:
    fill(driver, salt)
    before, built = len(list(folder.iterdir())), num_built(driver)
    answer = ask(driver, salt)
    ask(driver, salt, (1, 0, 2))
    flush(driver)
    hits = answer.report["chunk_hits"]
    return before, len(list(folder.iterdir())), hits, num_built(driver) - built


def test_rounded_chunks_are_not_written_nor_built_again(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    engine = start_engine(**coded(profile, LEVEL))
    before, after, hits, built = engine.call(_written_after_a_load, "written", store)
    assert 0 < before == after
    assert hits == 3
    assert built == 0


def _both(driver: Driver, salt: str) -> tuple[Answer, Answer, list[Any], list[Any]]:
    """Ask while a chunk is there as it was built, and rounded too."""
    flush(driver)
    ask(driver, salt, (0, 1, 2))
    warm, kv = ask(driver, salt, (1, 2, 0)), chunk_kv(driver, salt)
    flush(driver)
    ask(driver, salt)
    assert not same(kv, rounded_kv(driver, salt))
    for index in range(3):  # as a server does that lacks storage for a while
        _build(driver, salt, index)
    return warm, ask(driver, salt, (1, 2, 0)), kv, chunk_kv(driver, salt)


def _build(driver: Driver, salt: str, index: int) -> None:
    """Have a chunk built that is there rounded alone."""
    driver.runtime.builder.enqueue([_key(driver, salt, index)])
    driver.settle()


def _key(driver: Driver, salt: str, index: int) -> ChunkKey:
    prefix, tokens = (array("q", part).tobytes() for part in (SYSTEM, CHUNKS[index]))
    return ChunkKey(driver.chunk_salt(salt), None, prefix, tokens)


def test_what_was_built_comes_before_what_was_rounded(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    warm, again, kv, kv_now = start_engine(**coded(profile, LEVEL)).call(_both, "both")
    assert same(kv, kv_now)
    assert again.report["chunk_hits"] == 3
    assert again.report["storage_tokens"] == 0
    assert again.logprobs == warm.logprobs


def _remembered(driver: Driver, salt: str) -> tuple[int | None, bool, int | None]:
    """Return where the memory of a rounded chunk is, and after its build where the other one is."""
    fill(driver, salt)
    ask(driver, salt)
    driver.settle()
    memories, store = driver.runtime._memories, driver.runtime.admission._store
    key, span = _key(driver, salt, 1), Span(0, len(CHUNKS[1]))
    rounded = store.find(key, span)
    assert rounded.is_rounded
    before = memories.place_of(rounded)
    waits = any(memories.wants(probe) is not None for probe in memories.keys_of([key]))
    _build(driver, salt, 1)
    ask(driver, salt, (1, 2, 0))
    driver.settle()
    built = store.find(key, span)
    assert not built.is_rounded
    return before, waits, memories.place_of(built)


def test_what_rounding_did_is_not_remembered_of_what_was_built(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    engine = start_engine(**coded(profile, LEVEL, blend_policy="funnel", max_total_tokens=4096))
    before, waits, after = engine.call(_remembered, "memory")
    assert before is not None
    assert not waits, "a probe of what is built is compared with what is rounded"
    assert after is not None
    assert after != before


def _after_new_weights(driver: Driver, salt: str) -> tuple[Answer, Answer, list[Any], list[Any]]:
    """Store chunks of weights that no profile was measured on, and ask for them."""
    runner = driver.scheduler.tp_worker.model_runner
    weight = next(iter(runner.model.parameters())).data
    weight.mul_(1.25)
    try:
        driver.runtime.weights_changed()
        warm, kv, _ = fill(driver, salt)
        back = ask(driver, salt)
        return warm, back, kv, chunk_kv(driver, salt)
    finally:
        weight.div_(1.25)
        driver.runtime.weights_changed()
        driver.settle()


def test_after_a_weight_update_chunks_are_stored_and_found_losslessly(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    engine = start_engine(**coded(profile, LEVEL))
    warm, back, kv, kv_back = engine.call(_after_new_weights, "weights")
    assert back.report["storage_tokens"] > 0
    assert back.report["chunk_hits"] == 3
    assert same(kv, kv_back)
    assert back.logprobs == warm.logprobs

"""Chunks that came in few bits are kept apart: nothing takes them for what a build would compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coded_chunks import coded, profile, rounded_kv
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, rag_prompt, random_tokens
from sparse_path import assert_same
from stored_chunks import CHUNKS, QUESTION, SYSTEM, ask, chunk_kv, fill, flush, num_built, same
from stored_files import NEEDS_NAMESPACES, store

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


def _built_beside_rounded(driver: Driver, salt: str) -> tuple[Answer, list[Any], list[Any]]:
    """Have a chunk built by a server that holds nothing else but rounded KV, and by one without."""
    fill(driver, salt)
    driver.ask(rag_prompt(SYSTEM, [CHUNKS[0]], QUESTION, salt=salt))
    driver.settle()
    (answer,) = driver.ask(rag_prompt(SYSTEM, [CHUNKS[0], NEW], QUESTION, salt=salt))
    driver.settle()
    kv = driver.kv(SYSTEM + NEW, driver.chunk_salt(salt))
    flush(driver)
    alone = f"{salt} alone"
    driver.ask(rag_prompt(SYSTEM, [NEW], QUESTION, salt=alone))
    driver.settle()
    return answer, kv, driver.kv(SYSTEM + NEW, driver.chunk_salt(alone))


def test_l4_holds_for_chunks_that_are_built_beside_rounded_ones(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    answer, kv, alone = start_engine(**coded(profile, LEVEL)).call(_built_beside_rounded, "beside")
    assert answer.report["chunk_hits"] == 1
    assert same(kv, alone)


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
    warm, kv, _ = fill(driver, salt)
    ask(driver, salt)
    rounded = rounded_kv(driver, salt)
    assert not same(kv, rounded)
    for index in range(3):  # a server that lacks storage for a while builds them
        _build(driver, salt, index)
    (again,) = driver.ask(rag_prompt(SYSTEM, [CHUNKS[i] for i in (2, 0, 1)], QUESTION, salt=salt))
    return warm, again, kv, chunk_kv(driver, salt)


def _build(driver: Driver, salt: str, index: int) -> None:
    """Have a chunk built that is there rounded alone."""
    from array import array

    from sgl_blend.radix_ext.chunk_store import ChunkKey

    prefix, tokens = (array("q", part).tobytes() for part in (SYSTEM, CHUNKS[index]))
    key = ChunkKey(driver.chunk_salt(salt), None, prefix, tokens)
    driver.runtime.builder.enqueue([key])
    driver.settle()


def test_what_was_built_comes_before_what_was_rounded(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    warm, again, kv, kv_now = start_engine(**coded(profile, LEVEL)).call(_both, "both")
    assert same(kv, kv_now)
    assert again.report["chunk_hits"] == 3
    assert again.logprobs == warm.logprobs

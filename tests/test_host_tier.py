"""Chunks that were evicted to host memory come back, the same bytes, beside the forward."""

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, rag_prompt, random_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 20)
CHUNKS = [random_tokens(10 + i, 60) for i in range(3)]
QUESTION = random_tokens(99, 12)
POOL = 1000


def settings(**more: Any) -> dict[str, Any]:
    return {
        "max_total_tokens": POOL,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "blend_min_chunk_tokens": 32,
        **more,
    }


def _push_out(driver: Driver) -> None:
    """Let the device hold nothing any more."""
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=POOL))
    assert driver.runtime.describe()["pool"]["free"] == POOL


def _ask_warm(driver: Driver, where: str) -> tuple[Answer, list[Any]]:
    """Ask for chunks that were built, on the device or in host memory; return one chunk's KV, too."""
    driver.settle()
    driver.flush()
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))
    driver.settle()
    if where == "host":
        _push_out(driver)
    (answer,) = driver.ask(rag_prompt(SYSTEM, [CHUNKS[i] for i in (2, 0, 1)], QUESTION))
    driver.settle()
    return answer, driver.kv(SYSTEM + CHUNKS[1], driver.chunk_salt())


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_evicted_chunks_come_back(start_engine: StartEngine, overlap: bool) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    warm, kv = engine.call(_ask_warm, "device")
    back, kv_back = engine.call(_ask_warm, "host")

    assert (warm.report["chunk_hits"], warm.report["host_tokens"]) == (3, 0)
    assert back.report == {**warm.report, "host_tokens": 200}
    assert back.logprobs == warm.logprobs
    for layer, layer_back in zip(kv, kv_back, strict=True):
        assert all(x.equal(y) for x, y in zip(layer, layer_back, strict=True))

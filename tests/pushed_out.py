"""Chunks that are built and then pushed out to host memory: what tests of the host tier share."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch_cpu_hicache
import torch_cpu_streams
from harness import Answer, Driver, Prompt, rag_prompt, random_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

SYSTEM = random_tokens(1, 20)
CHUNKS = [random_tokens(10 + i, 60) for i in range(3)]
QUESTION = random_tokens(99, 12)
POOL = 1000


@dataclass
class Warm:
    """An answer that reused all chunks, and KV of one of them afterwards, by layer."""

    answer: Answer
    kv: list[Any]


def settings(**more: Any) -> dict[str, Any]:
    return {
        "max_total_tokens": POOL,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "blend_min_chunk_tokens": 32,
        **more,
    }


def push_out(driver: Driver) -> None:
    """Let the device hold nothing any more."""
    capacity = driver.runtime.describe()["pool"]["capacity"]
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
    assert driver.runtime.describe()["pool"]["free"] == capacity


@contextmanager
def slow_moves(move: str, seconds: float) -> Iterator[None]:
    """Let each call of a host pool's function take so long."""
    moves = torch_cpu_hicache._TorchMoves
    stock = getattr(moves, move)

    def slow(*args: Any, **more: Any) -> None:
        torch_cpu_streams.current_stream().submit(lambda: time.sleep(seconds))
        stock(*args, **more)

    with patch.object(moves, move, slow):
        yield


def slow_loads(layer_s: float) -> AbstractContextManager[None]:
    """Let each layer take so long to come back."""
    return slow_moves("load_to_device_per_layer", layer_s)


def store_chunks(driver: Driver, **rest: Any) -> None:
    """Have all chunks built, and nothing else."""
    driver.settle()
    driver.flush()
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, **rest))
    driver.settle()


def other_order(**rest: Any) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in (2, 0, 1)], QUESTION, **rest)


def ask_warm(driver: Driver, where: str, layer_s: float = 0.0, **rest: Any) -> Warm:
    """Ask for chunks that were built, on the device or in host memory."""
    store_chunks(driver, **rest)
    if where == "host":
        push_out(driver)
    with slow_loads(layer_s):
        (answer,) = driver.ask(other_order(**rest))
    driver.settle()
    return Warm(answer, driver.kv(SYSTEM + CHUNKS[1], driver.chunk_salt()))

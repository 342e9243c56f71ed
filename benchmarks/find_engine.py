"""The worker's side of benchmarks/find.py: SGLang's scheduler serves streams and is timed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from harness import Driver, Prompt

from benchmarks.find_streams import Marked
from benchmarks.match import FIXED_WORK


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a prompt.

    Attributes:
        served: Tokens that were not prefilled as usual: exact KV and KV of chunks.
        pieces: Chunks of which KV was used.
        piece_tokens: Their tokens.
    """

    served: int
    pieces: int
    piece_tokens: int


def serve(driver: Driver, stream: Sequence[Marked], marked: bool) -> tuple[list[Found], int]:
    """Serve a stream in turn, builds included, on an empty cache.

    Returns:
        What became of each prompt, and the tokens of all chunks that were learned.
    """
    driver.settle()
    driver.flush()
    before = _learned(driver)
    found = []
    for one in stream:
        (answer,) = driver.ask(_prompt(one, marked=marked))
        report = answer.report
        computed, length = report["computed_tokens"], report["prompt_tokens"]
        served = length - computed
        used = served - report["prefix_tokens"]
        found.append(Found(served, report["chunk_hits"], used))
        driver.settle()
    return found, _learned(driver) - before


def _learned(driver: Driver) -> int:
    finding = driver.runtime.describe().get("finding") or {}
    return int(finding.get("learned_tokens", 0))


def _prompt(one: Marked, *, marked: bool) -> Prompt:
    tokens = one.tokens.tolist()
    if not marked:
        return Prompt([tokens], logprobs=False)
    edges = [0, *(edge for span in one.spans for edge in span), len(tokens)]
    segments = [tokens[begin:end] for begin, end in pairwise(edges)]
    chunk_at = list(range(1, len(segments), 2))
    return Prompt(segments, chunk_at, logprobs=False)


# --- time ---------------------------------------------------------------------------------------


def time_lookups(
    driver: Driver, num_chunks: int, num_starts: int, num_prompts: int
) -> dict[str, Any]:
    """Time intake and lookup of prompts without marks that hold 16 stored chunks of 480 tokens.

    Args:
        driver: Of a server with --blend-find known.
        num_chunks: Of 64 tokens or 480, in the tree.
        num_starts: In the index, most of them of chunks that are not stored any more.
        num_prompts: To time.
    """
    from sglang.srt.utils import freeze_gc

    driver.settle()
    driver.flush()
    finder = driver.runtime.intake._finder
    draw = np.random.default_rng(2_411)
    head = array("q", [driver.runtime.intake._bos_token_id])
    lengths = [480 if number % 20 == 0 else 64 for number in range(num_chunks)]
    chunks = _store(driver, head, lengths, draw)
    fingerprints = draw.integers(1, 2**63, num_starts - num_chunks, dtype=np.uint64)
    finder._index.register(fingerprints, np.full(len(fingerprints), 480, np.uint32))
    freeze_gc("benchmark")
    long = [chunk for chunk in chunks if len(chunk) == 480]
    times: dict[str, list[float]] = {"intake": [], "lookup": [], "both": [], "fixed": []}
    found_tokens = 0
    for _ in range(num_prompts):
        picks = draw.choice(len(long), 16, replace=False)
        between = draw.integers(8, 100_000, (17, 20)).tolist()
        tokens = list(between[0])
        for number, pick in enumerate(picks, start=1):
            tokens += [*long[pick].tolist(), *between[number]]
        received = driver.receive(Prompt([tokens], logprobs=False))
        begun = time.perf_counter()
        state = driver.runtime.intake.read(received)
        read = time.perf_counter()
        req = driver.queued(received)
        queued = time.perf_counter()
        plan = driver.runtime.admission.plan(req, state)
        done = time.perf_counter()
        sum(value * value for value in range(FIXED_WORK))
        times["fixed"].append(time.perf_counter() - done)
        times["intake"].append(read - begun)
        times["lookup"].append(done - queued)
        times["both"].append(read - begun + done - queued)
        found_tokens += 0 if plan is None else sum(len(span) for span in plan.spans)
    return {
        "chunks": num_chunks,
        "starts": len(finder._index),
        "bytes_of_a_start": finder._index.num_bytes / len(finder._index),
        "prompt_tokens": len(tokens),
        "found_tokens": found_tokens / num_prompts,
        **{f"{name}_ms": _quantiles(seconds) for name, seconds in times.items()},
    }


def _store(
    driver: Driver, head: array[int], lengths: Sequence[int], draw: np.random.Generator
) -> list[array[int]]:
    """Insert chunks behind a build prefix, as finished builds do; their KV is not computed."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from sgl_blend.engine.tree import tree_key
    from sgl_blend.radix_ext.chunk_store import ChunkKey

    tree, store = driver.scheduler.tree_cache, driver.runtime.admission._store
    finder, allocator = driver.runtime.intake._finder, driver.scheduler.token_to_kv_pool_allocator
    salt = driver.chunk_salt()
    slots_of_head = allocator.alloc(len(head))
    chunks = []
    for number, length in enumerate(lengths):
        tokens = draw.integers(8, 110_000, length)
        # A first token of its own: the tree gives slots of shared tokens back, which is slow here.
        tokens[0] = 8 + number
        chunk, path = array("q", tokens.tolist()), array("q", head)
        path.extend(chunk)
        slots = torch.cat([slots_of_head, allocator.alloc(length)])
        key = tree_key(path, salt=salt, extra_key=None)
        stored = len(head) if number else 0
        tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=stored))
        chunk_key = ChunkKey(salt, None, head.tobytes(), chunk.tobytes())
        store.remember(chunk_key)
        finder.built(chunk_key)
        chunks.append(chunk)
    return chunks


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(1e3 * np.array(seconds), (0.5, 0.99))
    return {"p50": float(p50), "p99": float(p99)}

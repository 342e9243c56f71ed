"""Time to first token with chunks on the device, in host memory, in files, and nowhere.

SGLang's scheduler with the demo's model of 32 layers answers prompts of six chunks, stepped by hand in
a process of its own. Before each prompt its chunks are brought to one place. In each round every row
runs once, in a new order, so each makes pairs with all others:

    text        full prefill, nothing reused
    device      chunks in the KV pool
    host        chunks in host memory alone; they come back beside the forward
    file        chunks in files alone
    file N      the same, files read at N MB/s
    down        chunks in files alone, and every call of the store fails

Two engines: one loads whatever it finds (--blend-when always), one lets the loading controller choose
(--blend-when faster). Printed are the medians, and ratios of pairs with 95 % intervals. CacheBlend
(arXiv 2405.16444) claims that no delay is added as long as a layer loads faster than the chosen tokens
of a layer are recomputed.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.tiers --json benchmarks/results/tiers.json

Exit status 1 if host memory is slower than 1.05 of the device, or the controller than 1.05 of the best
fixed row of the same place, or a store that is down than 1.05 of text; each at the lower end of its
interval.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from harness import Driver, Engine, Prompt, rag_prompt, random_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from examples.demo.material import Recipe, prepare
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script

ROOT = Path(__file__).parents[1]
CHUNKS, CHUNK_TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS = 6, 368, 96, 24
THROTTLES = (50, 200, 1000)
PLACES = ("text", "device", "host", "file", *(f"file {mbps}" for mbps in THROTTLES), "down")
MODES = {"fixed": "always", "controller": "faster"}
BAR = 1.05
STORE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@contextmanager
def throttled(mbps: float) -> Iterator[None]:
    """Read files no faster than this."""
    stock = HiCacheFile.get

    def slow(self: Any, key: str, target: Any, *rest: Any) -> Any:
        begun = time.perf_counter()
        found = stock(self, key, target, *rest)
        least_s = target.numel() * target.element_size() / (1e6 * mbps)
        time.sleep(max(0.0, least_s - (time.perf_counter() - begun)))
        return found

    with patch.object(HiCacheFile, "get", slow):
        yield


def _prompt(number: int, *, blends: bool) -> Prompt:
    """Return a prompt in an order and a blended namespace of its own."""
    order = random.Random(number).sample(range(CHUNKS), CHUNKS)
    chunks = [random_tokens(100 + i, CHUNK_TOKENS) for i in order]
    ratio = 0.15 + 1e-7 * number
    params = {"sgl_blend_ratio": ratio} if blends else {"sgl_blend": False}
    question = random_tokens(1000 + number, QUESTION_TOKENS)
    return rag_prompt(
        random_tokens(1, SYSTEM_TOKENS),
        chunks,
        question,
        params=params,
        max_new_tokens=1,
        logprobs=False,
        salt=None if blends else f"text {number}",
    )


def store_chunks(driver: Driver) -> None:
    """Have all chunks built, and written to files."""
    driver.ask(_prompt(0, blends=True))
    driver.settle()


def ask(driver: Driver, place: str, number: int) -> tuple[float, dict[str, Any]]:
    """Bring the chunks to a place, ask, and return the seconds to the first token and the report."""
    driver.settle()
    if place == "text" or place == "down" or place.startswith("file"):
        driver.flush()
    else:
        driver.ask(_prompt(10**6 + number, blends=True))  # they come to the device
        driver.settle()
    if place == "host":
        capacity = driver.runtime.describe()["pool"]["capacity"]
        driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
    prompt = _prompt(number, blends=place != "text")
    with ExitStack() as stack:
        if place.startswith("file "):
            stack.enter_context(throttled(float(place.split()[1])))
        if place == "down":
            stack.enter_context(patch.object(HiCacheFile, "exists", side_effect=OSError("down")))
        begun = time.perf_counter()
        req = driver.submit(prompt)
        driver.run_until(req.finished, limit=10**7)
        seconds = time.perf_counter() - begun
    report = driver.answer(req).report
    driver.settle()
    return seconds, report


def run(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Run all rounds; return seconds by engine and place."""
    model = prepare(ROOT / "build" / "demo", Recipe(), print).model
    found: dict[str, dict[str, list[float]]] = {mode: {p: [] for p in PLACES} for mode in MODES}
    draw = random.Random("tiers")
    with ExitStack() as stack:
        engines = {}
        for mode, when in MODES.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(patch.dict("os.environ", {STORE: folder}))
            engines[mode] = Engine(
                model,
                enable_blend=True,
                blend_when=when,
                blend_policy="hkvd",
                max_total_tokens=8192,
                page_size=16,
                chunked_prefill_size=4096,
                enable_hierarchical_cache=True,
                hicache_ratio=1.5,
                hicache_storage_backend="file",
            )
            stack.callback(engines[mode].close)
            engines[mode].call(store_chunks)
        number = 0
        for turn in range(args.rounds + 1):
            for place in draw.sample(PLACES, len(PLACES)):
                for mode in draw.sample(sorted(MODES), len(MODES)):
                    number += 1
                    seconds, report = engines[mode].call(ask, place, number)
                    if turn:  # the first round warms up
                        found[mode][place].append(seconds)
                    print(
                        f"round {turn} {mode:>10} {place:>9}: {1e3 * seconds:7.1f} ms, hits "
                        f"{report['chunk_hits']}, host {report['host_tokens']}, storage "
                        f"{report['storage_tokens']}, ratio {report['ratio']:.2f}",
                        flush=True,
                    )
    return found


def ratio_of(mine: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios of pairs, with its 95 % interval."""
    logs = np.log(np.asarray(mine) / np.asarray(other))
    interval = mean_interval(logs.tolist(), seed=0)
    low, high = (float(np.exp(end)) for end in interval)
    return float(np.exp(np.mean(logs))), low, high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "tiers.json")
    args = parser.parse_args()
    found = run(args)
    medians = {
        mode: {p: float(np.median(s)) for p, s in rows.items()} for mode, rows in found.items()
    }
    fixed, chosen = found["fixed"], found["controller"]
    bars = {"host / device": ratio_of(fixed["host"], fixed["device"])}
    for place in PLACES[1:]:
        best = min((place, "text"), key=lambda row: medians["fixed"][row])
        bars[f"controller {place} / best fixed ({best})"] = ratio_of(chosen[place], fixed[best])
    bars["down / text"] = ratio_of(chosen["down"], chosen["text"])
    for mode, rows in medians.items():
        print(mode, {place: f"{1e3 * seconds:.0f} ms" for place, seconds in rows.items()})
    for name, (value, low, high) in bars.items():
        print(f"{name}: {value:.3f} [{low:.3f}, {high:.3f}], bar {BAR}")
    args.json.parent.mkdir(exist_ok=True, parents=True)
    args.json.write_text(
        json.dumps(
            {**origin_of_script(), "medians_s": medians, "bars": bars, "seconds": found}, indent=1
        )
        + "\n"
    )
    return int(any(low > BAR for _, low, _ in bars.values()))


if __name__ == "__main__":
    sys.exit(main())

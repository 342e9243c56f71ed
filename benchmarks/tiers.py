r"""Time to first token with chunks on the device, in host memory, in files, in Mooncake, and nowhere.

SGLang's scheduler with the demo's model of 32 layers answers prompts of six chunks, stepped by hand in
a process of its own. Before each prompt its chunks are brought to one place. In each round every row
runs once, in a new order, so each makes pairs with all others. Two engines that are started alike may
differ by some percent for as long as they live, so all engines start anew several times (--starts).

    text        full prefill, nothing reused
    device      chunks in the KV pool
    host        chunks in host memory alone; they come back beside the forward
    file        chunks in files alone
    file N      the same, files read at N MB/s
    mooncake    chunks in a Mooncake store alone, TCP on loopback; left out where it is not installed
    down        chunks in files alone, and every call of the store fails

One engine loads whatever it finds (--blend-when always, "fixed"), one lets the loading controller
choose (--blend-when faster). A store is asked once before each measurement, without a stopwatch: the
controller goes by the speeds that it has seen. Printed are the medians, and ratios of pairs with 95 %
intervals. CacheBlend (arXiv 2405.16444) claims that loading adds no delay as long as a layer loads
faster than the chosen tokens of a layer are recomputed; the plot draws that claim beside what was
measured.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.tiers --json benchmarks/results/tiers.json
    PYTHONPATH=tests .venv/bin/python -m benchmarks.tiers --levels \
        --json benchmarks/results/tiers-levels.json

With --levels, chunks that are stored raw and coded are compared instead, from files at 50 and 200 MB/s:
coded ones must load three times as fast.

Exit status 1 if host memory is slower than 1.05 of the device where the load can hide, else than 1.10
of the longer of load and compute; or the controller than 1.05 of the best fixed row of the same place;
or a store that is down than 1.05 of text; each at the lower end of its interval.
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
from threading import Lock
from typing import Any
from unittest.mock import patch

import mooncake_store
import numpy as np
from harness import Driver, Engine, Prompt, rag_prompt, random_tokens, run_with
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from benchmarks.tiers_plot import draw
from examples.demo.material import Recipe, prepare
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY

ROOT = Path(__file__).parents[1]
CHUNKS, CHUNK_TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS = 6, 368, 96, 24
THROTTLES = (50, 200, 1000)
FILE_PLACES = ("file", *(f"file {mbps}" for mbps in THROTTLES))
MODES = {"fixed": "always", "controller": "faster"}
WARM_UP = ("text", "host")
BAR, UNHIDDEN_BAR = 1.05, 1.10
USED_AGAIN_S = 120.0
MOONCAKE_BYTES = 512 << 20
STORE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@contextmanager
def throttled(mbps: float) -> Iterator[None]:
    """Read files no faster than this, all threads together."""
    stock = HiCacheFile.get
    lock, free_at = Lock(), [0.0]

    def slow(self: Any, key: str, target: Any, *rest: Any) -> Any:
        least_s = target.numel() * target.element_size() / (1e6 * mbps)
        with lock:
            free_at[0] = ends_at = max(free_at[0], time.perf_counter()) + least_s
        found = stock(self, key, target, *rest)
        time.sleep(max(0.0, ends_at - time.perf_counter()))
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
    with ExitStack() as stack:
        if place.startswith("file "):
            stack.enter_context(throttled(float(place.split()[1])))
        if place in (*FILE_PLACES, "mooncake"):
            _empty(driver)
            _ask(driver, place, 10**6 + number)  # the controller sees how fast it is
        if place in ("device", "host"):
            _ask(driver, place, 10**6 + number)  # they come to the device
        else:
            _empty(driver)
        if place == "host":
            capacity = driver.runtime.describe()["pool"]["capacity"]
            driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
        if place == "down":
            stack.enter_context(patch.object(HiCacheFile, "exists", side_effect=OSError("down")))
        found = _ask(driver, place, number)
    if place == "down":
        _wait_for_store(driver, number)
    return found


def _empty(driver: Driver) -> None:
    """Leave the chunks in the store alone."""
    driver.settle()
    driver.flush()


def _ask(driver: Driver, place: str, number: int) -> tuple[float, dict[str, Any]]:
    driver.settle()
    begun = time.perf_counter()
    req = driver.submit(_prompt(number, blends=place != "text"))
    driver.run_until(req.finished, limit=10**7)
    seconds = time.perf_counter() - begun
    report = driver.answer(req).report
    driver.settle()
    return seconds, report


def _wait_for_store(driver: Driver, number: int) -> None:
    """Ask until a store that was down is used again: it is left alone for a while."""
    deadline = time.monotonic() + USED_AGAIN_S
    for again in range(10**6):
        _empty(driver)
        _, report = _ask(driver, "file", 2 * 10**6 + 100 * number + again)
        if report["storage_tokens"]:
            return
        assert time.monotonic() < deadline, "the store is not used again"
        time.sleep(1.0)


def link(driver: Driver) -> dict[str, float]:
    """Return what the controller knows of host memory, and the bytes of a token's KV."""
    found = driver.runtime.storage.describe()
    controller = driver.runtime.storage._controller
    return {
        "host_latency_s": 1e-3 * found["host_latency_ms"],
        "host_bytes_per_s": 1e9 * found["host_gb_per_s"],
        "token_bytes": controller.token_bytes,
    }


@contextmanager
def started(
    model: Path, mode: str, extra: dict[str, Any] | None, profile: Path | None = None
) -> Iterator[Engine]:
    """Start an engine that stores in files or in Mooncake, and have the chunks stored."""
    more: dict[str, Any] = (
        {} if extra is None else {"hicache_storage_backend_extra_config": json.dumps(extra)}
    )
    if profile is not None:
        more["blend_store_profile"] = str(profile)
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {STORE: folder}):
        engine = Engine(
            model,
            enable_blend=True,
            blend_when=MODES[mode],
            blend_policy="hkvd",
            max_total_tokens=8192,
            page_size=16,
            chunked_prefill_size=4096,
            enable_hierarchical_cache=True,
            hicache_ratio=1.5,
            hicache_storage_backend="file" if extra is None else "mooncake",
            **more,
        )
        try:
            engine.call(Driver.use_all_cores)
            engine.call(store_chunks)
            yield engine
        finally:
            engine.close()


@contextmanager
def started_all(model: Path) -> Iterator[dict[tuple[str, str], Engine]]:
    """Start an engine of each mode with files, and one with Mooncake where that is installed."""
    with ExitStack() as stack:
        engines = {
            (mode, "file"): stack.enter_context(started(model, mode, None)) for mode in MODES
        }
        if mooncake_store.why_not() is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            store = stack.enter_context(
                mooncake_store.running(folder, segment_bytes=MOONCAKE_BYTES)
            )
            for mode in MODES:
                extra = store.extra_config()
                engines[mode, "mooncake"] = stack.enter_context(started(model, mode, extra))
        yield engines


def run(
    rounds: int, starts: int, path: Path
) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Run all rounds; return seconds by engine and place, and the speed of host memory.

    What was measured is in a file after each round: a run takes long and may be cut short.

    Args:
        rounds: How often each row runs, without warm-up.
        starts: How often all engines are started; the rounds are shared out among the starts.
        path: The file.
    """
    model = prepare(ROOT / "build" / "demo", Recipe(), print).model
    order = random.Random("tiers")
    places = ["text", "device", "host", *FILE_PLACES, "down"]
    if (why_not := mooncake_store.why_not()) is None:
        places.append("mooncake")
    else:
        print(why_not)
    found: dict[str, dict[str, list[float]]] = {mode: {p: [] for p in places} for mode in MODES}
    number = 0
    for start in range(starts):
        with started_all(model) as engines:
            for engine in engines.values():
                for place in WARM_UP:
                    number += 1
                    engine.call(ask, place, number)
            for turn in range(rounds * start // starts, rounds * (start + 1) // starts):
                for place in order.sample(places, len(places)):
                    for mode in order.sample(sorted(MODES), len(MODES)):
                        number += 1
                        engine = engines[mode, "mooncake" if place == "mooncake" else "file"]
                        seconds, report = engine.call(ask, place, number)
                        found[mode][place].append(seconds)
                        print(
                            f"start {start + 1} round {turn + 1} {mode:>10} {place:>9}: "
                            f"{1e3 * seconds:7.1f} ms, hits {report['chunk_hits']}, host "
                            f"{report['host_tokens']}, storage {report['storage_tokens']}, ratio "
                            f"{report['ratio']:.2f}",
                            flush=True,
                        )
                done = {"rounds": turn + 1, "starts": start + 1, "seconds": found}
                path.write_text(json.dumps({**origin_of_script(), **done}) + "\n")
            speed = engines["controller", "file"].call(link)
    return found, speed


def ratio_of(mine: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios of pairs, with its 95 % interval."""
    logs = np.log(np.asarray(mine) / np.asarray(other))
    interval = mean_interval(logs.tolist(), seed=0)
    low, high = (float(np.exp(end)) for end in interval)
    return float(np.exp(np.mean(logs))), low, high


def bars_of(
    found: dict[str, dict[str, list[float]]], load_s: float
) -> dict[str, tuple[tuple[float, float, float], float]]:
    """Return ratios of pairs with their intervals, each with what it may be at most.

    Args:
        found: Seconds by engine and place.
        load_s: What host memory takes to load all chunks.
    """
    fixed, chosen = found["fixed"], found["controller"]
    medians = {place: float(np.median(seconds)) for place, seconds in fixed.items()}
    device = fixed["device"]
    if load_s <= medians["device"]:
        bars = {"host / device": (ratio_of(fixed["host"], device), BAR)}
    else:
        longer = [max(load_s, seconds) for seconds in device]
        bars = {"host / max(load, compute)": (ratio_of(fixed["host"], longer), UNHIDDEN_BAR)}
    for place in fixed:
        best = min((place, "text"), key=lambda row: medians[row])
        name = f"controller {place} / best fixed ({best})"
        bars[name] = ratio_of(chosen[place], fixed[best]), BAR
    bars["down / text"] = ratio_of(chosen["down"], chosen["text"]), BAR
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--starts", type=int, default=4, help="of all engines; not with --levels")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "tiers.json")
    parser.add_argument("--plot", type=Path, help="PNG of the times by bandwidth")
    parser.add_argument(
        "--levels", action="store_true", help="compare raw with coded chunks instead"
    )
    args = parser.parse_args()
    if not args.levels and not 1 <= args.starts <= args.rounds:
        parser.error(f"--starts must be 1 to {args.rounds} (--rounds), got {args.starts}")
    run_with(KEEP_MEMORY, "benchmarks.tiers")  # equal engines differ even more else
    args.json.parent.mkdir(exist_ok=True, parents=True)
    if args.levels:
        from benchmarks import tiers_levels

        rates = tiers_levels.run(args.rounds)
        args.json.write_text(json.dumps({**origin_of_script(), "rates": rates}, indent=1) + "\n")
        return int(not tiers_levels.show(rates))
    found, host = run(args.rounds, args.starts, args.json)
    num_bytes = CHUNKS * CHUNK_TOKENS * host["token_bytes"]
    load_s = host["host_latency_s"] + num_bytes / host["host_bytes_per_s"]
    bars = bars_of(found, load_s)
    medians = {
        mode: {p: float(np.median(s)) for p, s in rows.items()} for mode, rows in found.items()
    }
    for mode, rows in medians.items():
        print(mode, {place: f"{1e3 * seconds:.0f} ms" for place, seconds in rows.items()})
    print(f"{num_bytes / 1e6:.0f} MB of KV; host memory loads them in {1e3 * load_s:.0f} ms")
    for name, ((value, low, high), bar) in bars.items():
        print(f"{name}: {value:.3f} [{low:.3f}, {high:.3f}], bar {bar}")
    record = {
        **origin_of_script(),
        "medians_s": medians,
        "bars": {name: [*ratio, bar] for name, (ratio, bar) in bars.items()},
        "starts": args.starts,
        "seconds": found,
        "num_bytes": num_bytes,
        "host": host,
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot is not None:
        draw(record, args.plot)
    return int(any(low > bar for (_, low, _), bar in bars.values()))


if __name__ == "__main__":
    sys.exit(main())

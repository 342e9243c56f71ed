"""Do deadlines hold when the bandwidth of the store changes? Fixed levels beside the adaptive one.

SGLang's scheduler with a model of random weights answers prompts of six chunks, stepped by hand in a
process of its own. The chunks are in files alone, at every level, and files are read at the rate of a
trace. In turns each prompt is served with every fixed level and with the one that adapts to the
deadline (sgl_blend_slo_ms); all see the same piece of the trace. The adaptive level learns how fast the
store is from its own prompts alone.

    steps      40 MB/s, and 4 MB/s for one second of three
    walk       a random walk between 2 and 200 MB/s
    shared     100 MB/s, of which others take a random share every half second

A violation is a first token after the deadline. Deadlines are what the prompt takes with its chunks at
the coarsest level in files that are read as fast as they can be, and 0.15, 0.4 or 1.2 seconds. That
time is measured anew in each turn; the median of the last five counts, because machines change.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.streaming --json benchmarks/results/streaming.json

Exit status 1 if the adaptive level violates more than half as often as the mean of the fixed levels.
Accuracy says nothing on random weights: all levels of a profile are within its budget, so every mix of
them is (benchmarks/codec.py).
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
from harness import Driver, Engine, Prompt, rag_prompt, random_tokens
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from benchmarks.streaming_plot import draw
from examples.demo.material import Recipe, prepare
from sgl_blend.commands.codec.profile import Plan, measure
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.storage.codec.collector import CollectedPage, read_collected
from sgl_blend.storage.codec.levels import LEVELS, blank_profile, write_profile
from sgl_blend.storage.codec.streams import RequestStream, StoreSpeed
from sgl_blend.storage.level_names import LOSSLESS

ROOT = Path(__file__).parents[1]
RECIPE = Recipe(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STORE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
CHUNKS, CHUNK_TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS, PAGE = 6, 368, 96, 24, 64
LEVEL_ROWS = (LOSSLESS, *LEVELS)
ADAPTIVE = "adaptive"
ALLOWANCES_S = (0.15, 0.4, 1.2)
TRACE_S, TICK_S = 600.0, 0.1
BAR = 0.5
Trace = Sequence[float]


class Served(NamedTuple):
    """A first token: the deadline, the time it took, and the levels that chunks came at."""

    slo_s: float
    seconds: float
    levels: list[str]


def traces() -> dict[str, Trace]:
    """Return MB/s by tenths of a second."""
    draw_from = random.Random("traces")
    ticks = int(TRACE_S / TICK_S)
    steps = [4.0 if (i * TICK_S) % 3.0 >= 2.0 else 40.0 for i in range(ticks)]
    walk, rate = [], 20.0
    for _ in range(ticks):
        rate = min(200.0, max(2.0, rate * draw_from.lognormvariate(0.0, 0.25)))
        walk.append(rate)
    shared, left = [], 1.0
    for i in range(ticks):
        if i % 5 == 0:
            left = draw_from.betavariate(0.7, 0.9)
        shared.append(max(2.0, 100.0 * left))
    return {"steps": steps, "walk": walk, "shared": shared}


class Throttle:
    """Lets files be read at the rate of a trace, all threads together."""

    def __init__(self, trace: Trace) -> None:
        # MB that have gone through by the end of each tick.
        self._sums = [0.0]
        for rate in trace:
            self._sums.append(self._sums[-1] + rate * TICK_S)
        self._lock = Lock()
        self._zero = 0.0
        self._free_at = 0.0

    def begin(self, at_s: float) -> None:
        """Let the trace stand at this time now."""
        self._zero = time.perf_counter() - at_s
        self._free_at = at_s

    def _at(self, moment_s: float) -> float:
        index = min(int(moment_s / TICK_S), len(self._sums) - 2)
        share = moment_s / TICK_S - index
        return self._sums[index] + share * (self._sums[index + 1] - self._sums[index])

    def take(self, megabytes: float) -> None:
        """Return when so much has gone through."""
        with self._lock:
            begun = max(self._free_at, time.perf_counter() - self._zero)
            goal = self._at(begun) + megabytes
            index = min(bisect.bisect_left(self._sums, goal) - 1, len(self._sums) - 2)
            part = self._sums[index + 1] - self._sums[index]
            self._free_at = ends = (index + (goal - self._sums[index]) / part) * TICK_S
        time.sleep(max(0.0, ends + self._zero - time.perf_counter()))


@contextmanager
def throttled(throttle: Throttle) -> Iterator[None]:
    """Read files at the rate of a trace."""
    stock = HiCacheFile.get

    def slow(self: Any, key: str, target: Any, *rest: Any) -> Any:
        throttle.take(target.numel() * target.element_size() / 1e6)
        return stock(self, key, target, *rest)

    with patch.object(HiCacheFile, "get", slow):
        yield


def prompt_of(number: int, slo_ms: float | None) -> Prompt:
    """Return a prompt in an order and a blended namespace of its own."""
    order = random.Random(number).sample(range(CHUNKS), CHUNKS)
    params: dict[str, Any] = {"sgl_blend_ratio": 0.15 + 1e-7 * number}
    if slo_ms is not None:
        params["sgl_blend_slo_ms"] = slo_ms
    return rag_prompt(
        random_tokens(1, SYSTEM_TOKENS),
        [random_tokens(100 + i, CHUNK_TOKENS) for i in order],
        random_tokens(1000 + number, QUESTION_TOKENS),
        params=params,
        max_new_tokens=1,
        logprobs=False,
    )


def ask(driver: Driver, number: int, slo_ms: float | None) -> tuple[float, list[str]]:
    """Return the seconds to the first token, and the levels that chunks came at."""
    begun = time.perf_counter()
    req = driver.submit(prompt_of(number, slo_ms))
    driver.run_until(req.finished, limit=10**7)
    seconds = time.perf_counter() - begun
    report = driver.answer(req).report
    driver.settle()
    return seconds, [level for level in report["chunk_levels"] if level is not None]


def store(driver: Driver) -> None:
    """Have all chunks built and stored."""
    for number in range(2):
        ask(driver, number, None)
    driver.settle()
    driver.flush()


def least(driver: Driver, number: int) -> float:
    """Return what a prompt takes with its chunks at the coarsest level, without a trace."""
    with _untold(), patch.object(RequestStream, "choose", _always(LEVEL_ROWS[-1])):
        driver.settle()
        driver.flush()
        return ask(driver, number, None)[0]


class _StoppedClock:
    """Seconds that go by only while the adaptive level is served, which knows nothing of the others."""

    def __init__(self) -> None:
        self._gone = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._gone + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._gone, self._since = self(), None


@contextmanager
def _untold() -> Iterator[None]:
    """Let nobody learn how fast the store is."""
    with patch.multiple(StoreSpeed, heard=_nothing, gave_up=_nothing, decoded=_nothing):
        yield


def _nothing(*_: object) -> None:
    """Take what is told, and forget it."""


def begin(driver: Driver) -> None:
    """Forget how fast the store is, and give it a clock that stops."""
    _speed_of(driver).__init__(_StoppedClock())


def _speed_of(driver: Driver) -> Any:
    """Return the StoreSpeed of a server that stores chunks at levels."""
    levels = driver.runtime._levels
    assert levels is not None
    return levels.levels.speed


def serve(
    driver: Driver, rows: Sequence[str], trace: Trace, moment: float, slo_s: float, first: int
) -> dict[str, tuple[float, list[str]]]:
    """Serve one prompt with each row at one moment of a trace, chunks from the store alone."""
    throttle, found = Throttle(trace), {}
    clock = _speed_of(driver)._clock
    for index, row in enumerate(rows):
        driver.settle()
        driver.flush()
        with ExitStack() as stack:
            if row == ADAPTIVE:
                stack.enter_context(clock.running())
            else:
                stack.enter_context(_untold())
                stack.enter_context(patch.object(RequestStream, "choose", _always(row)))
            throttle.begin(moment)
            stack.enter_context(throttled(throttle))
            found[row] = ask(driver, first + index, 1000 * slo_s)
    return found


def _always(level: str) -> Callable[..., str]:
    return lambda self, kv_bytes, shares: level


def engine_settings(profile: Path, **more: Any) -> dict[str, Any]:
    """Return settings of an engine that stores in files."""
    return {
        "enable_blend": True,
        "blend_when": "always",
        "blend_policy": "hkvd",
        "blend_store_profile": str(profile),
        "max_total_tokens": 8192,
        "page_size": PAGE,
        "chunked_prefill_size": 4096,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 1.5,
        "hicache_storage_backend": "file",
        **more,
    }


def make_profile(model: Path, path: Path) -> None:
    """Write a profile with every level: random weights have no accuracy that it could cost."""
    write_profile(blank_profile(), path)
    pages: list[CollectedPage] = []
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {STORE: folder}):
        engine = Engine(model, **engine_settings(path, blend_eval=True))
        try:
            engine.call(_build)
        finally:
            engine.close()
        for name in sorted(os.listdir(folder)):
            page = read_collected(Path(folder, name).read_bytes())
            pages += [] if page is None else [page]
    plan = Plan(model_path="", items=[], data="random weights", max_loss=0.0, levels=list(LEVELS))
    bare, figures = measure(plan, pages)
    write_profile(msgspec.structs.replace(bare, levels=figures), path)


def _build(driver: Driver) -> None:
    ask(driver, 0, None)
    driver.flush()


def run(prompts: int) -> dict[str, Any]:
    """Measure every trace, deadline and row."""
    model = prepare(ROOT / "build" / "streaming", RECIPE, print).model
    rows = (*LEVEL_ROWS, ADAPTIVE)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        path, folder = Path(name) / "profile", str(Path(name) / "store")
        make_profile(model, path)
        with patch.dict("os.environ", {STORE: folder}):
            levels = ",".join(LEVEL_ROWS)
            engine = Engine(model, **engine_settings(path, blend_store_levels=levels))
        try:
            engine.call(Driver.use_all_cores)
            engine.call(store)
            engine.call(begin)
            numbers = itertools.count(100, len(rows))
            recent = deque((engine.call(least, number) for number in range(2, 10)), maxlen=5)
            for trace_name, trace in traces().items():
                moments = [
                    random.Random(f"{trace_name} {i}").uniform(0, 300) for i in range(prompts)
                ]
                for allowance in ALLOWANCES_S:
                    served: dict[str, list[Served]] = {row: [] for row in rows}
                    for index, moment in enumerate(moments):
                        recent.append(engine.call(least, next(numbers)))
                        slo_s = statistics.median(recent) + allowance
                        # Each row is the first one as often as the others.
                        turn = [*rows[index % len(rows) :], *rows[: index % len(rows)]]
                        came = engine.call(serve, turn, trace, moment, slo_s, next(numbers))
                        for row in rows:
                            served[row].append(Served(slo_s, *came[row]))
                    case = {row: _figures(each) for row, each in served.items()}
                    slos_s = [one.slo_s for one in served[ADAPTIVE]]
                    found[f"{trace_name}, {allowance:g} s"] = {
                        "allowance_s": allowance, "slo_s": slos_s, "rows": case
                    }  # fmt: skip
                    told = ", ".join(f"{r} {c['violations']:.0%}" for r, c in case.items())
                    print(f"{trace_name}, {allowance:g} s: {told}", flush=True)
        finally:
            engine.close()
    return {"cases": found}


def _figures(served: Sequence[Served]) -> dict[str, Any]:
    levels = [level for one in served for level in one.levels]
    return {
        "violations": sum(one.seconds > one.slo_s for one in served) / len(served),
        "ttft_s": [one.seconds for one in served],
        "levels": {level: levels.count(level) for level in LEVEL_ROWS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--prompts", type=int, default=12, help="for each trace, deadline and level"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "streaming.json")
    parser.add_argument("--plot", type=Path, help="PNG of the violations")
    args = parser.parse_args()
    found = {**origin_of_script(), **run(args.prompts)}
    mean = {
        row: statistics.mean(case["rows"][row]["violations"] for case in found["cases"].values())
        for row in (*LEVEL_ROWS, ADAPTIVE)
    }
    fixed = statistics.mean(mean[row] for row in LEVEL_ROWS)
    best = min(LEVEL_ROWS, key=lambda row: mean[row])
    found |= {"mean": mean, "fixed": fixed, "best_fixed": best}
    print(f"violations: adaptive {mean[ADAPTIVE]:.1%}, mean of fixed levels {fixed:.1%}; {mean}")
    print(f"the best fixed level is {best}; in each case another one may be")
    args.json.parent.mkdir(exist_ok=True, parents=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot is not None:
        draw(found, args.plot)
    return int(mean[ADAPTIVE] > BAR * fixed)


if __name__ == "__main__":
    sys.exit(main())

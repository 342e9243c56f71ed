"""Raw and coded chunks from files that are read at a given rate; see benchmarks/tiers.py --levels."""

from __future__ import annotations

import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Driver

from benchmarks import tiers
from benchmarks.streaming import make_profile
from examples.demo.material import Recipe, prepare

RATES = (50, 200)
BAR = 3.0
RAW, CODED = "raw", "coded"


def run(rounds: int) -> dict[str, Any]:
    """Return, for each rate, the milliseconds that loads took, raw and coded, and the TTFT."""
    model = prepare(tiers.ROOT / "build" / "demo", Recipe(), print).model
    order = random.Random("levels")
    found: dict[str, Any] = {
        f"file {rate}": {name: {"load_ms": [], "ttft_s": []} for name in (RAW, CODED)}
        for rate in RATES
    }
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "profile"
        make_profile(model, path)
        engines = {
            name: stack.enter_context(tiers.started(model, "fixed", None, profile))
            for name, profile in ((RAW, None), (CODED, path))
        }
        number = 0
        for turn in range(rounds + 1):
            for place in order.sample(sorted(found), len(found)):
                for name in order.sample(sorted(engines), len(engines)):
                    number += 1
                    ms, seconds = engines[name].call(_ask, place, number)
                    if turn:  # the first round warms up
                        found[place][name]["load_ms"].append(ms)
                        found[place][name]["ttft_s"].append(seconds)
                    print(f"round {turn} {place} {name}: loads {ms:.0f} ms, TTFT {seconds:.2f} s")
    return found


def _ask(driver: Driver, place: str, number: int) -> tuple[float, float]:
    seconds, report = tiers.ask(driver, place, number)
    assert report["storage_tokens"], "nothing came from the store"
    return report["load_ms"], seconds


def bars_of(found: dict[str, Any]) -> dict[str, tuple[tuple[float, float, float], float]]:
    """Return how many times faster coded chunks load, with intervals and what it must be at least."""
    return {
        f"{place}: raw / coded, load": (
            tiers.ratio_of(rows[RAW]["load_ms"], rows[CODED]["load_ms"]),
            BAR,
        )
        for place, rows in found.items()
    }


def show(found: dict[str, Any]) -> bool:
    """Print medians and bars; return whether all hold."""
    for place, rows in found.items():
        for name, row in rows.items():
            print(
                f"{place} {name}: loads {statistics.median(row['load_ms']):.0f} ms, "
                f"TTFT {statistics.median(row['ttft_s']):.2f} s"
            )
    bars = bars_of(found)
    for name, ((value, low, high), bar) in bars.items():
        print(f"{name}: {value:.2f} [{low:.2f}, {high:.2f}], at least {bar}")
    return all(value >= bar for (value, _, _), bar in bars.values())

"""What the installed plugin costs while blending is off: law L8, in time.

Two real servers at the same time (asleep when idle), one with the plugin and without --enable-blend,
one that runs no line of sgl-blend (SGLANG_PLUGINS leaves it out). The same fresh prompts go
to both in turns, which one first changes from pair to pair, and the servers are started anew in every
round, in alternating order. Two figures, each stock's time over the other's, so 1 is equal and less is
slower:

    ttft          one prompt of about 700 tokens, time to the first token
    throughput    eight prompts at once, 16 tokens each, time until all are done

    .venv/bin/python -m benchmarks.off --json benchmarks/results/off.json

Printed: the median ratio with its 95 % bootstrap interval. Exit status 1 if a median is below 0.99.
--host-tier gives both servers SGLang's host memory behind the pool.

On a CPU the stock server also runs tools/cpu_platform: SGLANG_PLUGINS leaves out sgl-blend alone.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cold import HOST_TIER, measure
from examples.demo.material import Material, Recipe, prepare
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, running, stock_environment

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS = 700
BATCH = 8
BOUND = 0.99


def _prompt(draw: random.Random, material: Material, length: int) -> list[int]:
    return [draw.randrange(100, material.vocab_size) for _ in range(length)]


def _ttft(server: Server, prompts: list[list[int]]) -> float:
    return measure(server, prompts[0], None)[0]


def _batch(server: Server, prompts: list[list[int]]) -> float:
    """Return the seconds until all prompts are answered, sent at once."""

    def send(ids: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        server.http.post("/generate", json=body).raise_for_status()

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(BATCH) as pool:
        list(pool.map(send, prompts))
    return time.perf_counter() - start


KINDS = {"ttft": (_ttft, 1, PROMPT_TOKENS), "throughput": (_batch, BATCH, 200)}


def compare(servers: list[Server], material: Material, kind: str, pairs: int) -> list[float]:
    """Return stock's time over the other's for fresh prompts, pair by pair.

    Args:
        servers: Without the plugin, with it.
        material: Whose vocabulary the prompts are drawn from.
        kind: Of KINDS.
        pairs: How many; two more warm both servers up.
    """
    time_of, count, length = KINDS[kind]
    draw = random.Random(f"{kind} {time.time()}")
    ratios = []
    for number in range(pairs + 2):
        prompts = [_prompt(draw, material, length) for _ in range(count)]
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {index: time_of(servers[index], prompts) for index in order}
        if number >= 2:
            ratios.append(seconds[0] / seconds[1])
    return ratios


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10, help="of each kind in each round")
    parser.add_argument("--host-tier", action="store_true", help="with host memory behind the pool")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "off.json")
    args = parser.parse_args()
    flags = HOST_TIER if args.host_tier else []
    material = prepare(ROOT / "build" / "demo", Recipe(), print)
    logs = ROOT / "build"
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        with ExitStack() as stack:
            started: dict[str, Server] = {}
            names = {"without": (*KEEP_MEMORY, *stock_environment()), "with": KEEP_MEMORY}
            for name in list(names) if number % 2 == 0 else list(names)[::-1]:
                server = running(
                    material.model, flags, logs / f"off-{name}.log", environment=names[name]
                )
                started[name] = stack.enter_context(server)
            for kind in KINDS:
                pair = [started["without"], started["with"]]
                ratios = compare(pair, material, kind, args.pairs)
                found[kind] += ratios
                print(f"round {number + 1}, {kind}: {statistics.median(ratios):.4f}", flush=True)
    results: dict[str, Any] = {
        kind: {"ratio": statistics.median(r), "ci95": interval(r), "pairs": r}
        for kind, r in found.items()
    }
    record = {**origin_of_script(), "host_tier": args.host_tier, **results}
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    for kind, result in results.items():
        low, high = result["ci95"]
        print(f"{kind}: {result['ratio']:.4f} ({low:.4f} to {high:.4f}), {len(found[kind])} pairs")
    return int(any(result["ratio"] < BOUND for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""What the installed plugin costs while blending is off: law L8, in time.

Three real servers at the same time (asleep when idle): one with the plugin and without --enable-blend,
and two that run no line of sgl-blend (SGLANG_PLUGINS leaves it out). One of those is the control: what
it seems to cost is what this machine does to equal servers. The same fresh prompts go to all three
in turns, which one first changes from prompt to prompt. The servers are started anew in every round, in
another order. Two figures, each the first stock server's time over another server's, so 1 is equal and
less is slower:

    ttft          one prompt of about 700 tokens, time to the first token
    throughput    eight prompts at once, 16 tokens each, time until all are done

    .venv/bin/python -m benchmarks.off --json benchmarks/results/off.json

Printed: the median ratio with its 95 % bootstrap interval, and the same for the control. Exit status 1
if a median is below 0.99 and the control's is not: then it is the plugin that costs.
--host-tier gives all servers SGLang's host memory behind the pool.

On a CPU the stock servers also run tools/cpu_platform: SGLANG_PLUGINS leaves out sgl-blend alone.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cold import HOST_TIER, measure
from examples.demo.material import Material, Recipe, prepare
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, running, stock_environment

ROOT = Path(__file__).parents[1]
SMALL_POOL = ("--max-total-tokens", "12288")
"""For three servers with host memory, beside the 10 GB that SGLang leaves free."""
PROMPT_TOKENS = 700
BATCH = 8
BOUND = 0.99
STOCK, PLUGIN, CONTROL = SERVERS = ("stock", "plugin", "control")


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


def compare(
    servers: list[Server], material: Material, kind: str, count: int
) -> dict[str, list[float]]:
    """Return the first server's time over each other's for fresh prompts, one by one.

    Args:
        servers: As SERVERS.
        material: Whose vocabulary the prompts are drawn from.
        kind: Of KINDS.
        count: How many; as many as there are servers warm them up before.
    """
    time_of, size, length = KINDS[kind]
    draw = random.Random(f"{kind} {time.time()}")
    ratios: dict[str, list[float]] = {name: [] for name in SERVERS[1:]}
    num_servers = len(servers)
    for number in range(count + num_servers):
        prompts = [_prompt(draw, material, length) for _ in range(size)]
        turns = [(number + turn) % num_servers for turn in range(num_servers)]
        order = turns if number // num_servers % 2 == 0 else turns[::-1]
        seconds = {SERVERS[index]: time_of(servers[index], prompts) for index in order}
        if number >= num_servers:
            for name, found in ratios.items():
                found.append(seconds[STOCK] / seconds[name])
    return ratios


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def summary(ratios: list[float]) -> dict[str, Any]:
    """Return the median of ratios, its interval and the ratios."""
    return {"ratio": statistics.median(ratios), "ci95": interval(ratios), "pairs": ratios}


def costs(by_server: Mapping[str, Mapping[str, Any]]) -> bool:
    """Say whether the plugin misses the bound that the control holds."""
    return bool(by_server[PLUGIN]["ratio"] < BOUND <= by_server[CONTROL]["ratio"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10, help="of each kind in each round")
    parser.add_argument("--host-tier", action="store_true", help="with host memory behind the pool")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "off.json")
    args = parser.parse_args()
    flags = [*HOST_TIER, *SMALL_POOL] if args.host_tier else []
    material = prepare(ROOT / "build" / "demo", Recipe(), print)
    found = {kind: {name: list[float]() for name in SERVERS[1:]} for kind in KINDS}
    for number in range(args.rounds):
        with ExitStack() as stack:
            started: dict[str, Server] = {}
            for turn in range(len(SERVERS)):
                name = SERVERS[(number + turn) % len(SERVERS)]
                settings = KEEP_MEMORY if name == PLUGIN else (*KEEP_MEMORY, *stock_environment())
                log = ROOT / "build" / f"off-{name}.log"
                server = running(material.model, flags, log, environment=settings)
                started[name] = stack.enter_context(server)
            for kind in KINDS:
                ratios = compare([started[name] for name in SERVERS], material, kind, args.pairs)
                for name, values in ratios.items():
                    found[kind][name] += values
                    median = statistics.median(values)
                    print(f"round {number + 1}, {kind}, {name}: {median:.4f}", flush=True)
    results = {kind: {name: summary(r) for name, r in by.items()} for kind, by in found.items()}
    record = {**origin_of_script(), "host_tier": args.host_tier, **results}
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    for kind, by_server in results.items():
        for name, result in by_server.items():
            low, high = result["ci95"]
            line = f"{kind}, {name}: {result['ratio']:.4f} ({low:.4f} to {high:.4f})"
            print(f"{line}, {len(result['pairs'])} pairs")
    return int(any(costs(by_server) for by_server in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Does the gain last? Prompts of real passages that never come twice, on a pool too small for all.

Passages are cut from the documentation of Python's modules. A request draws a topic (a module) by
Zipf's law, four passages of it and one of another topic, in a new order, and asks a new question. The
library is several times as large as the KV pool, and the pool holds 20 prompts. Requests arrive at
Poisson times, the same for every server, so that stock computes for LOAD of the time:

    stock       plain SGLang
    blend       --enable-blend --blend-when always --blend-check-layer 1
    build       the same with --blend-on-miss build

The servers serve the same TURN requests in turns, which one first changes. After each turn the clock is
set by what stock's prompts took in it. Measured, and told by tenths of the requests: which share of the
passages' tokens was found (reused, recomputed or copied as exact KV, and stored before the request
came), the TTFT, and what occupies the pool. Beside it stands an ideal cache: LRU over whole passages,
as large as the pool, which holds nothing else and stores a passage at once.

    make novel NOVEL_ARGS="--json benchmarks/results/novel.json"
    make novel NOVEL_ARGS="--host-tier 4"       # with host memory of four KV pools behind every server

The engines are SGLang's scheduler, pool and model, which tests step by hand: `make novel` puts tests/
on the path. What the time is, benchmarks/novel_engine.py says. Each configuration is written as it
ends, beside those that the file holds already.

Exit status 1 if blending finds less than 0.9 of what the ideal cache finds in the second half, or its
median TTFT there is above stock's. With --host-tier the ideal cache is an unlimited one, and the bar is
0.95. Where the library is larger than the host tier, an ideal cache of that size may miss that bar,
too; its share is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Engine

from benchmarks import novel_engine
from benchmarks.novel_engine import Served, Use
from benchmarks.novel_traffic import (
    PASSAGE_TOKENS,
    PASSAGES,
    QUESTION_TOKENS,
    Passage,
    Request,
    draw_requests,
    ideal_shares,
    make_library,
    ratio_of,
)
from examples.demo.material import SYSTEM, Recipe, prepare
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script

ROOT = Path(__file__).parents[1]
BAR, HOST_TIER_BAR = 0.9, 0.95
UNLIMITED = 10**12
RECIPE = Recipe(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)
"""The clock stretches what the host does as much as what the model does. So the model is as large as
1,000 requests have time for: with a hidden size of 128 the host's few milliseconds weighed more than
twice as much."""
SLIM = replace(
    RECIPE, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2
)
POOL_PROMPTS = 20
SLICES = 10
TURN = 20
"""Requests that a server is asked before the next one has its turn: a machine slows down for longer."""
LOAD = 0.5
"""Share of the time for which stock computes prompts."""
PROMPT_S = 0.3
"""How long stock takes for a prompt of which it finds nothing, by the clock of the benchmark."""
LEAST_PROMPTS = 5
"""If there were so many such prompts in a turn, the clock of the next turn is set by them."""
BLEND = {"enable_blend": True, "blend_check_layer": 1, "blend_when": "always"}
MODES: dict[str, dict[str, Any]] = {
    "stock": {"enable_blend": None},
    "blend": BLEND,
    "build": {**BLEND, "blend_on_miss": "build"},
}
LIBRARIES, TENANTS = (2.0, 5.5, 8.0), (1, 3)


@contextmanager
def engines(model: Path, pool: int, host_tier: float) -> Iterator[dict[str, Engine]]:
    """Start one engine of each mode; with host memory of so many KV pools, if any."""
    tier: dict[str, Any] = {}
    if host_tier:
        tier = {"enable_hierarchical_cache": True, "hicache_ratio": host_tier}
    started: dict[str, Engine] = {}
    try:
        for mode, settings in MODES.items():
            sizes: dict[str, Any] = {"max_total_tokens": pool, "max_running_requests": 8}
            started[mode] = Engine(model, **settings, **sizes, **tier)
            print(f"{mode} started", flush=True)
        yield started
    finally:
        for engine in started.values():
            engine.close()


def time_alone(stock: Engine, library: Sequence[Passage], head: list[int]) -> float:
    """Return the CPU seconds of a request that is served alone and finds nothing."""
    requests = draw_requests(library, 30, 1)
    stock.call(novel_engine.begin, head, 100.0, 1.0)
    served = stock.call(novel_engine.serve, requests)
    return float(np.median([one.ttft_s for one in served[10:]]))


def compare(
    running: dict[str, Engine],
    library: Sequence[Passage],
    head: list[int],
    num_requests: int,
    tenants: int,
    capacities: tuple[int, int | None],
) -> dict[str, Any]:
    """Measure one configuration.

    Args:
        running: The servers, by their mode.
        library: Passages to draw from.
        head: Tokens that every prompt begins with.
        num_requests: How many are served.
        tenants: How many tenants they are of.
        capacities: Tokens that the ideal cache holds, and those of the host tier if there is one.
    """
    capacity, host_capacity = capacities
    alone_s = time_alone(running["stock"], library, head)
    requests = draw_requests(library, num_requests, tenants)
    for engine in running.values():
        engine.call(novel_engine.begin, head, PROMPT_S / LOAD, PROMPT_S / alone_s)
    size = -(-len(requests) // SLICES)
    served, uses, prompts_s = serve_in_turns(running, requests, alone_s, size)
    ideal = ideal_shares(requests, capacity)
    ideals = {"share": by_slice(ideal, size), "second_half": half_mean(ideal)}
    if host_capacity is not None:
        ideals["as_large_as_host"] = half_mean(ideal_shares(requests, host_capacity))
    return {
        "passages": len(library),
        "cpu_s_of_a_prompt": alone_s,
        "prompts": {"count": len(prompts_s), "median_s": median_or_none(prompts_s)},
        "ideal": ideals,
        "found": {
            mode: {
                **figures(served[mode], served["stock"], ideal, size),
                "pool": [asdict(use) for use in uses[mode]],
                "totals": None if mode == "stock" else engine.call(novel_engine.totals),
            }
            for mode, engine in running.items()
        },
    }


def serve_in_turns(
    running: dict[str, Engine], requests: Sequence[Request], expected_s: float, size: int
) -> tuple[dict[str, list[Served]], dict[str, list[Use]], list[float]]:
    """Let all servers serve the requests, a few at a time.

    Args:
        running: The servers, by their mode.
        requests: What they are asked.
        expected_s: CPU seconds of a whole prompt of stock's, by which their clocks are set so far.
        size: After so many requests the pools are looked into.

    Returns:
        What became of the requests, what occupied the pools, and how many seconds of its clock stock
        took for whole prompts; the clock is meant to make that PROMPT_S.
    """
    served: dict[str, list[Served]] = {mode: [] for mode in running}
    uses: dict[str, list[Use]] = {mode: [] for mode in running}
    taken_s: list[float] = []
    order = deque(running)
    for begin in range(0, len(requests), TURN):
        part = requests[begin : begin + TURN]
        for mode in order:
            served[mode] += running[mode].call(novel_engine.serve, part)
        order.rotate(-1)
        prompts_s = running["stock"].call(novel_engine.take_prompt_seconds)
        taken_s += [one / expected_s * PROMPT_S for one in prompts_s]
        if len(prompts_s) >= LEAST_PROMPTS:
            expected_s = statistics.median(prompts_s)
        for mode, engine in running.items():
            engine.call(novel_engine.stretch_to, PROMPT_S / expected_s)
            if (begin + len(part)) // size > begin // size:
                use = engine.call(novel_engine.look_into_pool)
                uses[mode] += [] if use is None else [use]
    return served, uses, taken_s


def figures(
    served: Sequence[Served], stock: Sequence[Served], ideal: Sequence[float], size: int
) -> dict[str, Any]:
    """Return shares and times of one server, the second half beside stock's and the ideal's."""
    half = len(served) // 2
    shares, times = [one.share for one in served], [one.ttft_s for one in served]
    others = [one.ttft_s for one in stock]
    of_ideal = ratio_of(shares[half:], ideal[half:], np.mean)
    return {
        "share": by_slice(shares, size),
        "second_half": half_mean(shares),
        "second_half_ci95": mean_interval(shares[half:], seed=0),
        "of_ideal": asdict(of_ideal),
        "ttft_p50_s": [statistics.median(times[i : i + size]) for i in range(0, len(times), size)],
        "ttft_second_half_s": statistics.median(times[half:]),
        "ttft_of_stock": asdict(ratio_of(times[half:], others[half:], np.median)),
        "ttft_of_stock_mean": asdict(ratio_of(times[half:], others[half:], np.mean)),
    }


def by_slice(values: Sequence[float], size: int) -> list[float]:
    """Return the mean of each slice."""
    return [statistics.mean(values[i : i + size]) for i in range(0, len(values), size)]


def median_or_none(values: Sequence[float]) -> float | None:
    """Return the median; None of nothing."""
    return statistics.median(values) if values else None


def half_mean(values: Sequence[float]) -> float:
    """Return the mean of the second half."""
    return statistics.mean(values[len(values) // 2 :])


def write(path: Path, name: str, case: dict[str, Any]) -> None:
    """Add a configuration to the file."""
    record = json.loads(path.read_text()) if path.exists() else {}
    record |= {key: case.pop(key) for key in ("command", "date", "versions", "commit", "machine")}
    record |= {"load": LOAD, "prompt_s": PROMPT_S}
    record.setdefault("cases", {})[name] = case
    path.write_text(json.dumps(record, indent=1) + "\n")


def show(name: str, found: dict[str, Any], bar: float) -> bool:
    """Print a configuration; return whether the blending server is within its bounds."""
    ideal, servers = found["ideal"]["second_half"], found["found"]
    print(f"{name}: {found['passages']} passages, ideal {ideal:.3f}")
    prompts = found["prompts"]
    if prompts["count"]:
        of = f"median of {prompts['count']}, for {PROMPT_S} s"
        print(f"  a whole prompt of stock's took {prompts['median_s']:.3f} s ({of})")
    if "as_large_as_host" in found["ideal"]:
        limited = found["ideal"]["as_large_as_host"]
        print(f"  an ideal cache as large as the host tier finds {limited:.3f}")
    for mode, told in servers.items():
        share, ttft = told["of_ideal"], told["ttft_of_stock"]
        print(
            f"  {mode:6} finds {told['second_half']:.3f}, of the ideal {share['value']:.3f} "
            f"[{share['low']:.3f}, {share['high']:.3f}]; TTFT {told['ttft_second_half_s']:.3f} s, of "
            f"stock's {ttft['value']:.3f} [{ttft['low']:.3f}, {ttft['high']:.3f}]",
            flush=True,
        )
    blend = servers.get("blend")
    return blend is None or (
        blend["of_ideal"]["value"] >= bar and blend["ttft_of_stock"]["value"] <= 1
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--libraries", nargs="+", type=float, default=LIBRARIES, help="in KV pools")
    parser.add_argument("--tenants", nargs="+", type=int, default=TENANTS)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--host-tier", type=float, default=0.0, help="KV pools of host memory behind every server"
    )
    parser.add_argument(
        "--slim",
        action="store_true",
        help="a far smaller model: shares are measured, and TTFT says nothing of a real model",
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "novel.json")
    args = parser.parse_args()
    from transformers import PreTrainedTokenizerFast

    name, recipe = ("novel-slim", SLIM) if args.slim else ("novel", RECIPE)
    material = prepare(ROOT / "build" / name, recipe, print)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(material.model)
    head = tokenizer.encode(SYSTEM)
    pool = POOL_PROMPTS * (len(head) + PASSAGES * PASSAGE_TOKENS + QUESTION_TOKENS)
    shape = {"hidden_size": recipe.hidden_size, "layers": recipe.num_hidden_layers}
    origin = origin_of_script()
    kept = []
    capacities = (UNLIMITED, round(args.host_tier * pool)) if args.host_tier else (pool, None)
    with engines(material.model, pool, args.host_tier) as running:
        for size in args.libraries:
            library = make_library(tokenizer, round(size * pool))
            for tenants in args.tenants:
                found = compare(running, library, head, args.requests, tenants, capacities)
                found |= {"library_in_pools": size, "tenants": tenants, "pool_tokens": pool}
                name = f"library {size:g}, tenants {tenants}, requests {args.requests}"
                name += ", slim" if args.slim else ""
                name += f", host tier {args.host_tier:g}" if args.host_tier else ""
                found |= {
                    "model": shape,
                    "requests": args.requests,
                    "slim": args.slim,
                    "host_tier": args.host_tier,
                }
                write(args.json, name, {**origin, **found})
                kept.append(show(name, found, HOST_TIER_BAR if args.host_tier else BAR))
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())

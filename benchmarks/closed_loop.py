"""What background builds cost a client that sends one request after another without a pause.

Three real servers, stock, a second stock and one with --enable-blend on default settings, run at the
same time, asleep when idle. One client sends prompts of 7,000 tokens (a system prompt, 14 chunks out of
a library five times as large as the KV pool, a new question) and reads 16 tokens of each; the next
request leaves when the last one has ended. Most chunks miss, so the blending server always has builds
to run, and a closed loop leaves it no moment but those between a request's own decode steps.

The prompts are the same on all servers, a block of them on one server at a time, the order of the
servers changing from block to block. After a block the builds are waited for, because they would slow
the next server down. A block's first request meets no builds of others and is left out. So each request
makes a pair with stock's, and so does each of the second stock server's: the null control, which shows
what the machine's own noise does to every figure.

    decode share    (time between first and last token, less stock's) / stock's end-to-end time
    gap share       time in gaps between tokens beyond the request's lower quartile, less the same of
                    stock, / stock's end-to-end time: a direct measure of what ran between decode
                    steps; neither blending's shorter prefill nor a slower step changes it
    end to end      ratio to stock's, less 1; blending's gain is in it
    ttft            the same for the time to first token

Printed are p50, p90, p99 and the largest of all pairs, with 95 % bootstrap intervals, beside the null
control's, and how many pairs are above the bar of 5 %. Exit status 1 if the 90th percentile of the gap
share, less the null control's where that is positive, is above it at the lower end of its interval.

    .venv/bin/python -m benchmarks.closed_loop --json benchmarks/results/closed-loop.json
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.material import Recipe, prepare
from sgl_blend.commands.bench.prompts import Library, Prompt, to_body
from sgl_blend.commands.bench.shapes import read_shape, write_shape
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, launched

ROOT = Path(__file__).parents[1]
BAR = 0.05
LIBRARY_SHARE = 5
CHUNKS, SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 14, 100, 40, 16
RESAMPLES = 2000
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
NAMES = ("stock", "null", "blend")


@dataclass(frozen=True, slots=True)
class Timing:
    """One request.

    Attributes:
        ttft_s: Until the first token, in seconds.
        e2e_s: Until the last one.
        late_s: Time in gaps between tokens beyond the lower quartile of them: with builds in every
            second gap the median would be one of those.
    """

    ttft_s: float
    e2e_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class Block:
    """One block on one server: its requests, without the first, and what was built meanwhile."""

    timings: list[Timing]
    chunks: int
    steps: int


def measure(server: Server, body: bytes) -> Timing:
    """Send one streamed request and read it to its end."""
    headers = {"Content-Type": "application/json"}
    start = time.perf_counter()
    times = []
    with server.http.stream("POST", "/generate", content=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    gaps = np.diff(times)
    late = float(np.sum(gaps - np.quantile(gaps, 0.25)).clip(0.0))
    return Timing(times[0] - start, times[-1] - start, late)


def run_block(server: Server, prompts: Sequence[Prompt], *, blends: bool) -> Block:
    """Send a block's prompts without a pause."""
    bodies = [to_body(prompt, {} if blends else None, OUTPUT_TOKENS) for prompt in prompts]
    before = _count_builds(server) if blends else (0, 0)
    timings = [measure(server, body) for body in bodies]
    after = _count_builds(server) if blends else (0, 0)
    if blends:
        server.wait_for_builds()
    return Block(timings[1:], after[0] - before[0], after[1] - before[1])


def _count_builds(server: Server) -> tuple[int, int]:
    """Return the chunks that the server has built, and in how many steps."""
    info = server.info()
    return info["chunks_built"], info["build_steps"]


def quantiles(values: Sequence[float], seed: int = 0) -> dict[str, dict[str, float]]:
    """Return each of QUANTILES with its 95 % bootstrap interval."""
    sample = np.asarray(values)
    draws = np.random.default_rng(seed).integers(len(sample), size=(RESAMPLES, len(sample)))
    found = {}
    for name, quantile in QUANTILES.items():
        low, high = np.quantile(np.quantile(sample[draws], quantile, axis=1), [0.025, 0.975])
        value = float(np.quantile(sample, quantile))
        found[name] = {"value": value, "low": float(low), "high": float(high)}
    return found


def compare(mine: list[Timing], stock: list[Timing]) -> dict[str, Any]:
    """Compare a server's requests with stock's, pair by pair."""

    def over(figure: Callable[[Timing, Timing], float]) -> dict[str, Any]:
        values = [figure(*pair) for pair in zip(mine, stock, strict=True)]
        above = sum(value > BAR for value in values)
        return {**quantiles(values), "above the bar": above, "pairs": len(values)}

    return {
        "decode share": over(lambda a, b: (a.e2e_s - a.ttft_s - b.e2e_s + b.ttft_s) / b.e2e_s),
        "gap share": over(lambda a, b: (a.late_s - b.late_s) / b.e2e_s),
        "end to end": over(lambda a, b: a.e2e_s / b.e2e_s - 1),
        "ttft": over(lambda a, b: a.ttft_s / b.ttft_s - 1),
    }


def show(name: str, found: dict[str, Any]) -> None:
    for figure, values in found.items():
        parts = [
            f"{quantile} {values[quantile]['value']:+.1%} "
            f"[{values[quantile]['low']:+.1%}, {values[quantile]['high']:+.1%}]"
            for quantile in QUANTILES
        ]
        print(
            f"{name:>6} {figure:>12}: {', '.join(parts)}; "
            f"{values['above the bar']} of {values['pairs']} above {BAR:.0%}"
        )


def is_above(blend: list[Timing], null: list[Timing], stock: list[Timing]) -> dict[str, Any]:
    """Tell whether blending's gap share is above the bar by more than the null control's.

    Returns:
        The difference of the two 90th percentiles over paired resamples, and the verdict.
    """
    shares = np.asarray(
        [
            [(a.late_s - c.late_s) / c.e2e_s, (b.late_s - c.late_s) / c.e2e_s]
            for a, b, c in zip(blend, null, stock, strict=True)
        ]
    )
    draws = np.random.default_rng(1).integers(len(shares), size=(RESAMPLES, len(shares)))
    resampled = np.quantile(shares[draws], 0.9, axis=1)
    differences = resampled[:, 0] - np.maximum(0.0, resampled[:, 1])
    low, high = np.quantile(differences, [0.025, 0.975])
    return {"low": float(low), "high": float(high), "above": bool(low > BAR)}


def find_model(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the model's folder and the flags it needs."""
    if args.shape is None:
        return prepare(ROOT / "build" / "demo", Recipe(), print).model, []
    model = write_shape(args.shape, ROOT / "build" / "shapes")
    return model, ["--load-format", "dummy", "--skip-tokenizer-init"]


def run(args: argparse.Namespace) -> tuple[dict[str, list[Block]], str]:
    """Run all blocks; return them by server, and how the blending server was started."""
    model, flags = find_model(args)
    flags += ["--max-total-tokens", str(args.pool_tokens), "--log-level", "warning"]
    chunk_tokens = (args.length - SYSTEM_TOKENS - QUESTION_TOKENS) // CHUNKS
    num_documents = LIBRARY_SHARE * args.pool_tokens // chunk_tokens
    draw = random.Random("closed loop")
    library = Library(
        draw,
        read_shape(model).vocab_size,
        system_tokens=SYSTEM_TOKENS,
        chunk_tokens=chunk_tokens,
        num_documents=num_documents,
    )
    extra = {"stock": flags, "null": flags, "blend": [*flags, "--enable-blend"]}
    blocks: dict[str, list[Block]] = {name: [] for name in NAMES}
    with ExitStack() as stack:
        launches = {
            name: stack.enter_context(
                launched(
                    model, extra[name], args.json.parent / f"closed-loop-{name}.log", KEEP_MEMORY
                )
            )
            for name in NAMES
        }
        servers = {name: launch.wait() for name, launch in launches.items()}
        for number in range(args.blocks + 1):
            prompts = [
                library.prompt(library.order(CHUNKS, draw.randrange(len(library))), QUESTION_TOKENS)
                for _ in range(args.requests + 1)
            ]
            turn = number % len(NAMES)
            for name in (*NAMES[turn:], *NAMES[:turn]):
                block = run_block(servers[name], prompts, blends=name == "blend")
                if number:  # the first block warms up
                    blocks[name].append(block)
                e2e = statistics.median(timing.e2e_s for timing in block.timings)
                late = statistics.median(timing.late_s for timing in block.timings)
                print(
                    f"block {number} {name:>6}: e2e {e2e:.2f} s, late {late:.3f} s, "
                    f"{block.chunks} chunks built in {block.steps} steps",
                    flush=True,
                )
        return blocks, servers["blend"].command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=10, help="on each server")
    parser.add_argument("--requests", type=int, default=6, help="measured in each block")
    parser.add_argument("--length", type=int, default=7000, help="tokens of a prompt")
    parser.add_argument("--pool-tokens", type=int, default=20_000, help="of each server's KV pool")
    parser.add_argument("--shape", help="a shape of sgl-blend bench instead of the demo's model")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "closed-loop.json")
    args = parser.parse_args()
    args.json.parent.mkdir(exist_ok=True, parents=True)
    blocks, command = run(args)
    timings = {
        name: [timing for block in found for timing in block.timings]
        for name, found in blocks.items()
    }
    compared = {name: compare(timings[name], timings["stock"]) for name in ("null", "blend")}
    verdict = is_above(timings["blend"], timings["null"], timings["stock"])
    built = sum(block.chunks for block in blocks["blend"])
    steps = sum(block.steps for block in blocks["blend"])
    facts = origin_of_script()
    settings = {"server": command, "requests": args.requests, "length": args.length}
    results = {**compared, "verdict": verdict, "chunks_built": built, "build_steps": steps}
    raw = {name: [asdict(block) for block in found] for name, found in blocks.items()}
    args.json.write_text(
        json.dumps({**facts, **settings, **results, "blocks": raw}, indent=1) + "\n"
    )
    for name, found in compared.items():
        show(name, found)
    print(
        f"{built} chunks built in the loop, {steps} steps; p90 of the gap share, less the null's: "
        f"[{verdict['low']:+.1%}, {verdict['high']:+.1%}], bar {BAR:.0%}"
    )
    return int(verdict["above"])


if __name__ == "__main__":
    sys.exit(main())

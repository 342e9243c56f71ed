"""What blending costs where it cannot help: cold requests and prompts without chunks.

Two real servers, stock and with --enable-blend, run at the same time (asleep when idle) and answer the
same prompts in turn, so that drift of the machine hits both alike. Every prompt is new to both.

    cold    system prompt, 6 unseen chunks, question: all chunks miss (--blend-on-miss compute)
    plain   the same length without separators
    short   system prompt, 3 of 4 stored chunks of 50 tokens in changing order, question: too little to
            gain anything by, which the server is to see by itself (--blend-when faster, the default)

Two equal servers can differ by 10 % and more for as long as they live: glibc hands the large temporary
tensors of a prefill back to the kernel or keeps them, by the allocations that came before, and memory
that must be faulted in again is slow. So both keep their memory (KEEP_MEMORY), the page faults per
request are printed, and the servers are started anew in every round, in alternating order. The overhead
is the geometric mean of the rounds' medians. --same compares stock with stock and shows what the method
itself adds; --default-malloc shows the effect of the allocator. --host-tier gives both servers SGLang's
host memory behind the pool.

The background builds that a cold request causes are waited for before the next one is sent; the figure
is what the request itself pays. --back-to-back does not wait: it shows what a closed loop of cold
requests pays, builds included.

    make bench-cold        # or: .venv/bin/python -m benchmarks.cold --pairs 15 --json build/cold.json
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.demo.material import Material, Recipe, prepare
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, running

ROOT = Path(__file__).parents[1]
BOUNDS = {"cold": 0.05, "plain": 0.02, "short": 0.02}
"""Exit status 1 above these."""
HOST_TIER = [
    *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--max-total-tokens", "24576"),  # SGLang leaves 10 GB free, beside three servers
]


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt on both servers: TTFT in seconds, and minor page faults until then."""

    stock_s: float
    blend_s: float
    stock_faults: int
    blend_faults: int


def count_faults(server: Server) -> int:
    """Return the minor page faults of all processes of a server since they started."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == server.process_group:
            total += int(fields[7])
    return total


def measure(server: Server, token_ids: list[int], spans: list[int] | None) -> tuple[float, int]:
    """Send one streamed request.

    Returns:
        The time to its first token, in seconds, and the page faults until then.
    """
    faults = count_faults(server)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
    if spans is not None:
        sampling["custom_params"] = {"sgl_blend_spans": spans}
    body = {"input_ids": token_ids, "sampling_params": sampling, "stream": True}
    start = time.perf_counter()
    with server.http.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: "):
                return time.perf_counter() - start, count_faults(server) - faults
    raise RuntimeError("the server sent no token")


def new_prompt(draw: random.Random, material: Material) -> tuple[list[int], list[int]]:
    """Return a prompt of about 2,000 random tokens and the spans of its six chunks."""
    ids = [draw.randrange(100, material.vocab_size) for _ in range(90)]
    spans: list[int] = []
    for _ in range(6):
        length = draw.randrange(290, 340)
        spans += [len(ids), len(ids) + length]
        ids += [draw.randrange(100, material.vocab_size) for _ in range(length)]
    ids += [draw.randrange(100, material.vocab_size) for _ in range(40)]
    return ids, spans


def short_prompts(draw: random.Random, material: Material) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts of 230 random tokens over the same four documents."""

    def words(count: int) -> list[int]:
        return [draw.randrange(100, material.vocab_size) for _ in range(count)]

    system, documents = words(50), [words(50) for _ in range(4)]
    while True:
        chosen = draw.sample(documents, 3)
        ids = system + [token for document in chosen for token in document] + words(30)
        yield ids, [50, 100, 100, 150, 150, 200]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    Attributes:
        chunks: Whether the blending server is told of the chunks.
        wait: Whether the builds that it causes are waited for.
        short: Whether it is short and its chunks are stored.
        repeat: How many pairs stand for one of the others.
    """

    chunks: bool
    wait: bool = True
    short: bool = False
    repeat: int = 1


def compare(
    stock: Server, blend: Server, material: Material, kind: Kind, num_pairs: int
) -> list[Pair]:
    """Measure fresh prompts on both servers in turn, the order changing from pair to pair."""
    draw = random.Random(str(kind))
    shorts = short_prompts(draw, material)
    warm_up = 6 if kind.short else 2
    found = []
    for number in range(num_pairs * kind.repeat + warm_up):
        ids, spans = next(shorts) if kind.short else new_prompt(draw, material)
        marked = spans if kind.chunks else None
        if number % 2 == 0:
            stock_s, stock_faults = measure(stock, ids, None)
        blend_s, blend_faults = measure(blend, ids, marked)
        if kind.wait:
            blend.wait_for_builds()  # they would slow the stock server down, on the same cores
        if number % 2:
            stock_s, stock_faults = measure(stock, ids, None)
        if number >= warm_up:
            found.append(Pair(stock_s, blend_s, stock_faults, blend_faults))
            print(
                f"  stock {stock_s * 1e3:7.1f} ms {stock_faults:7} faults   "
                f"blend {blend_s * 1e3:7.1f} ms {blend_faults:7} faults",
                flush=True,
            )
    return found


def summarise(rounds: list[list[Pair]]) -> dict[str, Any]:
    """Return medians over all pairs, and the overhead with that of each round.

    Args:
        rounds: The pairs of each round; stock was started first in the rounds 0, 2, …
    """
    pairs = [pair for found in rounds for pair in found]
    medians = [statistics.median(pair.blend_s / pair.stock_s for pair in found) for found in rounds]
    return {
        "stock_ttft_s": statistics.median(pair.stock_s for pair in pairs),
        "blend_ttft_s": statistics.median(pair.blend_s for pair in pairs),
        "stock_faults": statistics.median(pair.stock_faults for pair in pairs),
        "blend_faults": statistics.median(pair.blend_faults for pair in pairs),
        "overhead": statistics.geometric_mean(medians) - 1,
        "overhead_by_round": [median - 1 for median in medians],
        "pairs": [[asdict(pair) for pair in found] for found in rounds],
    }


@contextmanager
def both(
    model: Path,
    flags: tuple[list[str], list[str]],
    logs: Path,
    environment: Sequence[str],
    *,
    stock_first: bool,
) -> Iterator[tuple[Server, Server]]:
    """Run a stock server and one that blends, each with its flags, and yield them in this order."""
    stock = running(model, flags[0], logs / "cold-stock.log", environment=environment)
    other = running(model, flags[1], logs / "cold-blend.log", environment=environment)
    order = [stock, other] if stock_first else [other, stock]
    with order[0] as first, order[1] as second:
        yield (first, second) if stock_first else (second, first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6, help="in each round")
    parser.add_argument("--rounds", type=int, default=2, help="the servers are started in each")
    parser.add_argument(
        "--default-malloc", action="store_true", help="do not make the servers keep their memory"
    )
    parser.add_argument(
        "--back-to-back", action="store_true", help="also without waiting for builds"
    )
    parser.add_argument(
        "--same", action="store_true", help="compare stock with stock: what the method itself shows"
    )
    parser.add_argument("--host-tier", action="store_true", help="with host memory behind the pool")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "cold.json")
    args = parser.parse_args()
    material = prepare(ROOT / "build" / "demo", Recipe(), print)
    kinds = {"plain": Kind(chunks=False, wait=not args.same)}
    if not args.same:
        kinds["cold"] = Kind(chunks=True)
        kinds["short"] = Kind(chunks=True, short=True, repeat=5)
    if args.back_to_back:
        kinds["cold, back to back"] = Kind(chunks=True, wait=False)
    tier = HOST_TIER if args.host_tier else []
    flags = tier, [*tier, *([] if args.same else ["--enable-blend"])]
    environment = () if args.default_malloc else KEEP_MEMORY
    found: dict[str, list[list[Pair]]] = {name: [] for name in kinds}
    for number in range(args.rounds):
        stock_first = number % 2 == 0
        print(f"stock started {'first' if stock_first else 'second'}", flush=True)
        with both(
            material.model, flags, args.json.parent, environment, stock_first=stock_first
        ) as servers:
            for name, kind in kinds.items():
                print(name, flush=True)
                found[name].append(compare(*servers, material, kind, args.pairs))
    results = {name: summarise(rounds) for name, rounds in found.items()}
    facts = origin_of_script()
    settings = {"environment": environment, "same": args.same, "host_tier": args.host_tier}
    args.json.write_text(json.dumps({**facts, **settings, **results}, indent=1))
    for name, run in results.items():
        rounds = " ".join(f"{overhead:+.1%}" for overhead in run["overhead_by_round"])
        print(
            f"{name}: stock {run['stock_ttft_s'] * 1e3:.0f} ms, blend "
            f"{run['blend_ttft_s'] * 1e3:.0f} ms, overhead {run['overhead']:+.1%} (rounds {rounds}), "
            f"page faults {run['stock_faults']:.0f} and {run['blend_faults']:.0f}"
        )
    if args.same:
        return 0
    return int(any(results[name]["overhead"] > bound for name, bound in BOUNDS.items()))


if __name__ == "__main__":
    sys.exit(main())

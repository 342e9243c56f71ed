"""A soak: everything that can happen to a server at once, for a long time, and nothing may go wrong.

    make soak                                            # 30 minutes
    .venv/bin/python -m benchmarks.soak --minutes 3      # as in CI
    .venv/bin/python -m benchmarks.soak --host-tier      # evicted KV goes to host memory
    .venv/bin/python -m benchmarks.soak --storage        # and from there to files, which are damaged
    .venv/bin/python -m benchmarks.soak --find           # most prompts are not marked
    .venv/bin/python -m benchmarks.soak --experts        # a mixture of experts
    .venv/bin/python -m benchmarks.soak --adapters       # two LoRA adapters and the base model

A real server with --enable-blend serves the trained test model with far less KV memory than its traffic
wants, so chunks are evicted all the time and running requests are retracted. Clients of three tenants
send, all at the same time: blended and plain requests, streamed and not, n = 2, long prompts that are
cut by chunked prefill, long outputs, tiny prompts, prompt logprobs, malformed parameters, and requests
they hang up on before or after the first token. At random moments an operator (soak_operators.py)
flushes the cache, loads the weights again, releases and resumes memory, and pauses and continues, most
of it right after an answer whose chunks are still being built.

Checked, and each violation fails the run:

    answers     a sample of 2 % is asked at ratio 1 or without blending and compared token by token with
                a stock server without the plugin; a difference counts unless the two likeliest tokens
                were within 0.001 nats there
    reports     prefix + reused + recomputed + computed tokens are the prompt, for every answer
    status      200, or 400 for malformed requests, and nothing else; a flush may give 400 while clients
                wait, as on stock
    operator    after each operation an answer without blending and one at ratio 1 are compared; a
                flush leaves nothing pending and the whole pool free; no build runs on released memory
                or in a pause
    memory      SGLang's strict check of all slots runs whenever the server is idle and ends it on a
                leak; the run pauses once a minute so that it is; at the end nothing is locked and free
                and evictable slots are the whole pool
    RSS         of all processes of the server: the last quarter of the time after the warm-up is not
                more than 3 % above the first
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak_models import Setup, make_adapter, make_experts
from benchmarks.soak_operators import Gate, Operator
from benchmarks.soak_storage import STORAGE_FLAGS, STORAGE_VARIABLE, damaged_store
from benchmarks.soak_traffic import KINDS, Tally, Traffic
from sgl_blend.commands.common.records import origin_of_script, without_folders
from sgl_blend.commands.common.server import Server, running

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tinyrag" / "model"
CLIENTS = 10
PAUSE_EVERY_S = 60.0
MAX_GROWTH = 0.03
BLEND_FLAGS = [
    *("--enable-blend", "--enable-metrics", "--max-total-tokens", "4000", "--blend-when", "always"),
    *("--chunked-prefill-size", "512", "--schedule-conservativeness", "0.05"),
    *("--log-level", "warning", "--max-running-requests", "16"),
]
FIND_FLAGS = ["--blend-find", "learned"]
MARKED = 0.2
"""Share of the prompts that are marked where the server finds chunks by itself."""
HOST_TIER_FLAGS = ["--enable-hierarchical-cache", "--hicache-ratio", "4"]
STOCK_FLAGS = ["--max-total-tokens", "16000", "--log-level", "warning"]
MIN_SECONDS_TO_RETRACT = 600.0
"""SGLang retracts once in about 500 requests of this traffic, so a short run may see none."""
WARM_UP = 0.25
"""Share of the time before memory is looked at."""


def resident_bytes(server: Server) -> int:
    """Return the resident memory of all processes of a server."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == server.process_group:
                total += int((path.parent / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


async def watch(server: Server, tally: Tally, until_s: float, gate: Gate) -> None:
    """Look at memory, and pause the traffic once a minute so that the idle check runs."""
    start = time.monotonic()
    next_pause = start + PAUSE_EVERY_S
    while time.monotonic() < until_s:
        await asyncio.sleep(2.0)
        if time.monotonic() > next_pause:
            async with gate.closed():
                await asyncio.to_thread(wait_until_idle, server, tally)
            next_pause = time.monotonic() + PAUSE_EVERY_S
        tally.rss.append((time.monotonic() - start, resident_bytes(server)))


async def ping(name: str, server: Server, tally: Tally, until_s: float) -> None:
    """Ask for nothing, once a second and each time anew: does the process that answers stand still?"""
    async with httpx.AsyncClient(
        base_url=server.url, timeout=180.0, trust_env=False, headers={"Connection": "close"}
    ) as client:
        while time.monotonic() < until_s:
            begun = time.monotonic()
            (await client.get("/ping")).raise_for_status()
            seconds = time.monotonic() - begun
            tally.slowest_ping_s[name] = max(tally.slowest_ping_s.get(name, 0.0), seconds)
            await asyncio.sleep(1.0)


def wait_until_idle(server: Server, tally: Tally) -> None:
    """Wait until nothing runs and nothing is pending, and check the pool."""
    for _ in range(240):
        time.sleep(0.5)
        info = server.info()
        pool = info["pool"]
        pending = info["chunks_pending"] + info["probes_pending"]
        idle = pending == 0 and pool["locked"] == 0
        if idle and pool["free"] + pool["evictable"] == pool["capacity"]:
            tally.counts["idle checks"] += 1
            return
    tally.violate(f"the server never came to rest: {pool}")


def make_setup(args: argparse.Namespace) -> Setup:
    """Return the model and the adapters that the arguments ask for."""
    folder = ROOT / "build" / "soak"
    if args.experts:
        return Setup(make_experts(MODEL, folder / "experts"))
    if not args.adapters:
        return Setup(MODEL)
    config = json.loads((MODEL / "config.json").read_text())
    adapters = {
        name: make_adapter(folder / name, seed, config)
        for seed, name in enumerate(("first", "second"))
    }
    return Setup(MODEL, adapters)


async def soak(
    blend: Server, stock: Server, tally: Tally, args: argparse.Namespace, setup: Setup
) -> list[str]:
    """Run all clients and the operator for a while; return what the operator's doings are called."""
    # httpx may close a connection that expires after it was given to a request: a ReadError.
    limits = httpx.Limits(max_connections=64, keepalive_expiry=None)
    async with (
        httpx.AsyncClient(
            base_url=blend.url, timeout=180.0, trust_env=False, limits=limits
        ) as mine,
        httpx.AsyncClient(
            base_url=stock.url, timeout=180.0, trust_env=False, limits=limits
        ) as theirs,
    ):
        marked = MARKED if args.find else 1.0
        separator = blend.info()["separator"]
        traffic = Traffic(mine, theirs, tally, separator, marked, list(setup.adapters))
        until_s = time.monotonic() + args.minutes * 60
        gate = Gate()
        operator = Operator(mine, theirs, traffic, tally, setup)
        await asyncio.gather(
            watch(blend, tally, until_s, gate),
            operator.run(until_s, gate),
            ping("blend", blend, tally, until_s),
            ping("stock", stock, tally, until_s),
            *(traffic.run_client(number, until_s, gate) for number in range(CLIENTS)),
        )
    return operator.kinds


def growth(rss: list[tuple[float, int]]) -> float:
    """Return how much larger the median of the last quarter after the warm-up is than the first's."""
    warm = [size for at_s, size in rss if at_s >= WARM_UP * rss[-1][0]]
    quarter = max(1, len(warm) // 4)
    return statistics.median(warm[-quarter:]) / statistics.median(warm[:quarter]) - 1


def retractions(server: Server) -> int:
    """Return how often SGLang took a running request's memory away."""
    text = server.http.get("/metrics").raise_for_status().text
    found = re.findall(r"^sglang:num_retracted_requests_total\{[^}]*\} (\S+)", text, re.MULTILINE)
    return int(sum(float(value) for value in found))


def report(
    tally: Tally, info: dict[str, Any], retracted: int, seconds: float, operations: list[str]
) -> dict[str, Any]:
    """Put everything together, judge it and return it for the JSON file."""
    grown = growth(tally.rss)
    tally.expect(grown <= MAX_GROWTH, f"RSS grew by {grown:.1%}")
    if seconds > MIN_SECONDS_TO_RETRACT:
        tally.expect(retracted > 0, "nothing was retracted, the pool is too large for this traffic")
    tally.expect(info["chunk_hits"] > 0, "no chunk was ever hit")
    tally.expect(tally.counts["compared"] > 0, "nothing was compared")
    tally.expect(tally.counts["operations beside builds"] > 0, "no operation met a build")
    done = sum(tally.counts[kind] for kind in KINDS)
    return {
        "requests": done,
        "requests_per_s": done / seconds,
        "prompt_tokens_per_s": sum(tally.tokens.values()) / seconds,
        "counts": dict(tally.counts),
        "operations": {kind: tally.counts[kind] for kind in operations},
        "tokens": dict(tally.tokens),
        "ttft_ms": {
            kind: {
                "p50": 1e3 * statistics.median(times),
                "p99": 1e3 * statistics.quantiles(times, n=100)[98] if len(times) > 1 else None,
            }
            for kind, times in tally.ttft_s.items()
        },
        "retracted": retracted,
        "fallbacks": info["fallbacks"],
        "chunks_built": info["chunks_built"],
        "rss_growth": grown,
        "rss_bytes": tally.rss[-1][1],
        "slowest_ping_s": tally.slowest_ping_s,
        "violations": tally.violations,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--host-tier", action="store_true", help="evicted KV goes to host memory")
    parser.add_argument(
        "--storage", action="store_true", help="a host tier, and files behind it that are damaged"
    )
    parser.add_argument(
        "--find", action="store_true", help="most prompts are not marked, and the server learns"
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--experts", action="store_true", help="the model is a mixture of experts")
    model.add_argument(
        "--adapters", action="store_true", help="requests take one of two LoRA adapters, or none"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "soak.json")
    return parser.parse_args()


def judge_tiers(
    args: argparse.Namespace, info: dict[str, Any], tally: Tally, damages: dict[str, int]
) -> dict[str, Any]:
    """Note violations of what the flags promise, and return what is written of it."""
    found: dict[str, Any] = {}
    if args.host_tier or args.storage:
        tally.expect(info["host_tokens"] > 0, "nothing ever came back")
    if args.find:
        found["finding"] = info["finding"] | {"found_tokens": info["found_tokens"]}
        tally.expect(info["found_tokens"] > 0, "nothing was found without a mark")
        tally.expect(info["finding"]["learned_chunks"] > 0, "nothing was learned")
        failures = info["finding"]["find_failures"] + info["finding"]["learn_failures"]
        tally.expect(failures == 0, f"{failures} failures of finding and learning")
    if args.storage:
        found["storage"], found["damages"] = info["storage"], damages
        tally.expect(info["storage_tokens"] > 0, "nothing ever came from storage")
        tally.expect(info["storage"]["faults"].get("corrupt", 0) > 0, "no damage was seen")
    return found


def main() -> int:
    args = parse_arguments()
    args.json.parent.mkdir(exist_ok=True)
    logs = ROOT / "build"
    logs.mkdir(exist_ok=True)
    tally = Tally()
    flags = [*BLEND_FLAGS, *(HOST_TIER_FLAGS if args.host_tier or args.storage else ())]
    flags += STORAGE_FLAGS if args.storage else []
    flags += FIND_FLAGS if args.find else []
    setup = make_setup(args)
    # The model is so small that a second thread only waits.
    environment = ("OMP_NUM_THREADS=1",)
    with ExitStack() as stack:
        store = stack.enter_context(damaged_store())
        variables = (*environment, f"{STORAGE_VARIABLE}={store.folder}")
        blend = stack.enter_context(
            running(
                setup.model,
                [*flags, *setup.flags],
                logs / "soak-blend.log",
                environment=variables,
            )
        )
        stock = stack.enter_context(
            running(
                setup.model,
                [*STOCK_FLAGS, *setup.flags],
                logs / "soak-stock.log",
                environment=environment,
            )
        )
        start = time.monotonic()
        try:
            operations = asyncio.run(soak(blend, stock, tally, args, setup))
            seconds = time.monotonic() - start
            wait_until_idle(blend, tally)
            info = blend.info()
            found = report(tally, info, retractions(blend), seconds, operations)
            found |= judge_tiers(args, info, tally, dict(store.damages))
        except httpx.HTTPError as err:
            print((logs / "soak-blend.log").read_text()[-3000:])
            print("\n".join(tally.violations[:20]))
            print(f"the server is gone after {time.monotonic() - start:.0f} s: {err!r}")
            return 1
        command = " ".join(map(without_folders, blend.command.split()))
    args.json.write_text(
        json.dumps({**origin_of_script(), "server": command, **found}, indent=2) + "\n"
    )
    print(json.dumps(found, indent=2))
    for sentence in tally.violations[:20]:
        print("VIOLATION:", sentence)
    print(
        f"soak {args.minutes:g} min: {found['requests']} requests, {found['retracted']} retracted, "
        f"{tally.counts['idle checks']} idle checks without a leaked slot, "
        f"{sum(found['operations'].values())} operations, {tally.counts['operations beside builds']} "
        f"of them beside builds, {tally.counts['compared']} compared, RSS {found['rss_growth']:+.1%}, "
        f"slowest ping {max(tally.slowest_ping_s.values()):.1f} s, "
        f"{len(tally.violations)} violations"
    )
    return 1 if tally.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())

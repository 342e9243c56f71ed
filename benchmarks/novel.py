"""Does the gain last? Prompts of real passages that never come twice, on a pool too small for all.

Passages are cut from the documentation of Python's modules. A request draws a topic (a module) by
Zipf's law, four passages of it and one of another topic, in a new order, and asks a new question. The
library is several times as large as the KV pool, and the pool holds 20 prompts. Requests arrive at
Poisson times, the same for every server. Servers run one after the other:

    stock       plain SGLang
    blend       --enable-blend on default settings
    build       the same with --blend-on-miss build

Measured per tenth of the requests: which share of the passages' tokens was found (reused, recomputed or
copied as exact KV), and the TTFT. Beside it stands an ideal cache: LRU over whole passages, as large as
the pool, which holds nothing else and stores a passage at once.

    .venv/bin/python -m benchmarks.novel --library 5.5 --json benchmarks/results/novel.json

Exit status 1 if the blending server finds less than 0.9 of what the ideal cache finds in the second
half, or its median TTFT there is above stock's.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from examples.demo.material import SYSTEM, Recipe, cut, prepare, render, tokens_of
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, running

ROOT = Path(__file__).parents[1]
BAR = 0.9
RECIPE = Recipe(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PASSAGES, OF_TOPIC = 5, 4
LEAST_OF_TOPIC = 6
POOL_PROMPTS = 20
MODES = {
    "stock": (),
    "blend": ("--enable-blend",),
    "build": ("--enable-blend", "--blend-on-miss", "build"),
}
BINS = 10
LOAD = 0.5
"""Share of the time for which stock computes prompts."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of the library."""

    number: int
    topic: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        at_s: When it is sent.
        tenant: Its salt; None with one tenant.
        passages: In the order of the prompt.
        question: Tokens after them.
    """

    at_s: float
    tenant: str | None
    passages: tuple[Passage, ...]
    question: list[int]


def make_library(tokenizer: Any, num_tokens: int) -> list[Passage]:
    """Cut passages from the documentation of modules until there are so many tokens of them.

    Raises:
        ValueError: The modules have not so much text.
    """
    passages: list[Passage] = []
    total = topic = 0
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "test"):
            continue
        try:
            pieces = list(cut(render(name), tokenizer))
        except ImportError:  # of another platform
            continue
        if len(pieces) < LEAST_OF_TOPIC:
            continue
        for piece in pieces[:24]:
            tokens = tokens_of(tokenizer, piece)
            passages.append(Passage(len(passages), topic, tokens))
            total += len(tokens)
        topic += 1
        if total >= num_tokens:
            return passages
    raise ValueError(f"the library needs {num_tokens} tokens, the modules have {total}")


def make_requests(
    library: Sequence[Passage], count: int, rate: float, tenants: int
) -> list[Request]:
    """Draw requests; topics by Zipf's law, each tenant's among its own."""
    draw = random.Random(f"novel/{count}/{tenants}")
    by_topic: dict[int, list[Passage]] = {}
    for passage in library:
        by_topic.setdefault(passage.topic, []).append(passage)
    topics = list(by_topic)
    draw.shuffle(topics)
    vocabulary = range(100, 4000)
    at_s, requests = 0.0, []
    for number in range(count):
        at_s += draw.expovariate(rate)
        tenant = number % tenants
        own = topics[tenant::tenants]
        weights = [1 / (rank + 1) for rank in range(len(own))]
        topic, other = draw.choices(own, weights, k=2)
        chosen = draw.sample(by_topic[topic], OF_TOPIC)
        rest = [one for one in by_topic[other] if one not in chosen]
        chosen += draw.sample(rest, PASSAGES - OF_TOPIC)
        draw.shuffle(chosen)
        question = draw.choices(vocabulary, k=30)
        salt = f"tenant-{tenant}" if tenants > 1 else None
        requests.append(Request(at_s, salt, tuple(chosen), question))
    return requests


def ideal_shares(requests: Sequence[Request], capacity: int) -> list[float]:
    """Return per request which share of its passages' tokens an LRU of passages alone holds."""
    held: OrderedDict[int, int] = OrderedDict()
    shares = []
    for request in requests:
        found = sum(len(one.tokens) for one in request.passages if one.number in held)
        shares.append(found / sum(len(one.tokens) for one in request.passages))
        for one in request.passages:
            held[one.number] = len(one.tokens)
            held.move_to_end(one.number)
        while sum(held.values()) > capacity:
            held.popitem(last=False)
    return shares


async def _send(
    client: httpx.AsyncClient, request: Request, head: list[int], start_s: float, blends: bool
) -> tuple[float, float]:
    """Send a request at its time; return its TTFT and the share of passages' tokens found."""
    ids, spans = list(head), []
    for one in request.passages:
        spans += [len(ids), len(ids) + len(one.tokens)]
        ids += one.tokens
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ids + request.question, "sampling_params": sampling}
    if blends:
        sampling["custom_params"] = {"sgl_blend_spans": spans}
    if request.tenant is not None:
        body["cache_salt"] = request.tenant
    await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
    sent, first, last = time.perf_counter(), None, ""
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - sent
                last = line
    assert first is not None, "the server sent no token"
    meta = json.loads(last.removeprefix("data: "))["meta_info"]
    num_tokens = len(ids) - len(head)
    if blends:
        computed = meta["sgl_blend"][0]["computed_tokens"]
    else:
        computed = len(ids) + len(request.question) - meta["cached_tokens"]
    return first, 1 - max(0, computed - len(request.question)) / num_tokens


async def run(
    server: Server, requests: Sequence[Request], head: list[int], *, blends: bool
) -> list[tuple[float, float]]:
    """Send all requests; return TTFT and share of each."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, trust_env=False, limits=limits
    ) as client:
        start_s = time.perf_counter() + 1.0
        sending = (_send(client, one, head, start_s, blends) for one in requests)
        return list(await asyncio.gather(*sending))


async def time_alone(server: Server, library: Sequence[Passage], head: list[int]) -> float:
    """Return how long a request takes that is served alone and finds nothing, in seconds."""
    times = []
    for request in make_requests(library, 8, 1.0, 1):
        alone = replace(request, at_s=0.0)
        times.append((await run(server, [alone], head, blends=False))[0][0])
    return statistics.median(times)


def by_time(values: Sequence[float], how: Any) -> list[float]:
    """Return a figure of each tenth of the values."""
    size = -(-len(values) // BINS)
    return [how(values[i : i + size]) for i in range(0, len(values), size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--library", type=float, default=5.5, help="in KV pools")
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--rate", type=float, help="requests per second; by default half of what stock can serve"
    )
    parser.add_argument("--modes", default="stock,blend,build")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "novel.json")
    args = parser.parse_args()
    from transformers import PreTrainedTokenizerFast

    material = prepare(ROOT / "build" / "novel", RECIPE, print)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(material.model)
    head = tokenizer.encode(SYSTEM)
    pool = POOL_PROMPTS * (len(head) + PASSAGES * 360 + 30)
    library = make_library(tokenizer, round(args.library * pool))
    rate = args.rate
    if rate is None:
        flags = ["--max-total-tokens", str(pool)]
        log = ROOT / "build" / "novel-rate.log"
        with running(material.model, flags, log, environment=KEEP_MEMORY) as server:
            rate = LOAD / asyncio.run(time_alone(server, library, head))
    requests = make_requests(library, args.requests, rate, args.tenants)
    half = len(requests) // 2
    ideal = ideal_shares(requests, pool)
    found: dict[str, Any] = {
        "ideal": {
            "share": by_time(ideal, statistics.mean),
            "second_half": statistics.mean(ideal[half:]),
        }
    }
    print(f"{len(library)} passages, pool of {pool} tokens, ideal {found['ideal']}", flush=True)
    for mode in args.modes.split(","):
        flags = [*MODES[mode], "--max-total-tokens", str(pool)]
        log = ROOT / "build" / f"novel-{mode}.log"
        with running(material.model, flags, log, environment=KEEP_MEMORY) as server:
            results = asyncio.run(run(server, requests, head, blends=mode != "stock"))
        times, shares = [t for t, _ in results], [s for _, s in results]
        found[mode] = {
            "share": by_time(shares, statistics.mean),
            "second_half": statistics.mean(shares[half:]),
            "ttft_p50_s": by_time(times, statistics.median),
            "ttft_second_half_s": statistics.median(times[half:]),
        }
        print(mode, json.dumps(found[mode]), flush=True)
    record = {
        **origin_of_script(),
        "library_in_pools": args.library,
        "pool_tokens": pool,
        "passages": len(library),
        "tenants": args.tenants,
        "requests": args.requests,
        "rate": rate,
    }
    known = json.loads(args.json.read_text()) if args.json.exists() else {}
    known[f"library {args.library:g}, tenants {args.tenants}"] = {**record, "found": found}
    args.json.write_text(json.dumps(known, indent=1) + "\n")
    if "blend" not in found:
        return 0
    share = found["blend"]["second_half"] / found["ideal"]["second_half"]
    print(f"blend finds {share:.3f} of what the ideal cache finds")
    slower = "stock" in found and (
        found["blend"]["ttft_second_half_s"] > found["stock"]["ttft_second_half_s"]
    )
    return int(share < BAR or slower)


if __name__ == "__main__":
    sys.exit(main())

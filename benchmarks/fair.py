"""Is blending fair to requests that do not blend? Their time to first token beside blended traffic.

One real server at a time serves the same mixed traffic: requests arrive at Poisson times; half of
them are RAG prompts of 3 out of 12 documents, half are plain prompts of the same length, all new. On
the blending server the documents are marked as chunks, on the stock server they are not; times and
prompts of a block are the same. Blocks alternate between the two servers, each started once and asleep
while the other works.

    .venv/bin/python -m benchmarks.fair --json benchmarks/results/fair.json

Printed: p50 of the TTFT of plain and of RAG requests on both. Exit status 1 if plain requests are more
than 2 % slower on the blending server.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from examples.demo.material import Material, Recipe, prepare
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, running

ROOT = Path(__file__).parents[1]
DOCUMENTS, CHUNKS, CHUNK_TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS = 12, 3, 200, 60, 40
BOUND = 1.02


class Load:
    """The requests of one block: when each arrives, and what it is."""

    def __init__(self, material: Material, seconds: float, rate: float, block: int) -> None:
        words = random.Random("documents")
        vocabulary = range(100, material.vocab_size)
        self._system = words.choices(vocabulary, k=SYSTEM_TOKENS)
        self._documents = [words.choices(vocabulary, k=CHUNK_TOKENS) for _ in range(DOCUMENTS)]
        draw = random.Random(f"block {block}")
        self.requests: list[tuple[float, bool, list[int], list[int]]] = []
        at_s = draw.expovariate(rate)
        while at_s < seconds:
            self.requests.append((at_s, *self._request(draw, vocabulary)))
            at_s += draw.expovariate(rate)

    def _request(self, draw: random.Random, vocabulary: range) -> tuple[bool, list[int], list[int]]:
        question = draw.choices(vocabulary, k=QUESTION_TOKENS)
        if draw.random() < 0.5:
            length = SYSTEM_TOKENS + CHUNKS * CHUNK_TOKENS
            return False, draw.choices(vocabulary, k=length) + question, []
        ids, spans = list(self._system), []
        for document in draw.sample(self._documents, CHUNKS):
            spans += [len(ids), len(ids) + CHUNK_TOKENS]
            ids += document
        return True, ids + question, spans


async def _send(
    client: httpx.AsyncClient, at_s: float, ids: list[int], spans: list[int], blends: bool
) -> float:
    await asyncio.sleep(at_s)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    if spans and blends:
        sampling["custom_params"] = {"sgl_blend_spans": spans}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    start = time.perf_counter()
    async with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        first = None
        async for line in response.aiter_lines():
            if line.startswith("data: {") and first is None:
                first = time.perf_counter() - start
    assert first is not None, "the server sent no token"
    return first


async def run_block(server: Server, load: Load, *, blends: bool) -> dict[bool, list[float]]:
    """Send a block and return the times to first token of plain (False) and RAG (True) requests."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as client:
        times = await asyncio.gather(
            *(_send(client, at_s, ids, spans, blends) for at_s, _, ids, spans in load.requests)
        )
    kinds = [is_rag for _, is_rag, _, _ in load.requests]
    return {
        kind: [t for t, is_rag in zip(times, kinds, strict=True) if is_rag is kind]
        for kind in (False, True)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=6, help="on each server")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in a block")
    parser.add_argument("--rate", type=float, default=0.8, help="requests per second")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "fair.json")
    args = parser.parse_args()
    material = prepare(ROOT / "build" / "demo", Recipe(), print)
    logs = ROOT / "build"
    found: dict[str, dict[bool, list[float]]] = {
        name: {False: [], True: []} for name in ("stock", "blend")
    }
    with (
        running(material.model, [], logs / "fair-stock.log", environment=KEEP_MEMORY) as stock,
        running(
            material.model, ["--enable-blend"], logs / "fair-blend.log", environment=KEEP_MEMORY
        ) as blend,
    ):
        servers = {"stock": stock, "blend": blend}
        for block in range(args.blocks + 1):
            load = Load(material, args.seconds, args.rate, block)
            for name in ("stock", "blend") if block % 2 else ("blend", "stock"):
                times = asyncio.run(run_block(servers[name], load, blends=name == "blend"))
                if block == 0:
                    continue  # both warm up, and the documents are built
                for kind, values in times.items():
                    found[name][kind] += values
                print(f"{name}: plain {1e3 * statistics.median(times[False]):.0f} ms", flush=True)
        totals = blend.info()
    p50 = {
        name: {("rag" if kind else "plain"): statistics.median(v) for kind, v in kinds.items()}
        for name, kinds in found.items()
    }
    ratio = p50["blend"]["plain"] / p50["stock"]["plain"]
    facts = {
        **origin_of_script(),
        "requests": {kind: len(found["stock"][kind == "rag"]) for kind in ("plain", "rag")},
        "ttft_p50_s": p50,
        "plain_ratio": ratio,
        "blended": totals["blended"],
        "chunks_built": totals["chunks_built"],
    }
    args.json.write_text(json.dumps(facts, indent=1) + "\n")
    for name, kinds in p50.items():
        print(f"{name}: " + ", ".join(f"{kind} {1e3 * s:.0f} ms" for kind, s in kinds.items()))
    print(f"plain requests beside blended ones: {ratio:.3f} of stock's TTFT p50")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())

"""A soak: everything that can happen to a server at once, for a long time, and nothing may go wrong.

    make soak                                            # 30 minutes
    .venv/bin/python benchmarks/soak.py --minutes 3      # as in CI

A real server with --enable-blend serves the trained test model with far less KV memory than its traffic
wants, so chunks are evicted all the time and running requests are retracted. Clients of three tenants
send, all at the same time: blended and plain requests, streamed and not, n = 2, long prompts that are
cut by chunked prefill, long outputs, tiny prompts, prompt logprobs, malformed parameters, and requests
they hang up on before or after the first token.

Checked, and each violation fails the run:

    answers     a sample of 2 % is asked at ratio 1 or without blending and compared token by token with
                a stock server without the plugin; a difference counts unless the two likeliest tokens
                were within 0.001 nats there
    reports     prefix + reused + recomputed + computed tokens are the prompt, for every answer
    status      200, or 400 for malformed requests, and nothing else
    memory      SGLang's strict check of all slots runs whenever the server is idle and ends it on a
                leak; the run pauses once a minute so that it is; at the end nothing is locked and free
                and evictable slots are the whole pool
    RSS         of all processes of the server: the last quarter of the time behind the warm-up is not
                more than 3 % above the first
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "tinyrag"))

from world import make_held_out  # noqa: E402

from sgl_blend.bench.server import Server, running  # noqa: E402

MODEL = ROOT / "examples" / "tinyrag" / "model"
TENANTS = ("red", "green", "blue")
CLIENTS = 10
SAMPLED = 0.02
PAUSE_EVERY_S = 60.0
MAX_GROWTH = 0.03
NEAR_TIE_NATS = 1e-3
BLEND_FLAGS = [
    *("--enable-blend", "--enable-metrics", "--max-total-tokens", "4000", "--blend-when", "always"),
    *("--chunked-prefill-size", "512", "--schedule-conservativeness", "0.05"),
    *("--log-level", "warning", "--max-running-requests", "16"),
]
STOCK_FLAGS = ["--max-total-tokens", "16000", "--log-level", "warning"]
KINDS = {
    "blended": 26,
    "streamed": 15,
    "plain": 12,
    "long": 8,
    "long output": 12,
    "hang up": 12,
    "tiny": 5,
    "malformed": 5,
    "n = 2": 3,
    "logprobs": 2,
}
"""Kinds of requests and how many of a hundred."""
WARM_UP = 0.25
"""Share of the time before memory is looked at."""


@dataclass
class Tally:
    """What happened.

    Attributes:
        counts: Requests by kind.
        violations: One sentence each.
        ttft_s: Times to first token of streamed requests, by kind.
        rss: Seconds since the start and bytes of all server processes.
        tokens: Prompt tokens by fate, summed over answers.
    """

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    rss: list[tuple[float, int]] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)

    def expect(self, holds: bool, sentence: str) -> None:
        """Note a violation unless it holds."""
        if not holds:
            self.violations.append(sentence)


class Traffic:
    """Makes requests of every kind and checks what comes back."""

    def __init__(
        self, blend: httpx.AsyncClient, stock: httpx.AsyncClient, tally: Tally, separator: str
    ) -> None:
        self._blend = blend
        self._stock = stock
        self._tally = tally
        self._separator = separator
        items = make_held_out(3, 12)
        self._systems = [str(item["system"]) for item in items[:2]]
        self._documents = [f"<doc> {chunk}" for item in items for chunk in _texts(item["chunks"])]
        self._questions = [f"<ask> {item['question']}" for item in items]
        self._actions: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "blended": self.blended,
            "streamed": self.streamed,
            "plain": self.plain,
            "long": self.long,
            "long output": self.long_output,
            "hang up": self.hang_up,
            "tiny": self.tiny,
            "malformed": self.malformed,
            "n = 2": self.several,
            "logprobs": self.logprobs,
        }

    def prompt(self, draw: random.Random, chunks: int) -> str:
        """Return a prompt of chunks out of a pool larger than the cache, some far more often asked."""
        marked = "".join(
            f"{self._separator}{document}{self._separator}"
            for document in self._draw_documents(draw, chunks)
        )
        return f"{draw.choice(self._systems)}{marked}{draw.choice(self._questions)}"

    def _draw_documents(self, draw: random.Random, count: int) -> list[str]:
        hot = self._documents[:6]
        pool = hot if count <= len(hot) and draw.random() < 0.8 else self._documents
        return draw.sample(pool, min(count, len(pool)))

    def body(self, draw: random.Random, text: str, **sampling: Any) -> dict[str, Any]:
        """Return a request of one of the tenants; greedy."""
        params = {"temperature": 0, "max_new_tokens": draw.choice((1, 4, 12)), **sampling}
        return {"text": text, "sampling_params": params, "cache_salt": draw.choice(TENANTS)}

    async def ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request and check status and report; return its answers."""
        response = await self._blend.post("/generate", json=body)
        ok = response.status_code == httpx.codes.OK
        self._tally.expect(ok, f"status {response.status_code}: {response.text[:200]}")
        if not ok:
            return []
        answers = response.json()
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            self.check_report(answer["meta_info"])
        return answers

    def check_report(self, meta: dict[str, Any]) -> None:
        """Check that a report adds up."""
        report = meta["sgl_blend"][0]
        fates = ("prefix", "reused", "recomputed", "computed")
        counts = {fate: report[f"{fate}_tokens"] for fate in fates}
        adds_up = sum(counts.values()) == report["prompt_tokens"] and min(counts.values()) >= 0
        self._tally.expect(adds_up, f"a report does not add up: {report}")
        self._tally.tokens.update(counts)

    async def compare(self, body: dict[str, Any]) -> None:
        """Ask both servers the same and compare the answers token by token."""
        body = {**body, "return_logprob": True, "top_logprobs_num": 2}
        answers = await self.ask(body)
        text = body["text"].replace(self._separator, "")
        params = {key: v for key, v in body["sampling_params"].items() if key != "custom_params"}
        response = await self._stock.post(
            "/generate", json={**body, "text": text, "sampling_params": params}
        )
        response.raise_for_status()
        want = response.json()["meta_info"]
        self._tally.counts["compared"] += 1
        for answer in answers:
            self._compare_tokens(answer["meta_info"], want, text)

    def _compare_tokens(self, got: dict[str, Any], want: dict[str, Any], text: str) -> None:
        pairs = zip(got["output_token_logprobs"], want["output_token_logprobs"], strict=False)
        for place, (mine, theirs) in enumerate(pairs):
            if mine[1] == theirs[1]:
                continue
            best, second = (entry[0] for entry in want["output_top_logprobs"][place][:2])
            if best - second <= NEAR_TIE_NATS:
                self._tally.counts["near ties"] += 1
            else:
                self._tally.violations.append(
                    f"a wrong answer: token {place} is {mine[1]}, stock says {theirs[1]} by "
                    f"{best - second:.3g} nats; prompt of {len(text)} letters, {got['sgl_blend']}"
                )
            return

    async def blended(self, draw: random.Random) -> None:
        """A RAG prompt; sampled ones at ratio 1."""
        body = self.body(draw, self.prompt(draw, draw.randint(1, 6)))
        if draw.random() < SAMPLED:
            body["sampling_params"]["custom_params"] = {"sgl_blend_ratio": 1.0}
            await self.compare(body)
        else:
            await self.ask(body)

    async def plain(self, draw: random.Random) -> None:
        """The same without separators."""
        text = self.prompt(draw, draw.randint(1, 6)).replace(self._separator, "")
        body = self.body(draw, text)
        await (self.compare(body) if draw.random() < SAMPLED else self.ask(body))

    async def streamed(self, draw: random.Random) -> None:
        """A streamed request, marked or not; its TTFT is kept."""
        marked = draw.random() < 0.7
        text = self.prompt(draw, 5)
        body = self.body(draw, text if marked else text.replace(self._separator, ""))
        start = time.perf_counter()
        async with self._blend.stream("POST", "/generate", json={**body, "stream": True}) as reply:
            first = None
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and first is None:
                    first = time.perf_counter() - start
        self._tally.expect(first is not None, "a stream without a token")
        if first is not None:
            kind = "blended" if marked else "plain"
            self._tally.ttft_s.setdefault(kind, []).append(first)

    async def long(self, draw: random.Random) -> None:
        """A prompt that chunked prefill cuts several times."""
        body = self.body(draw, self.prompt(draw, 16))
        if draw.random() < SAMPLED:
            body["sampling_params"]["custom_params"] = {"sgl_blend_ratio": 1.0}
            await self.compare(body)
        else:
            await self.ask(body)

    async def long_output(self, draw: random.Random) -> None:
        """Decodes for long, so that memory runs out and something is retracted."""
        text = self.prompt(draw, draw.randint(1, 3))
        await self.ask(self.body(draw, text, max_new_tokens=300, ignore_eos=True))

    async def hang_up(self, draw: random.Random) -> None:
        """A client that leaves: in the queue, in the prefill or while it decodes."""
        body = self.body(draw, self.prompt(draw, 8), max_new_tokens=100, ignore_eos=True)
        patience_s = draw.choice((0.001, 0.01, 0.05, 0.2, 0.5))
        try:
            async with (
                asyncio.timeout(patience_s),
                self._blend.stream("POST", "/generate", json={**body, "stream": True}) as reply,
            ):
                async for _ in reply.aiter_lines():
                    pass
        except TimeoutError:
            self._tally.counts["hung up"] += 1

    async def tiny(self, draw: random.Random) -> None:
        """One token, or chunks too short to be reused."""
        sep = self._separator
        await self.ask(self.body(draw, draw.choice(("a", f"{sep}a{sep}", f"a{sep}b{sep}c"))))

    async def malformed(self, draw: random.Random) -> None:
        """Refused with 400, and nothing else happens."""
        params: dict[str, Any] = draw.choice(
            (
                {"sgl_blend_ratio": 7},
                {"sgl_blend_policy": "best"},
                {"sgl_blend_spans": [[0, 5]]},
                {"sgl_blend_spans": [5, 2]},
                {"sgl_blend_what": 1},
                {"x": [[1]]},
            )
        )
        body = self.body(draw, "a plain prompt", custom_params=params)
        status = (await self._blend.post("/generate", json=body)).status_code
        self._tally.expect(status == httpx.codes.BAD_REQUEST, f"malformed {params} gave {status}")

    async def several(self, draw: random.Random) -> None:
        """Two samples of one prompt."""
        answers = await self.ask(self.body(draw, self.prompt(draw, 3), n=2, temperature=0.8))
        self._tally.expect(len(answers) == 2, f"n = 2 gave {len(answers)} answers")

    async def logprobs(self, draw: random.Random) -> None:
        """Logprobs of the prompt's end."""
        text = self.prompt(draw, 4)
        body = {**self.body(draw, text), "return_logprob": True, "logprob_start_len": 100}
        for answer in await self.ask(body):
            got = answer["meta_info"]["input_token_logprobs"]
            self._tally.expect(len(got) > 1, "no logprobs of the prompt")

    async def run_client(self, number: int, until_s: float, gate: asyncio.Event) -> None:
        """Send requests one after another until the time is over; wait while the gate is closed."""
        draw = random.Random(f"client {number}")
        while time.monotonic() < until_s:
            await gate.wait()
            (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
            self._tally.counts[kind] += 1
            try:
                await self._actions[kind](draw)
            except httpx.HTTPError as err:
                self._tally.violations.append(f"{kind}: {type(err).__name__} {err}")
                return


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value


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


async def watch(server: Server, tally: Tally, until_s: float, gate: asyncio.Event) -> None:
    """Look at memory, and pause the traffic once a minute so that the idle check runs."""
    start = time.monotonic()
    next_pause = start + PAUSE_EVERY_S
    while time.monotonic() < until_s:
        await asyncio.sleep(2.0)
        if time.monotonic() > next_pause:
            gate.clear()
            await asyncio.to_thread(wait_until_idle, server, tally)
            gate.set()
            next_pause = time.monotonic() + PAUSE_EVERY_S
        tally.rss.append((time.monotonic() - start, resident_bytes(server)))


def wait_until_idle(server: Server, tally: Tally) -> None:
    """Wait until nothing runs and nothing is pending, and check the pool."""
    for _ in range(240):
        time.sleep(0.5)
        info = server.info()
        pool = info["pool"]
        idle = info["chunks_pending"] == 0 and pool["locked"] == 0
        if idle and pool["free"] + pool["evictable"] == pool["capacity"]:
            tally.counts["idle checks"] += 1
            return
    tally.violations.append(f"the server never came to rest: {pool}")


async def soak(blend: Server, stock: Server, tally: Tally, minutes: float) -> None:
    """Run all clients for a while."""
    limits = httpx.Limits(max_connections=64)
    async with (
        httpx.AsyncClient(
            base_url=blend.url, timeout=180.0, trust_env=False, limits=limits
        ) as mine,
        httpx.AsyncClient(base_url=stock.url, timeout=180.0, trust_env=False) as theirs,
    ):
        traffic = Traffic(mine, theirs, tally, blend.info()["separator"])
        until_s = time.monotonic() + minutes * 60
        gate = asyncio.Event()
        gate.set()
        await asyncio.gather(
            watch(blend, tally, until_s, gate),
            *(traffic.run_client(number, until_s, gate) for number in range(CLIENTS)),
        )


def growth(rss: list[tuple[float, int]]) -> float:
    """Return how much larger the median of the last quarter behind the warm-up is than the first's."""
    behind = [size for at_s, size in rss if at_s >= WARM_UP * rss[-1][0]]
    quarter = max(1, len(behind) // 4)
    return statistics.median(behind[-quarter:]) / statistics.median(behind[:quarter]) - 1


def retractions(server: Server) -> int:
    """Return how often SGLang took a running request's memory away."""
    text = server.http.get("/metrics").raise_for_status().text
    found = re.findall(r"^sglang:num_retracted_requests_total\{[^}]*\} (\S+)", text, re.MULTILINE)
    return int(sum(float(value) for value in found))


def report(tally: Tally, info: dict[str, Any], retracted: int, seconds: float) -> dict[str, Any]:
    """Put everything together, judge it and return it for the JSON file."""
    grown = growth(tally.rss)
    tally.expect(grown <= MAX_GROWTH, f"RSS grew by {grown:.1%}")
    tally.expect(retracted > 0, "nothing was retracted, the pool is too large for this traffic")
    tally.expect(info["chunk_hits"] > 0, "no chunk was ever hit")
    tally.expect(tally.counts["compared"] > 0, "nothing was compared")
    done = sum(tally.counts[kind] for kind in KINDS)
    return {
        "requests": done,
        "requests_per_s": done / seconds,
        "prompt_tokens_per_s": sum(tally.tokens.values()) / seconds,
        "counts": dict(tally.counts),
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
        "violations": tally.violations,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "soak.json")
    args = parser.parse_args()
    args.json.parent.mkdir(exist_ok=True)
    logs = ROOT / "build"
    tally = Tally()
    one_thread = ("OMP_NUM_THREADS=1",)  # the model is so small that a second one only waits
    with (
        running(MODEL, BLEND_FLAGS, logs / "soak-blend.log", environment=one_thread) as blend,
        running(MODEL, STOCK_FLAGS, logs / "soak-stock.log", environment=one_thread) as stock,
    ):
        start = time.monotonic()
        try:
            asyncio.run(soak(blend, stock, tally, args.minutes))
            seconds = time.monotonic() - start
            wait_until_idle(blend, tally)
            found = report(tally, blend.info(), retractions(blend), seconds)
        except httpx.HTTPError as err:
            print((logs / "soak-blend.log").read_text()[-3000:])
            print(f"the server is gone after {time.monotonic() - start:.0f} s: {err!r}")
            return 1
        command = blend.command
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    args.json.write_text(
        json.dumps({"command": command, "machine": machine, **found}, indent=2) + "\n"
    )
    print(json.dumps(found, indent=2))
    for sentence in tally.violations[:20]:
        print("VIOLATION:", sentence)
    print(
        f"soak {args.minutes:g} min: {found['requests']} requests, {found['retracted']} retracted, "
        f"{tally.counts['idle checks']} idle checks without a leaked slot, "
        f"{tally.counts['compared']} compared, RSS {found['rss_growth']:+.1%}, "
        f"{len(tally.violations)} violations"
    )
    return 1 if tally.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())

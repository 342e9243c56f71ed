"""Requests at random times, ever more of them: how many a server serves before it grows slow.

An open loop: requests arrive at Poisson times whether or not earlier ones are answered, as users do.
Both servers see the same requests at the same times.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_blend.commands.bench.client import Client, Reply, ask_at, ask_together, connect
from sgl_blend.commands.bench.knees import Load, Outcome, Point, conclude, next_rate
from sgl_blend.commands.bench.pair import NAMES, Pair
from sgl_blend.commands.bench.prompts import Library, Prompt, to_body
from sgl_blend.commands.bench.wake import wake
from sgl_blend.commands.common.bootstrap import median_interval
from sgl_blend.commands.common.records import describe_machine

if TYPE_CHECKING:
    from sgl_blend.commands.common.console import Progress

_MOST_RATES = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent.

    Attributes:
        num_documents: The chunks that all prompts are made of.
        num_chunks: Most chunks of a prompt; every number from half of it on is as likely.
        chunk_tokens: Length of each.
        system_tokens: In front of them.
        question_tokens: After them, new in every prompt.
        output_tokens: Length of every answer.
    """

    num_documents: int
    num_chunks: int
    chunk_tokens: int
    system_tokens: int
    question_tokens: int
    output_tokens: int

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt and its answer."""
        fixed = self.system_tokens + self.question_tokens + self.output_tokens
        return fixed + self.num_chunks * self.chunk_tokens

    @property
    def stored_tokens(self) -> int:
        """Tokens of KV that hold every document."""
        return self.system_tokens + self.num_documents * self.chunk_tokens


@dataclass(frozen=True, slots=True)
class ThroughputSettings:
    """How it is measured.

    Attributes:
        rates: Requests per second to offer; None to find out which tell something.
        seconds: Of arrivals in a block.
        blocks: At each rate, on each server.
        slo: A server is fast enough while its TTFT p50 is at most so many times stock's when idle.
        ratio: Share of the reused tokens that is recomputed.
        policy: Which of them.
        seed: Of prompts, arrivals and intervals.
    """

    traffic: Traffic
    rates: Sequence[float] | None
    seconds: float
    blocks: int
    slo: float
    ratio: float
    policy: str
    seed: int


def draw_arrivals(rate: float, seconds: float, draw: random.Random) -> list[float]:
    """Return the times of a Poisson process, in seconds from its start; at least one.

    Args:
        rate: Mean arrivals per second.
        seconds: How long they go on.
        draw: Source of chance.
    """
    arrivals = [draw.expovariate(rate)]
    while arrivals[-1] < seconds:
        arrivals.append(arrivals[-1] + draw.expovariate(rate))
    # A single late one is moved, so that no block is empty.
    return arrivals[:-1] or [seconds * draw.random()]


class ThroughputBench:
    """Sends the traffic to both servers.

    Args:
        pair: Both servers.
        settings: What to send.
        vocab_size: Of the model.
        num_layers: Of the model.
        watch: Told what is going on, and after each block.
        save: Given what is known after each rate.
    """

    def __init__(
        self,
        pair: Pair,
        settings: ThroughputSettings,
        vocab_size: int,
        num_layers: int,
        watch: Progress,
        save: Callable[[Outcome], None],
    ) -> None:
        self._pair = pair
        self._settings = settings
        self._num_layers = num_layers
        self._watch = watch
        self._save = save
        traffic = settings.traffic
        self._draw = random.Random(f"{settings.seed} documents")
        self._library = make_library(traffic, vocab_size, self._draw)
        self._wakes = describe_machine().gpu is not None
        self._waking = random.Random(f"{settings.seed} waking")
        self._points: dict[float, Point] = {}

    async def run(self) -> Outcome:
        """Measure the idle servers, then rate after rate."""
        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(connect(self._pair[name])) for name in NAMES
            }
            await self._introduce(clients)
            idle_s = await self._measure_idle(clients)
            bound_s = self._settings.slo * idle_s["stock"]
            outcome = conclude([], idle_s, self._settings.slo)
            while (rate := self._next_rate(idle_s["stock"], bound_s)) is not None:
                self._points[rate] = await self._measure(clients, rate, bound_s)
                outcome = conclude(list(self._points.values()), idle_s, self._settings.slo)
                self._save(outcome)
        return outcome

    async def _introduce(self, clients: Mapping[str, Client]) -> None:
        """Show every document to both servers, once."""
        traffic = self._settings.traffic
        for prompt in self._library.introductions(traffic.num_chunks, traffic.question_tokens):
            for name, client in clients.items():
                await ask_together(client, [self._body(prompt, name)])
        self._pair.blend.wait_for_builds()

    async def _measure_idle(self, clients: Mapping[str, Client]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in NAMES}
        for number in range(7):
            prompt = self._prompt(self._draw)
            for name, client in clients.items():
                await self._wake(client)
                (reply,) = await ask_together(client, [self._body(prompt, name)])
                if number >= 2:  # the first two warm up
                    times[name].append(reply.ttft_s)
            self._watch("idle", 0)
        return {name: statistics.median(found) for name, found in times.items()}

    def _next_rate(self, idle_s: float, bound_s: float) -> float | None:
        rates = self._settings.rates
        if rates is not None:
            return next((rate for rate in sorted(rates) if rate not in self._points), None)
        if len(self._points) >= _MOST_RATES:
            return None
        first = float(f"{0.5 / idle_s:.1g}")
        wanted = [next_rate(self._within(name, bound_s), first) for name in NAMES]
        return min((rate for rate in wanted if rate is not None), default=None)

    def _within(self, name: str, bound_s: float) -> dict[float, bool]:
        """Return per measured rate whether a server was fast enough."""
        return {
            rate: load.ttft_p50_s <= bound_s
            for rate, point in self._points.items()
            if (load := point.load(name)) is not None
        }

    async def _measure(self, clients: Mapping[str, Client], rate: float, bound_s: float) -> Point:
        """Send all blocks of a rate, the servers in turns."""
        names = [name for name in NAMES if self._is_useful(name, rate, bound_s)]
        found: dict[str, list[tuple[list[Reply], float]]] = {name: [] for name in names}
        for block in range(self._settings.blocks):
            draw = random.Random(f"{self._settings.seed} {rate} {block}")
            arrivals_s = draw_arrivals(rate, self._settings.seconds, draw)
            prompts = [self._prompt(draw) for _ in arrivals_s]
            for name in names if block % 2 == 0 else names[::-1]:
                bodies = [self._body(prompt, name) for prompt in prompts]
                self._watch(f"{rate:.3g} requests/s to {name}", 0)
                await self._wake(clients[name])
                found[name].append(await ask_at(clients[name], bodies, arrivals_s))
                self._pair.blend.wait_for_builds()
                self._watch(f"{rate:.3g} requests/s to {name}", 1)
        loads = {
            name: summarise(blocks, self._settings.seed, self._num_layers)
            for name, blocks in found.items()
        }
        return Point(rate=rate, stock=loads.get("stock"), blend=loads.get("blend"))

    def _is_useful(self, name: str, rate: float, bound_s: float) -> bool:
        """Tell whether a server should see a rate: not when less was too much, unless asked for."""
        slow = (tried for tried, fast in self._within(name, bound_s).items() if not fast)
        return self._settings.rates is not None or all(rate < tried for tried in slow)

    async def _wake(self, client: Client) -> None:
        if self._wakes:
            traffic = self._settings.traffic
            after_system = traffic.most_tokens - traffic.output_tokens - traffic.system_tokens
            await wake(client, self._library, after_system, self._waking)

    def _prompt(self, draw: random.Random) -> Prompt:
        return draw_prompt(self._settings.traffic, self._library, draw)

    def _body(self, prompt: Prompt, name: str) -> bytes:
        return make_body(self._settings, prompt, name)


def make_library(traffic: Traffic, vocab_size: int, draw: random.Random) -> Library:
    """Return the documents that all prompts of some traffic are made of."""
    return Library(
        draw,
        vocab_size,
        system_tokens=traffic.system_tokens,
        chunk_tokens=traffic.chunk_tokens,
        num_documents=traffic.num_documents,
    )


def draw_prompt(traffic: Traffic, library: Library, draw: random.Random) -> Prompt:
    """Return a prompt of some documents in a random order and a new question."""
    count = draw.randint(-(-traffic.num_chunks // 2), traffic.num_chunks)
    documents = draw.sample(range(traffic.num_documents), count)
    return library.prompt(documents, traffic.question_tokens, draw)


def make_body(settings: ThroughputSettings, prompt: Prompt, name: str) -> bytes:
    """Return a request as one of both servers gets it."""
    params: dict[str, Any] | None = None
    if name == "blend":
        params = {"sgl_blend_ratio": settings.ratio, "sgl_blend_policy": settings.policy}
    return to_body(prompt, params, settings.traffic.output_tokens, first_and_last=True)


def sample_bodies(settings: ThroughputSettings, vocab_size: int) -> list[bytes]:
    """Return some requests like those that will be sent, to try the client with."""
    draw = random.Random(f"{settings.seed} client")
    library = make_library(settings.traffic, vocab_size, draw)
    prompts = [draw_prompt(settings.traffic, library, draw) for _ in range(16)]
    return [make_body(settings, prompt, "blend") for prompt in prompts]


def summarise(blocks: Sequence[tuple[list[Reply], float]], seed: int, num_layers: int) -> Load:
    """Put the blocks of one rate on one server together.

    Args:
        blocks: The replies of each, and the seconds until the last one ended.
        seed: Of the interval.
        num_layers: Of the model.
    """
    replies = [reply for block, _ in blocks for reply in block]
    times = [reply.ttft_s for reply in replies]
    reports = [reply.report for reply in replies if reply.report]
    prompt_tokens = sum(report["prompt_tokens"] for report in reports)
    reused_tokens = sum(report["reused_tokens"] for report in reports)
    return Load(
        requests=len(replies),
        ttft_p50_s=statistics.median(times),
        ttft_p50_ci95=median_interval(times, seed),
        ttft_p90_s=float(np.quantile(times, 0.9)),
        completed_rate=len(replies) / sum(seconds for _, seconds in blocks),
        reused_share=reused_tokens / prompt_tokens if prompt_tokens else 0.0,
        computed_rows=statistics.mean(_rows(reply, num_layers) for reply in replies),
        fallbacks=dict(Counter(filter(None, (report["fallback"] for report in reports)))),
    )


def _rows(reply: Reply, num_layers: int) -> float:
    """Return how many rows a request computed, mean over the layers."""
    if not reply.report:
        return reply.prompt_tokens - reply.cached_tokens
    rows: float = reply.report["layer_rows"] / num_layers
    return rows

"""Time to first token of prompts whose chunks are stored, blended and from stock SGLang.

Both servers hold the system prompt as an exact prefix. The blending one holds every chunk as well. Each
repeat has documents of its own, and no two of its requests begin with the same one, so the stock server
finds nothing else. Within a repeat every variant of serving gets the same prompts, in changing turns.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sgl_blend.commands.bench.cases import Case
from sgl_blend.commands.bench.client import Client, Reply, ask_together, connect
from sgl_blend.commands.bench.pair import Pair
from sgl_blend.commands.bench.prompts import Library, Prompt, to_body
from sgl_blend.commands.bench.wake import wake
from sgl_blend.commands.common.bootstrap import Interval, median_interval
from sgl_blend.commands.common.records import describe_machine
from sgl_blend.policies import POLICIES

if TYPE_CHECKING:
    from sgl_blend.commands.common.console import Progress

_INTRODUCING_RATIO = 1 - 2**-20
"""What shows documents to the server is kept apart from what is measured by a ratio of its own."""

TOKEN_KINDS = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
"""What can happen to a prompt token; the four add up to prompt_tokens."""


class TtftFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, medians over the repeats with 95 % intervals.

    Attributes:
        speedup: Median of stock's TTFT over the blended one, repeat by repeat.
        ceiling: Speed-up if time were linear work alone: (row, layer) pairs that stock computes
            over those that blending computes.
        ceiling_share: Speed-up over ceiling.
        reused_share: Of the prompt tokens, those whose chunk KV was taken as it was.
        tokens: Mean prompt tokens by kind, blended.
        stock_prefix_tokens: Mean exact prefix that stock found.
        stock_ttfts_s: Per repeat, of every request.
        blended_ttfts_s: Same.
    """

    stock_ttft_s: float
    stock_ttft_ci95: Interval
    blended_ttft_s: float
    blended_ttft_ci95: Interval
    speedup: float
    speedup_ci95: Interval
    ceiling: float
    ceiling_share: float
    reused_share: float
    tokens: dict[str, float]
    stock_prefix_tokens: float
    stock_ttfts_s: list[list[float]]
    blended_ttfts_s: list[list[float]]


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case at one ratio; figures, or the reason why there are none.

    Attributes:
        chunk_tokens: Length of a chunk.
        nominal_chunk_tokens: The length that was asked for.
        batch: Prompts sent at the same time.
    """

    case: str
    prompt_tokens: int
    num_chunks: int
    chunk_tokens: int
    nominal_chunk_tokens: int
    batch: int
    ratio: float
    policy: str
    figures: TtftFigures | None
    error: str | None


@dataclass(frozen=True, slots=True)
class TtftSettings:
    """What is measured.

    Attributes:
        cases: In this order.
        ratios: Shares of the reused tokens to recompute.
        policies: Which of them, in turns.
        repeats: Measured requests (or batches) of each kind; one more comes first, unmeasured.
        seed: Of prompts and intervals.
    """

    cases: Sequence[Case]
    ratios: Sequence[float]
    policies: Sequence[str]
    repeats: int
    seed: int

    @property
    def variants(self) -> list[Variant]:
        """Every variant of blending that is measured."""
        return [Variant(policy, ratio) for policy in self.policies for ratio in self.ratios]

    @property
    def num_requests(self) -> int:
        """How many requests or batches will be sent, warm-up included."""
        return len(self.cases) * (self.repeats + 1) * (1 + len(self.variants))


class Variant(NamedTuple):
    """A variant of blending."""

    policy: str
    ratio: float


def introducing_params(policies: Sequence[str], ratio: float) -> dict[str, Any]:
    """Return with what documents are shown to a server before requests with some policies.

    A policy that trusts what is remembered lets the server probe the documents. Without that its
    requests would be blended as if nothing were known, and timed so.
    """
    trusting = (policy for policy in policies if POLICIES[policy].trusts_memory)
    return {"sgl_blend_ratio": ratio, "sgl_blend_policy": next(trusting, policies[0])}


async def measure_ttft(
    pair: Pair,
    settings: TtftSettings,
    vocab_size: int,
    num_layers: int,
    watch: Progress,
    save: Callable[[list[TtftRow]], None],
) -> list[TtftRow]:
    """Measure every case.

    Args:
        pair: Both servers.
        settings: What.
        vocab_size: Of the model.
        num_layers: Of the model.
        watch: Told what is going on, and after each request or batch.
        save: Given all rows so far after each case.
    """
    rows: list[TtftRow] = []
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect(pair[name])) for name in ("stock", "blend")
        ]
        for case in settings.cases:
            bench = _CaseBench(case, settings, pair, clients, vocab_size)
            rows += await bench.run(num_layers, watch)
            save(rows)
    return rows


class _CaseBench:
    """The requests of one case, in turns to both servers."""

    def __init__(
        self,
        case: Case,
        settings: TtftSettings,
        pair: Pair,
        clients: list[Client],
        vocab_size: int,
    ) -> None:
        self._case = case
        self._settings = settings
        self._pair = pair
        self._stock, self._blend = clients
        draw = random.Random(f"{settings.seed} {case}")
        self._library = Library(
            draw,
            vocab_size,
            system_tokens=case.system_tokens,
            chunk_tokens=case.chunk_tokens,
            num_documents=case.num_documents,
        )
        self._found: dict[Variant | None, list[list[Reply]]] = {
            variant: [] for variant in (None, *settings.variants)
        }
        self._errors: dict[Variant, str] = {}
        self._wakes = describe_machine().gpu is not None

    async def run(self, num_layers: int, watch: Progress) -> list[TtftRow]:
        settings = self._settings
        variants: list[Variant | None] = [None, *settings.variants]
        needed = self._case.least_tokens
        if needed > self._pair.num_tokens:
            error = f"needs KV of {needed} tokens, the servers hold {self._pair.num_tokens}"
            watch(self._case.name, (settings.repeats + 1) * len(variants))
            return [self._row(variant, error=error) for variant in settings.variants]
        for repeat in range(settings.repeats + 1):
            await self._introduce()
            prompts = self._prompts()
            for variant in variants[repeat % len(variants) :] + variants[: repeat % len(variants)]:
                replies = await self._send(prompts, variant)
                watch(self._describe(), 1)
                if repeat > 0:  # the first one warms up
                    self._found[variant].append(replies)
        return [self._summary(variant, num_layers) for variant in settings.variants]

    def _describe(self) -> str:
        return f"{self._case.name}, chunks of {self._case.chunk_tokens}, batch {self._case.batch}"

    async def _introduce(self) -> None:
        """Let the blending server build new documents, and probe them if a policy asks for that."""
        case = self._case
        params = introducing_params(self._settings.policies, _INTRODUCING_RATIO)
        self._library.renew()
        for prompt in self._library.introductions(case.num_chunks, case.question_tokens):
            await ask_together(self._blend, [to_body(prompt, params, 1)])
        self._pair.blend.wait_for_builds()

    def _prompts(self) -> list[Prompt]:
        case = self._case
        return [
            self._library.prompt(self._library.order(case.num_chunks, first), case.question_tokens)
            for first in range(case.batch)
        ]

    async def _send(self, prompts: list[Prompt], variant: Variant | None) -> list[Reply]:
        if self._wakes:
            await self._wake(self._stock if variant is None else self._blend)
        if variant is None:
            return await ask_together(self._stock, [to_body(p, None, 1) for p in prompts])
        params = {"sgl_blend_ratio": variant.ratio, "sgl_blend_policy": variant.policy}
        replies = await ask_together(self._blend, [to_body(p, params, 1) for p in prompts])
        for prompt, reply in zip(prompts, replies, strict=True):
            error = find_shortfall(prompt.num_reusable, reply)
            if error is not None:
                self._errors.setdefault(variant, error)
        return replies

    async def _wake(self, client: Client) -> None:
        tokens = self._case.prompt_tokens - self._case.system_tokens
        await wake(client, self._library, tokens)

    def _summary(self, variant: Variant, num_layers: int) -> TtftRow:
        if variant in self._errors:
            return self._row(variant, error=self._errors[variant])
        figures = summarise(
            self._found[None], self._found[variant], num_layers=num_layers, seed=self._settings.seed
        )
        return self._row(variant, figures=figures)

    def _row(
        self, variant: Variant, *, figures: TtftFigures | None = None, error: str | None = None
    ) -> TtftRow:
        case = self._case
        return TtftRow(
            case=case.name,
            prompt_tokens=case.prompt_tokens,
            num_chunks=case.num_chunks,
            chunk_tokens=case.chunk_tokens,
            nominal_chunk_tokens=case.nominal_chunk_tokens,
            batch=case.batch,
            ratio=variant.ratio,
            policy=variant.policy,
            figures=figures,
            error=error,
        )


def find_shortfall(num_reusable: int, reply: Reply) -> str | None:
    """Say in what a blended request reused less than was planned; None if in nothing.

    Args:
        num_reusable: Tokens of system prompt and chunks.
        reply: What came of it.
    """
    report = reply.report
    if report.get("fallback") is not None:
        return f"a request was not blended: {report['fallback_message']}"
    stored = sum(report[name] for name in TOKEN_KINDS[:3])
    if stored < num_reusable:
        return f"a request found {stored} of {num_reusable} tokens stored"
    return None


def summarise(
    stock: list[list[Reply]], blended: list[list[Reply]], *, num_layers: int, seed: int
) -> TtftFigures:
    """Return the figures of a case at one ratio.

    Args:
        stock: Replies by repeat.
        blended: Replies to the same prompts.
        num_layers: Of the model.
        seed: Of the intervals.
    """
    stock_s, blended_s = _medians(stock), _medians(blended)
    speedups = [full / fast for full, fast in zip(stock_s, blended_s, strict=True)]
    replies = [reply for batch in blended for reply in batch]
    tokens = Counter[str]()
    for reply in replies:
        tokens.update({name: reply.report[name] for name in ("prompt_tokens", *TOKEN_KINDS)})
    stock_prefix = sum(reply.cached_tokens for batch in stock for reply in batch)
    ceiling = linear_ceiling(
        num_layers,
        stock_rows=tokens["prompt_tokens"] - stock_prefix,
        layer_rows=sum(reply.report["layer_rows"] for reply in replies),
    )
    speedup = statistics.median(speedups)
    return TtftFigures(
        stock_ttft_s=statistics.median(stock_s),
        stock_ttft_ci95=median_interval(stock_s, seed),
        blended_ttft_s=statistics.median(blended_s),
        blended_ttft_ci95=median_interval(blended_s, seed),
        speedup=speedup,
        speedup_ci95=median_interval(speedups, seed),
        ceiling=ceiling,
        ceiling_share=speedup / ceiling,
        reused_share=tokens["reused_tokens"] / tokens["prompt_tokens"],
        tokens={name: tokens[name] / len(replies) for name in TOKEN_KINDS},
        stock_prefix_tokens=stock_prefix / len(replies),
        stock_ttfts_s=_times(stock),
        blended_ttfts_s=_times(blended),
    )


def _times(repeats: list[list[Reply]]) -> list[list[float]]:
    return [[reply.ttft_s for reply in batch] for batch in repeats]


def _medians(repeats: list[list[Reply]]) -> list[float]:
    return [statistics.median(times) for times in _times(repeats)]


def linear_ceiling(num_layers: int, *, stock_rows: int, layer_rows: int) -> float:
    """Return the speed-up of a prefill if only linear work took time.

    With L layers, check layer c and a share s of the rows kept above it, that is
    L / (c + 1 + (L - c - 1) s) where both servers find the same exact prefix. The blending one also
    finds the chunk after the system prompt exact, and computes as many rows less.

    Args:
        num_layers: Of the model.
        stock_rows: Rows that stock computes in every layer.
        layer_rows: Rows that blending computes, summed over the layers.
    """
    return stock_rows * num_layers / layer_rows

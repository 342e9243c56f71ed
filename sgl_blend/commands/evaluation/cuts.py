"""What it costs to cut chunks elsewhere than where documents end, as text does that was learned.

A server with ``--blend-find learned`` makes chunks of what comes again. They mostly are documents, but
they may hold parts of them. So the same prompts are answered with their chunks cut in three ways:

    documents      where the documents end
    random words   as many chunks, at random tokens
    halves         each document once more, in the middle

The tokens are the same each time, only the borders move.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sgl_blend.commands.common.bootstrap import Interval, mean_interval
from sgl_blend.commands.evaluation.distributions import kl_divergence
from sgl_blend.commands.evaluation.prompts import Prompt
from sgl_blend.commands.evaluation.runner import BlendEngine
from sgl_blend.settings.config import BlendConfig

DOCUMENTS, WORDS, HALVES = KINDS = ("documents", "random words", "halves")
_BATCH = 16
_SEED = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """How far answers are from full prefill with chunks cut in one way.

    Attributes:
        kind: Of KINDS.
        chunks: Of all prompts.
        kl: Mean KL(full || blended) of the first token, in nats.
        kl_ci95: Its 95 % interval.
        more_than_documents: Mean of the same prompts' KL minus that with documents, in nats.
        more_ci95: Its 95 % interval.
        top1: Share of prompts with the first token of full prefill.
    """

    kind: str
    chunks: int
    kl: float
    kl_ci95: Interval
    more_than_documents: float
    more_ci95: Interval
    top1: float


@dataclass(frozen=True, slots=True)
class Way:
    """How the chunks are served: policy, share of recomputed tokens, and check layer."""

    policy: str
    ratio: float
    check_layer: int


def default_way() -> Way:
    """Return how a server blends that was not told otherwise."""
    config = BlendConfig()
    return Way(config.blend_policy, config.blend_recompute_ratio, config.blend_check_layer)


def recut(prompt: Prompt, kind: str, least: int, draw: random.Random) -> Prompt:
    """Cut a prompt's chunks in another way.

    Args:
        prompt: With a chunk for each document.
        kind: Of KINDS.
        least: Tokens of the shortest chunk that a server stores. What cannot be cut into pieces of
            that length stays as it is.
        draw: Chooses random words.

    Raises:
        ValueError: There is no such kind.
    """
    if kind == DOCUMENTS:
        return prompt
    edges: list[int] = []
    if kind == HALVES:
        for start, stop in _chunks(prompt):
            edges += _spans([start, *_middle(start, stop, least), stop])
    elif kind == WORDS:
        for stretch in _stretches(prompt):
            edges += _spans(_at_random(stretch, least, draw))
    else:
        raise ValueError(f"no kind of cuts {kind!r}, there are: {', '.join(KINDS)}")
    return replace(prompt, spans=tuple(edges))


def measure_cuts(
    model_path: str,
    prompts: Sequence[Prompt],
    way: Way,
    engine_args: Mapping[str, Any],
    *,
    num_top: int,
    vocab_size: int,
) -> list[Cut]:
    """Answer prompts in full and with their chunks cut in each way, through one engine.

    Raises:
        CommandError: The engine does not start, or a prompt is too long for it.
    """
    config = BlendConfig()
    least = int(engine_args.get("blend_min_chunk_tokens", config.blend_min_chunk_tokens))
    draw = random.Random(_SEED)
    ways = {kind: [recut(one, kind, least, draw) for one in prompts] for kind in KINDS}
    kl: dict[str, list[float]] = {kind: [] for kind in KINDS}
    same: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    with BlendEngine(
        model_path,
        check_layer=way.check_layer,
        build_prefix=config.blend_build_prefix,
        engine_args=engine_args,
    ) as engine:
        for begin in range(0, len(prompts), _BATCH):
            part = slice(begin, begin + _BATCH)
            full = engine.ask_full(prompts[part], max_new_tokens=1, num_top=num_top)
            for kind in KINDS:
                answers = engine.ask(
                    ways[kind][part],
                    way.policy,
                    [way.ratio] * len(full),
                    max_new_tokens=1,
                    reference_ids=[answer.first.token_ids for answer in full],
                )
                for whole, answer in zip(full, answers, strict=True):
                    kl[kind].append(kl_divergence(whole.first, answer.first, vocab_size))
                    same[kind].append(answer.first.chosen == whole.first.chosen)
    return [
        Cut(
            kind,
            sum(len(one.spans) // 2 for one in ways[kind]),
            *_mean(kl[kind]),
            *_mean([one - other for one, other in zip(kl[kind], kl[DOCUMENTS], strict=True)]),
            sum(same[kind]) / len(prompts),
        )
        for kind in KINDS
    ]


def worse(cuts: Iterable[Cut], max_kl: float) -> list[Cut]:
    """Return the ways of cutting that lose more than the bound, in nats, beyond documents.

    What is not a number is a loss, too.
    """
    return [cut for cut in cuts if cut.kind != DOCUMENTS and not cut.more_than_documents <= max_kl]


def _mean(values: Sequence[float]) -> tuple[float, Interval]:
    return sum(values) / len(values), mean_interval(values, _SEED)


def _chunks(prompt: Prompt) -> list[tuple[int, int]]:
    return list(zip(prompt.spans[::2], prompt.spans[1::2], strict=True))


def _stretches(prompt: Prompt) -> list[list[int]]:
    """Return the edges of chunks that stand side by side."""
    stretches: list[list[int]] = []
    for start, stop in _chunks(prompt):
        if stretches and stretches[-1][-1] == start:
            stretches[-1].append(stop)
        else:
            stretches.append([start, stop])
    return stretches


def _middle(start: int, stop: int, least: int) -> list[int]:
    return [(start + stop) // 2] if stop - start >= 2 * least else []


def _at_random(edges: Sequence[int], least: int, draw: random.Random) -> list[int]:
    """Return as many edges, at random places that leave pieces of a least length."""
    count, spare = len(edges) - 1, edges[-1] - edges[0] - least * (len(edges) - 1)
    if count == 1 or spare < 0:
        return [*edges]
    # Places among what is left when each piece has its least length.
    places = sorted(draw.randint(0, spare) for _ in range(count - 1))
    inner = [edges[0] + place + least * number for number, place in enumerate(places, start=1)]
    return [edges[0], *inner, edges[-1]]


def _spans(edges: Sequence[int]) -> list[int]:
    return [edge for pair in pairwise(edges) for edge in pair]

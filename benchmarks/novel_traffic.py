"""What benchmarks/novel.py asks, and the ideal cache that it compares with."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.demo.material import render, tokens_of

PASSAGES, OF_TOPIC = 5, 4
"""Passages of a prompt, and how many of them are of one topic."""
PASSAGE_TOKENS = 120
LEAST_OF_TOPIC, MOST_OF_TOPIC = 6, 24
QUESTION_TOKENS = 30
_LEFT_OUT = ("antigravity", "this", "idlelib", "test")


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
        at: When it is sent, in mean distances between two requests.
        tenant: Its salt; None with one tenant.
        passages: In the order of the prompt.
        question: Tokens after them.
    """

    at: float
    tenant: str | None
    passages: tuple[Passage, ...]
    question: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the passages."""
        return sum(len(passage.tokens) for passage in self.passages)


def make_library(tokenizer: Any, num_tokens: int) -> list[Passage]:
    """Cut passages from the documentation of modules until there are so many tokens of them.

    Raises:
        ValueError: The modules have not so much text.
    """
    passages: list[Passage] = []
    total = topic = 0
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _LEFT_OUT:
            continue
        try:
            lines = render(name).splitlines(keepends=True)
        except ImportError:  # of another platform
            continue
        pieces = list(cut_lines([tokens_of(tokenizer, line) for line in lines]))
        if len(pieces) < LEAST_OF_TOPIC:
            continue
        for tokens in pieces[:MOST_OF_TOPIC]:
            passages.append(Passage(len(passages), topic, tokens))
            total += len(tokens)
        topic += 1
        if total >= num_tokens:
            return passages
    raise ValueError(f"the library needs {num_tokens} tokens, the modules have {total}")


def cut_lines(lines: Sequence[list[int]]) -> Iterator[list[int]]:
    """Join lines to passages of about PASSAGE_TOKENS; a longer line is left out, as is the rest."""
    passage: list[int] = []
    for line in lines:
        if len(line) > PASSAGE_TOKENS:
            continue
        if len(passage) + len(line) > PASSAGE_TOKENS:
            yield passage
            passage = []
        passage = passage + line


def draw_requests(library: Sequence[Passage], count: int, tenants: int) -> list[Request]:
    """Draw requests; topics by Zipf's law, each tenant's among its own."""
    draw = random.Random(f"novel/{count}/{tenants}")
    by_topic: dict[int, list[Passage]] = {}
    for passage in library:
        by_topic.setdefault(passage.topic, []).append(passage)
    topics = list(by_topic)
    draw.shuffle(topics)
    vocabulary = range(100, 4000)
    at, requests = 0.0, []
    for number in range(count):
        at += draw.expovariate(1.0)
        tenant = number % tenants
        own = topics[tenant::tenants]
        weights = [1 / (rank + 1) for rank in range(len(own))]
        topic, other = draw.choices(own, weights, k=2)
        chosen = draw.sample(by_topic[topic], OF_TOPIC)
        rest = [one for one in by_topic[other] if one not in chosen]
        chosen += draw.sample(rest, PASSAGES - OF_TOPIC)
        draw.shuffle(chosen)
        question = draw.choices(vocabulary, k=QUESTION_TOKENS)
        salt = f"tenant-{tenant}" if tenants > 1 else None
        requests.append(Request(at, salt, tuple(chosen), question))
    return requests


def ideal_shares(requests: Sequence[Request], capacity: int) -> list[float]:
    """Return per request which share of its passages' tokens an LRU of passages alone holds."""
    held: OrderedDict[int, int] = OrderedDict()
    shares = []
    for request in requests:
        found = sum(len(one.tokens) for one in request.passages if one.number in held)
        shares.append(found / request.num_tokens)
        for one in request.passages:
            held[one.number] = len(one.tokens)
            held.move_to_end(one.number)
        while sum(held.values()) > capacity:
            held.popitem(last=False)
    return shares


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two figures of the same requests, with its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float


def ratio_of(
    above: Sequence[float], below: Sequence[float], how: Any, resamples: int = 1000
) -> Ratio:
    """Return how(above) / how(below); requests are drawn anew for the interval, pair by pair.

    Args:
        above: One figure of each request.
        below: The other figure, in the same order.
        how: numpy's mean or median.
        resamples: How often requests are drawn.
    """
    pairs = np.array([above, below], dtype=np.float64)
    generator = np.random.default_rng(0)
    count = pairs.shape[1]
    found = []
    for _ in range(resamples):
        top, bottom = how(pairs[:, generator.integers(count, size=count)], axis=1)
        found.append(top / bottom)
    low, high = np.quantile(found, [0.025, 0.975])
    top, bottom = how(pairs, axis=1)
    return Ratio(float(top / bottom), float(low), float(high))

"""The pure parts of benchmarks/novel.py: its requests, its ideal cache, its ratios."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from harness import Engine

from benchmarks import novel_engine
from benchmarks.novel import LEAST_PROMPTS, PROMPT_S, TURN, serve_in_turns
from benchmarks.novel_engine import Clock
from benchmarks.novel_traffic import (
    OF_TOPIC,
    PASSAGE_TOKENS,
    PASSAGES,
    Passage,
    Request,
    cut_lines,
    draw_requests,
    ideal_shares,
    ratio_of,
)

LIBRARY = [Passage(number, number // 8, [number] * 10) for number in range(120)]


def _ask(*numbers: int) -> Request:
    return Request(0.0, None, tuple(LIBRARY[number] for number in numbers), [])


def test_lines_are_joined_to_passages_in_order() -> None:
    lines = [[number] * length for number, length in enumerate([70, 40, 20, 121, 90, 50])]
    passages = list(cut_lines(lines))
    assert passages == [lines[0] + lines[1], lines[2] + lines[4]]
    assert max(map(len, passages)) <= PASSAGE_TOKENS


def test_requests_draw_a_topic_by_zipf_and_never_a_passage_twice() -> None:
    requests = draw_requests(LIBRARY, 2000, 1)
    of_topic: Counter[int] = Counter()
    for request in requests:
        assert len({one.number for one in request.passages}) == PASSAGES
        topics = Counter(one.topic for one in request.passages)
        topic, count = topics.most_common(1)[0]
        assert count >= OF_TOPIC
        of_topic[topic] += 1
    first, second, third, *_ = sorted(of_topic.values(), reverse=True)
    assert first / second == pytest.approx(2, rel=0.25)
    assert first / third == pytest.approx(3, rel=0.25)
    distances = [b.at - a.at for a, b in itertools.pairwise(requests)]
    assert statistics.mean(distances) == pytest.approx(1, rel=0.1)


def test_tenants_share_no_topic() -> None:
    requests = draw_requests(LIBRARY, 300, 3)
    owners: dict[int, set[str | None]] = {}
    for request in requests:
        for one in request.passages:
            owners.setdefault(one.topic, set()).add(request.tenant)
    assert all(len(salts) == 1 for salts in owners.values())
    assert len(set.union(*owners.values())) == 3


def test_the_ideal_cache_evicts_what_was_used_longest_ago() -> None:
    asked = [_ask(0, 1), _ask(2), _ask(0), _ask(3), _ask(0), _ask(1)]
    assert ideal_shares(asked, 30) == [0, 0, 1, 0, 1, 0]


def test_a_ratio_is_of_the_same_requests() -> None:
    draw = random.Random(1)
    below = [draw.uniform(1, 100) for _ in range(200)]
    above = [0.5 * value for value in below]
    found = ratio_of(above, below, np.mean)
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5))
    noisy = ratio_of([value * draw.uniform(0, 1) for value in below], below, np.median)
    assert noisy.low < noisy.value < noisy.high


def test_a_clock_that_is_stretched_anew_neither_jumps_nor_stands_still() -> None:
    clock = Clock(stretch=1000.0)
    clock.jump(5.0)
    before_s = clock.monotonic()
    clock.stretch_to(10.0)
    changed_s = clock.monotonic()
    assert before_s <= changed_s < before_s + 1
    begun_s = time.thread_time()
    while time.thread_time() < begun_s + 0.02:
        pass
    assert 0.2 <= clock.monotonic() - changed_s < 2


class _Server:
    """Notes what a benchmark orders; each turn has its own CPU seconds of whole prompts."""

    def __init__(self, name: str, turns: list[list[float]], orders: list[tuple[str, Any]]) -> None:
        self.name, self.turns, self.orders = name, turns, orders
        self.stretches: list[float] = []

    def call(self, order: Any, *args: Any) -> Any:
        if order is novel_engine.serve:
            self.orders.append((self.name, args[0]))
            return [(self.name, one.at) for one in args[0]]
        if order is novel_engine.take_prompt_seconds:
            return self.turns.pop(0)
        if order is novel_engine.stretch_to:
            return self.stretches.append(args[0])
        assert order is novel_engine.look_into_pool
        return self.name


def test_servers_take_turns_and_the_clock_follows_the_prompts_of_stock() -> None:
    slower, few = [0.2] * LEAST_PROMPTS, [0.9] * (LEAST_PROMPTS - 1)
    orders: list[tuple[str, Any]] = []
    servers = {
        name: _Server(name, [slower, few, [], slower], orders) for name in ("stock", "other")
    }
    requests = [Request(float(at), None, (), []) for at in range(3 * TURN + 1)]
    running = cast("dict[str, Engine]", servers)
    found: tuple[Any, Any, Any] = serve_in_turns(running, requests, expected_s=0.1, size=2 * TURN)
    served, uses, taken_s = found
    for name in servers:
        assert served[name] == [(name, one.at) for one in requests]
        assert uses[name] == [name]
    assert [name for name, _ in orders] == ["stock", "other", "other", "stock"] * 2
    assert [len(part) for _, part in orders] == [TURN] * 6 + [1] * 2
    halved = pytest.approx([PROMPT_S / 0.2] * 4)
    assert servers["stock"].stretches == halved
    assert servers["other"].stretches == halved
    whole = [2 * PROMPT_S] * len(slower) + [4.5 * PROMPT_S] * len(few) + [PROMPT_S] * len(slower)
    assert taken_s == pytest.approx(whole)

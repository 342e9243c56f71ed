"""What came of requests at ever higher rates: where a server grows slow, and what that says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from sgl_blend.commands.bench.pair import NAMES
from sgl_blend.commands.common.bootstrap import Interval

_FINE = 1.25
"""Rates nearer to each other than this factor are not told apart."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all blocks at one rate on one server; times in seconds.

    Attributes:
        completed_rate: Requests per second, until the last one of a block is answered.
        reused_share: Of the prompt tokens, those whose chunk KV was taken as it was.
        computed_rows: Rows that a request computes in a layer, mean over layers and requests.
        fallbacks: Requests that were not blended, by the reason that the server gives.
    """

    requests: int
    ttft_p50_s: float
    ttft_p50_ci95: Interval
    ttft_p90_s: float
    completed_rate: float
    reused_share: float
    computed_rows: float
    fallbacks: dict[str, int]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One offered rate, in requests per second; null for a server that was too slow before."""

    rate: float
    stock: Load | None
    blend: Load | None

    def load(self, name: str) -> Load | None:
        """Return what came of it on a server."""
        found: Load | None = getattr(self, name)
        return found


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All rates, and what follows from them.

    Attributes:
        idle_ttft_s: Median TTFT of each server with one request at a time.
        bound_s: TTFT p50 up to which a server is fast enough.
        points: Ascending rates.
        knees: Per server the highest rate up to which it always was; null if it never was.
        rates_at_bound: Per server where its TTFT p50 crosses the bound, between the measured rates;
            null if it does not.
        gain: The blending server's rate at the bound over the stock one's.
        ceiling: What the gain would be if only linear work took time: rows that stock computes over
            those that blending computes, of the same requests. Stock finds the beginning of a prompt
            in its own cache, too, so this lies below what one alone would reach.
    """

    idle_ttft_s: dict[str, float]
    bound_s: float
    points: list[Point]
    knees: dict[str, float | None]
    rates_at_bound: dict[str, float | None]
    gain: float | None
    ceiling: float | None


def next_rate(within: Mapping[float, bool], first: float) -> float | None:
    """Return the rate to try next on one server: doubling until it is too slow, then in between.

    Args:
        within: Per tried rate whether the server was fast enough.
        first: What to begin with.

    Returns:
        Requests per second, or None when its limit is known well enough.
    """
    if not within:
        return first
    slow = min((rate for rate, fast in within.items() if not fast), default=None)
    if slow is None:
        return 2 * max(within)
    below = [rate for rate in within if rate < slow]
    if not below:
        return slow / 2
    return math.sqrt(max(below) * slow) if slow / max(below) > _FINE else None


def find_knee(points: Sequence[Point], name: str, bound_s: float) -> float | None:
    """Return the highest rate up to which a server's TTFT p50 stays within a bound.

    Args:
        points: Ascending rates.
        name: Of the server.
        bound_s: The bound.

    Returns:
        Requests per second; None if the lowest rate is too much.
    """
    knee = None
    for rate, p50_s in _curve(points, name):
        if p50_s > bound_s:
            break
        knee = rate
    return knee


def find_rate_at(points: Sequence[Point], name: str, bound_s: float) -> float | None:
    """Return where a server's TTFT p50 first crosses a bound, straight between measured rates.

    Args:
        points: Ascending rates.
        name: Of the server.
        bound_s: The bound.

    Returns:
        Requests per second; None if it is crossed at none of them, or below the lowest.
    """
    before: tuple[float, float] | None = None
    for rate, p50_s in _curve(points, name):
        if p50_s > bound_s:
            if before is None:
                return None
            share = (bound_s - before[1]) / (p50_s - before[1])
            return before[0] + share * (rate - before[0])
        before = rate, p50_s
    return None


def _curve(points: Sequence[Point], name: str) -> list[tuple[float, float]]:
    found = ((point.rate, point.load(name)) for point in points)
    return [(rate, load.ttft_p50_s) for rate, load in found if load is not None]


def conclude(points: Sequence[Point], idle_ttft_s: Mapping[str, float], slo: float) -> Outcome:
    """Say what the points show.

    Args:
        points: In any order.
        idle_ttft_s: Of each server.
        slo: Times stock's idle TTFT that the median may take.
    """
    bound_s = slo * idle_ttft_s["stock"]
    ordered = sorted(points, key=lambda point: point.rate)
    at_bound = {name: find_rate_at(ordered, name, bound_s) for name in NAMES}
    stock, blend = at_bound["stock"], at_bound["blend"]
    return Outcome(
        idle_ttft_s=dict(idle_ttft_s),
        bound_s=bound_s,
        points=ordered,
        knees={name: find_knee(ordered, name, bound_s) for name in NAMES},
        rates_at_bound=at_bound,
        gain=None if stock is None or blend is None else blend / stock,
        ceiling=find_ceiling(ordered),
    )


def find_ceiling(points: Sequence[Point]) -> float | None:
    """Return how many times more requests linear work alone would allow; see Outcome.

    Args:
        points: Those on which both servers saw the same requests count.
    """
    rows = dict.fromkeys(NAMES, 0.0)
    for point in points:
        loads = {name: point.load(name) for name in NAMES}
        for name, load in loads.items():
            if load is not None and None not in loads.values():
                rows[name] += load.computed_rows * load.requests
    return rows["stock"] / rows["blend"] if rows["blend"] else None

"""A stretch of a prompt."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of a prompt, counted from its first token."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Return how many tokens it has."""
        return self.stop - self.start


def num_shared(one: Span, other: Span) -> int:
    """Return how many tokens lie in both."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def overlapping(spans: Sequence[Span], span: Span) -> Sequence[Span]:
    """Return those of many stretches that share tokens with one.

    Args:
        spans: Ascending and disjoint.
        span: The one.
    """
    first = bisect_right(spans, span.start, key=attrgetter("stop"))
    return spans[first : bisect_left(spans, span.stop, lo=first, key=attrgetter("start"))]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return what lies in any of these stretches, ascending and disjoint."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged

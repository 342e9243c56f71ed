"""Which known chunks serve a prompt: disjoint pieces, most tokens, then fewest pieces.

A piece begins where a chunk begins. It may end anywhere before the chunk ends, because the first
tokens of a chunk do not know its last ones. So where two chunks overlap, the first is cut.

The plan is made from the claimed lengths, from the right to the left: the best that can follow a
start does not depend on what stands before it. Then it is followed from the left to the right, and
each chunk is walked in the tree when its turn comes. If it is shorter than claimed, what follows is
chosen again. Before a piece is cut that was found whole, the rest of the plan is made again from what
the walks have shown: in a text that repeats itself every repetition claims to reach beyond its end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_blend.finding.spans import Span

Walk = Callable[[int], int]
"""Returns how many tokens, from an offset of the prompt on, are stored as a chunk that begins there."""

_LEAST_WALKS = 64
_TOKENS_PER_WALK = 128
_STARTS_PER_WALK = 2
"""Starts that are planned with. Of more than that, neighbours are thinned out."""
_TOKEN_COST = 1 << 24
"""Cost of a token that no piece covers; a piece costs 1. No prompt has that many pieces."""
_NEVER = 1 << 62
_MOST_PLANS = 4
"""How often the rest of a plan is made again, for all pieces of a hole: it costs as much as a plan."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where chunks may begin in a prompt.

    Attributes:
        starts: Integers [m], offsets in the prompt, strictly ascending.
        lengths: Integers [m], how many tokens each chunk is said to have.
    """

    starts: NDArray[np.intp]
    lengths: NDArray[np.uint32]


def most_walks(num_tokens: int) -> int:
    """Return how often the tree may be walked for a prompt."""
    return max(_LEAST_WALKS, num_tokens // _TOKENS_PER_WALK)


def cover(
    candidates: Candidates, holes: Sequence[Span], walk: Walk, *, num_tokens: int, least: int
) -> list[Span]:
    """Choose the pieces that serve the holes of a prompt.

    Args:
        candidates: Where chunks may begin, anywhere in the prompt.
        holes: What nothing else serves: disjoint, ascending. A piece lies in one of them.
        walk: Asked at most once for a start, and most_walks() times in all. It may return less
            than was claimed, 0 too; what it returns beyond the claim is not used.
        num_tokens: Of the prompt.
        least: Tokens of the shortest part of a chunk worth having, at least 1. A chunk that has
            fewer is worth having as a whole.

    Returns:
        Disjoint pieces, ascending, each of at least ``least`` tokens or a whole chunk. If all
        claims are true, if there were walks enough and no start was thinned out, no other choice
        covers more tokens, and none covers as many with fewer pieces.

    Raises:
        ValueError: ``least`` is below 1.
    """
    if least < 1:
        raise ValueError(f"a piece has at least 1 token, got least={least}")
    budget = most_walks(num_tokens)
    stops = candidates.starts + candidates.lengths
    leasts = np.minimum(candidates.lengths, least)
    pieces: list[Span] = []
    for hole in holes:
        if not budget:
            break
        first, last = np.searchsorted(candidates.starts, hole)
        starts = candidates.starts[first:last]
        ends = np.minimum(stops[first:last], hole.stop)
        worth = np.flatnonzero(ends - starts >= leasts[first:last])
        kept = worth[_thin_out(starts[worth], ends[worth], _STARTS_PER_WALK * budget, num_tokens)]
        begins, reaches = starts[kept], ends[kept]
        claims = begins.tolist(), reaches.tolist(), leasts[first:last][kept].tolist()
        if (reaches[:-1] <= begins[1:]).all():
            found, num_walks = _walk_each(*claims, walk, budget)
        else:
            found, num_walks = _follow(_Plan(*claims, hole.stop), hole.start, walk, budget)
        budget -= num_walks
        pieces += found
    return pieces


def _thin_out(
    starts: NDArray[np.intp], ends: NDArray[np.intp], most: int, num_tokens: int
) -> NDArray[np.intp]:
    """Return which starts to keep: of too many, what reaches furthest among a few neighbours."""
    if len(starts) <= most:
        return np.arange(len(starts))
    block = starts // -(-num_tokens // most)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    furthest = np.maximum.reduceat(ends, first)
    sizes = np.diff(first, append=len(starts))
    reaching = np.flatnonzero(ends == np.repeat(furthest, sizes))
    leftmost: NDArray[np.intp] = reaching[np.diff(block[reaching], prepend=-1) > 0]
    return leftmost


def _walk_each(
    starts: list[int], ends: list[int], leasts: list[int], walk: Walk, budget: int
) -> tuple[list[Span], int]:
    """Return the pieces of chunks that do not overlap, and the walks: each of them is worth having.

    Args:
        starts: Ascending offsets.
        ends: How far each reaches.
        leasts: Tokens of the shortest piece that begins there.
        walk: As in cover().
        budget: The most walks.
    """
    pieces: list[Span] = []
    chosen = starts[:budget]
    for start, end, least in zip(chosen, ends, leasts, strict=False):
        length = min(walk(start), end - start)
        if length >= least:
            pieces.append(Span(start, start + length))
    return pieces, len(chosen)


class _Plan:
    """What it costs to go on from each start to the end of a hole.

    Args:
        starts: Ascending offsets.
        ends: How far each reaches.
        leasts: Tokens of the shortest piece that begins there.
        stop: The end of the hole.
    """

    def __init__(self, starts: list[int], ends: list[int], leasts: list[int], stop: int) -> None:
        self.starts, self.ends, self.leasts = starts, ends, leasts
        self._stop = stop
        self._costs = [_NEVER] * len(starts)
        # The same with the cost of what is skipped, counted from the beginning of the prompt.
        self._skips = [_NEVER] * len(starts)
        self._is_outdated = False
        self._plans_left = 1 + _MOST_PLANS
        self._weigh_from(0)

    def shorten(self, number: int, num_tokens: int) -> None:
        """Note how long a chunk really is; below the shortest piece it is not there.

        Starts before it that counted on it are not weighed again before ``renew``. What follows them
        is, when they are used.
        """
        self.ends[number] = min(self.ends[number], self.starts[number] + num_tokens)
        self._weigh(number)
        self._is_outdated = True

    def renew(self, start: int) -> bool:
        """Weigh all starts after an offset again, if any was shortened; return whether they were.

        Not for ever: a hostile prompt could ask for it after each walk.
        """
        if not self._is_outdated or not self._plans_left:
            return False
        self._weigh_from(bisect_right(self.starts, start))
        return True

    def next(self, start: int, end: int, least: int) -> int | None:
        """Return which start follows best, or None where the hole is better left alone.

        Args:
            start: Where the piece before begins.
            end: Where it ends, unless it is cut.
            least: Tokens that are left of it if it is cut.
        """
        return self._choose(start, end, least)[1]

    def _weigh_from(self, first: int) -> None:
        self._is_outdated = False
        self._plans_left -= 1
        for number in reversed(range(first, len(self.starts))):
            self._weigh(number)

    def _weigh(self, number: int) -> None:
        start, end = self.starts[number], self.ends[number]
        least = self.leasts[number]
        if end - start < least:
            self._costs[number] = self._skips[number] = _NEVER
            return
        self._costs[number] = 1 + self._choose(start, end, least)[0]
        self._skips[number] = self._costs[number] + start * _TOKEN_COST

    def _choose(self, start: int, end: int, least: int) -> tuple[int, int | None]:
        """Return the least cost behind a piece, and the start that it comes from."""
        best, number = (self._stop - end) * _TOKEN_COST, None
        first = bisect_left(self.starts, start + least)
        past = bisect_right(self.starts, end, first)
        if first < past:
            cost = min(self._costs[first:past])
            if cost < best:
                best, number = cost, self._costs.index(cost, first, past)
        if past < len(self.starts):
            skip = min(self._skips[past:])
            if skip - end * _TOKEN_COST < best:
                best, number = skip - end * _TOKEN_COST, self._skips.index(skip, past)
        return best, number


def _follow(plan: _Plan, begin: int, walk: Walk, budget: int) -> tuple[list[Span], int]:
    """Walk the chunks of a plan from the left to the right; return the pieces and the walks."""
    pieces: list[Span] = []
    walked: set[int] = set()
    # The piece before, which may still be cut. At first there is none: an empty one.
    start, end, least = begin, begin, 0
    while (number := plan.next(start, end, least)) is not None:
        at = plan.starts[number]
        if number not in walked:
            if len(walked) == budget:
                break
            walked.add(number)
            length = walk(at)
            if length < plan.ends[number] - at:
                plan.shorten(number, length)
                continue  # another one may be better now
        if at < end and plan.renew(start):
            continue  # the piece before may be better left whole
        if end > start:
            pieces.append(Span(start, min(end, at)))
        start, end, least = at, plan.ends[number], plan.leasts[number]
    if end > start:
        pieces.append(Span(start, end))
    return pieces, len(walked)

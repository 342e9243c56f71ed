"""Pieces against all choices there are, and against walks that find less than was claimed."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from finding_cases import milliseconds, slowness
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.finding.cover import Candidates, cover, most_walks
from sgl_blend.finding.spans import Span

Chunks = dict[int, int]
"""Length by start."""


def candidates_of(chunks: Chunks) -> Candidates:
    starts = sorted(chunks)
    lengths = [chunks[start] for start in starts]
    return Candidates(np.array(starts, np.intp), np.array(lengths, np.uint32))


def served_by(chunks: Chunks, holes: list[Span], size: int, least: int) -> list[Span]:
    return cover(candidates_of(chunks), holes, lambda at: chunks[at], num_tokens=size, least=least)


def best_of_hole(chunks: Chunks, hole: Span, least: int) -> tuple[int, int]:
    """Most tokens, and minus the fewest pieces for them, by trying all sets of starts."""
    inside = [start for start in chunks if hole.start <= start < hole.stop]
    best = (0, 0)
    for count in range(1, len(inside) + 1):
        for chosen in combinations(sorted(inside), count):
            ends = [*chosen[1:], hole.stop]
            lengths = [
                min(start + chunks[start], end) - start
                for start, end in zip(chosen, ends, strict=True)
            ]
            fewest = [min(least, chunks[start]) for start in chosen]
            if all(length >= few for length, few in zip(lengths, fewest, strict=True)):
                best = max(best, (sum(lengths), -count))
    return best


sizes = st.integers(40, 60)
chunk_sets = st.dictionaries(st.integers(0, 50), st.integers(1, 30), max_size=8)


@settings(deadline=None, max_examples=400)
@given(chunks=chunk_sets, cut=st.integers(5, 35), gap=st.integers(0, 4), least=st.integers(1, 8))
def test_no_choice_covers_more_or_as_much_with_fewer_pieces(
    chunks: Chunks, cut: int, gap: int, least: int
) -> None:
    holes = [Span(2, cut), Span(cut + gap, 60)]
    pieces = served_by(chunks, holes, 60, least)
    for hole in holes:
        inside = [piece for piece in pieces if hole.start <= piece.start < hole.stop]
        assert all(piece.stop <= hole.stop for piece in inside)
        tokens = sum(piece.num_tokens for piece in inside)
        assert (tokens, -len(inside)) == best_of_hole(chunks, hole, least)


@settings(deadline=None, max_examples=400)
@given(
    claims=chunk_sets,
    short=st.dictionaries(st.integers(0, 50), st.integers(0, 29)),
    least=st.integers(1, 8),
)
def test_walks_that_find_less_leave_no_gap_that_another_fits(
    claims: Chunks, short: Chunks, least: int
) -> None:
    real = {start: min(length, short.get(start, length)) for start, length in claims.items()}
    asked: list[int] = []

    def walk(at: int) -> int:
        asked.append(at)
        return real[at]

    hole = Span(0, 60)
    pieces = cover(candidates_of(claims), [hole], walk, num_tokens=60, least=least)
    assert len(asked) == len(set(asked))
    ends = [0]
    for piece in pieces:
        assert piece.start >= ends[-1]
        assert min(least, claims[piece.start]) <= piece.num_tokens <= real[piece.start]
        ends.append(piece.stop)
    gaps = zip(ends, [*(piece.start for piece in pieces), 60], strict=True)
    for begin, end in gaps:
        for start, length in real.items():
            if begin <= start:
                assert min(start + length, end) - start < min(least, claims[start])


def test_a_chunk_below_the_least_part_is_found_as_a_whole_or_not_at_all() -> None:
    assert served_by({10: 20}, [Span(0, 30)], 30, 64) == [(10, 30)]
    assert served_by({10: 20}, [Span(0, 29)], 30, 64) == []
    assert served_by({10: 20, 25: 70}, [Span(0, 100)], 100, 64) == [(25, 95)]
    found_less = cover(
        candidates_of({10: 20}), [Span(0, 99)], lambda at: 19, num_tokens=99, least=64
    )
    assert found_less == []


def test_a_longer_chunk_cuts_the_one_before_it() -> None:
    pieces = served_by({0: 100, 90: 200}, [Span(0, 300)], 300, 64)
    assert pieces == [(0, 90), (90, 290)]


def test_a_chunk_that_brings_nothing_new_is_not_walked() -> None:
    asked: list[int] = []

    def walk(at: int) -> int:
        asked.append(at)
        return 200

    candidates = candidates_of({0: 200, 50: 100, 100: 100})
    assert cover(candidates, [Span(0, 200)], walk, num_tokens=200, least=10) == [(0, 200)]
    assert asked == [0]


def test_what_a_walk_finds_beyond_the_claim_is_not_used() -> None:
    candidates = candidates_of({0: 70})
    assert cover(candidates, [Span(0, 500)], lambda at: 400, num_tokens=500, least=64) == [(0, 70)]


def test_a_short_chunk_makes_room_for_the_next_one() -> None:
    claims, real = {0: 300, 100: 150}, {0: 90, 100: 150}
    pieces = cover(
        candidates_of(claims), [Span(0, 400)], lambda at: real[at], num_tokens=400, least=64
    )
    assert pieces == [(0, 90), (100, 250)]


@settings(deadline=None, max_examples=200)
@given(
    period=st.integers(17, 120),
    times=st.integers(2, 8),
    head=st.integers(0, 30),
    tail=st.integers(1, 300),
)
def test_a_text_that_repeats_itself_is_one_piece(
    period: int, times: int, head: int, tail: int
) -> None:
    # Every repetition begins like the chunk and claims all of its length, beyond the text's end.
    size, end = period * times, head + period * times
    chunks = dict.fromkeys(range(head, end, period), size)
    pieces = cover(
        candidates_of(chunks),
        [Span(0, end + tail)],
        lambda at: end - at,
        num_tokens=end + tail,
        least=min(64, size),
    )
    assert pieces == [(head, end)]


@pytest.mark.parametrize(("num_tokens", "most"), [(100, 64), (8_192, 64), (12_800, 100)])
def test_walks_are_bounded(num_tokens: int, most: int) -> None:
    assert most_walks(num_tokens) == most
    asked: list[int] = []

    def walk(at: int) -> int:
        asked.append(at)
        return 0

    starts = range(0, num_tokens - 5, max(1, num_tokens // (2 * most)))
    candidates = candidates_of(dict.fromkeys(starts, 50))
    holes = [Span(0, num_tokens // 10), Span(num_tokens // 10, num_tokens)]
    assert cover(candidates, holes, walk, num_tokens=num_tokens, least=5) == []
    assert len(asked) == most
    assert sorted(set(asked)) == asked


def test_too_many_starts_are_thinned_to_those_that_reach_furthest() -> None:
    # Every offset begins a chunk; one of them reaches to the end.
    chunks = dict.fromkeys(range(8_000), 64)
    chunks[3] = 7_997
    assert served_by(chunks, [Span(0, 8_000)], 8_000, 32) == [(3, 8_000)]


def test_a_piece_has_a_length() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        served_by({}, [], 10, 0)


@pytest.mark.parametrize("period", [1, 2, 16, 17])
@pytest.mark.parametrize("claim", [64, 1_024, 8_000])
@pytest.mark.parametrize("length", [0, 40, 1_024])
def test_repeated_text_is_covered_fast(period: int, claim: int, length: int) -> None:
    starts = np.arange(0, 8_000, period, dtype=np.intp)
    candidates = Candidates(starts, np.full(len(starts), claim, np.uint32))

    def run() -> None:
        cover(candidates, [Span(0, 8_000)], walk, num_tokens=8_000, least=64)

    walk: Callable[[int], int] = lambda at: length  # noqa: E731
    assert milliseconds(run, 20) < 5.0 * slowness()

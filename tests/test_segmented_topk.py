"""Segmented top-k: Triton and torch agree in every bit, and both with Python's sort."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.kernels.segmented_topk import Segments, segmented_topk, select_rows
from sgl_blend.kernels.segmented_topk_triton import segmented_topk_triton, select_rows_triton
from support import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Lists = tuple[list[int], list[int]]


def by_sorting(scores: list[float], lengths: list[int], budgets: list[int]) -> Lists:
    """Sort tuples, segment by segment."""
    taken, first = [], 0
    for length, budget in zip(lengths, budgets, strict=True):
        rows = range(first, first + length)
        largest_first = [(not math.isnan(scores[r]), -scores[r], r) for r in rows]
        largest_first = [(a, 0.0 if math.isnan(b) else b, r) for a, b, r in largest_first]
        taken += sorted(r for _, _, r in sorted(largest_first)[:budget])
        first += length
    return taken, sorted(set(range(first)) - set(taken))


def select_both(scores: torch.Tensor, lengths: list[int], budgets: list[int]) -> list[Lists]:
    """Return what Triton and what torch select."""
    found = []
    for select, device in ((segmented_topk_triton, DEVICE), (segmented_topk, "cpu")):
        taken, left = select(scores.to(device), lengths, budgets)
        assert taken.dtype == left.dtype == torch.int64
        found.append((taken.tolist(), left.tolist()))
    return found


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
@pytest.mark.parametrize(
    "lengths",
    [[1], [63], [100, 0, 1024], [1025], [8192, 5], [8193], [20_000, 613]],  # around block sizes
    ids=str,
)
def test_the_largest_scores_of_each_segment_are_taken(lengths: list[int], ratio: float) -> None:
    scores = torch.rand(sum(lengths)) * 100
    budgets = [math.ceil(ratio * length) for length in lengths]

    for got in select_both(scores, lengths, budgets):
        assert got == by_sorting(scores.tolist(), lengths, budgets)


@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(12_000),
        torch.randint(0, 3, (12_000,)).float(),
        torch.full((12_000,), torch.inf),
        torch.tensor([torch.inf, 1.0, torch.nan, -0.0, 0.0, 1e-40]).repeat(2000),
    ],
    ids=["zeros", "few values", "all infinite", "specials"],
)
def test_ties_go_to_the_lower_row(scores: torch.Tensor) -> None:
    lengths, budgets = [1100, 10_900], [333, 9001]  # more than one block

    for got in select_both(scores, lengths, budgets):
        assert got == by_sorting(scores.tolist(), lengths, budgets)


def test_every_nan_is_as_large_as_any_other() -> None:
    bits = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)

    for taken, left in select_both(bits.view(torch.float32), [5], [2]):
        assert taken == [1, 2]
        assert left == [0, 3, 4]


values = st.one_of(st.floats(0, width=32), st.sampled_from([0.0, 1.0, math.inf, math.nan]))


@settings(max_examples=25)
@given(segments=st.lists(st.lists(values, max_size=30), min_size=1, max_size=4), data=st.data())
def test_any_scores_and_any_budgets(segments: list[list[float]], data: st.DataObject) -> None:
    lengths = [len(segment) for segment in segments]
    budgets = [data.draw(st.integers(0, length)) for length in lengths]
    scores = [score for segment in segments for score in segment]

    for got in select_both(torch.tensor(scores, dtype=torch.float32), lengths, budgets):
        assert got == by_sorting(scores, lengths, budgets)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_nothing_is_selected_from_nothing(lengths: list[int]) -> None:
    for got in select_both(torch.empty(0), lengths, lengths):
        assert got == ([], [])


def select_both_ways(
    scores: torch.Tensor, rows: torch.Tensor, segments: Segments
) -> list[tuple[list[int], ...]]:
    """Return what Triton and what torch keep of a batch."""
    bounds = torch.from_numpy(segments.bounds())
    by_triton = select_rows_triton(
        scores.to(DEVICE),
        rows.to(DEVICE),
        segments.rows,
        sum(segments.taken),
        bounds.to(DEVICE),
    )
    by_torch = select_rows(scores, rows, segments, bounds)
    found = []
    for got in (by_triton, by_torch):
        assert all(tensor.dtype == torch.int64 for tensor in got)
        found.append(tuple(tensor.tolist() for tensor in got))
    return found


def batch_by_sorting(
    scores: list[float], rows: list[int], segments: Segments
) -> tuple[list[int], list[int], list[int]]:
    """Take candidates by sorting tuples, and put every other row between them."""
    taken, left = by_sorting(scores, list(segments.candidates), list(segments.taken))
    gone = {rows[number] for number in left}
    kept = [row for row in range(sum(segments.rows)) if row not in gone]
    return kept, taken, [kept.index(rows[number]) for number in taken]


def spread(candidates: list[int], num_rows: list[int], seed: int = 0) -> torch.Tensor:
    """Draw the rows that candidates stand in, ascending within each request."""
    draw = random.Random(seed)
    first, rows = 0, []
    for some, count in zip(candidates, num_rows, strict=True):
        rows += sorted(draw.sample(range(first, first + count), some))
        first += count
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize(
    ("candidates", "num_rows"),
    [([1], [1]), ([60], [200]), ([0, 700, 0], [9, 1024, 3]), ([4100], [4096 + 70])],
    ids=str,
)
def test_rows_that_are_no_candidates_stay(
    candidates: list[int], num_rows: list[int], ratio: float
) -> None:
    taken = tuple(math.ceil(ratio * some) for some in candidates)
    segments = Segments(tuple(num_rows), tuple(candidates), taken)
    scores, rows = torch.rand(sum(candidates)), spread(candidates, num_rows)

    for got in select_both_ways(scores, rows, segments):
        assert got == batch_by_sorting(scores.tolist(), rows.tolist(), segments)


@settings(max_examples=25)
@given(segments=st.lists(st.lists(values, max_size=20), min_size=1, max_size=4), data=st.data())
def test_any_rows_stay_between_any_candidates(
    segments: list[list[float]], data: st.DataObject
) -> None:
    candidates = [len(segment) for segment in segments]
    num_rows = [some + data.draw(st.integers(0, 20)) for some in candidates]
    taken = tuple(data.draw(st.integers(0, some)) for some in candidates)
    counts = Segments(tuple(num_rows), tuple(candidates), taken)
    rows = spread(candidates, num_rows, data.draw(st.integers(0, 9)))
    scores = [score for segment in segments for score in segment]

    for got in select_both_ways(torch.tensor(scores, dtype=torch.float32), rows, counts):
        assert got == batch_by_sorting(scores, rows.tolist(), counts)


def test_scores_of_a_request_that_keeps_all_do_not_matter() -> None:
    segments = Segments((4, 4), (3, 3), (3, 1))
    rows, scores = torch.tensor([0, 2, 3, 4, 5, 7]), torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 5.0])
    for other in (0.0, math.nan, math.inf):
        unknown = torch.cat([torch.full((3,), other), scores[3:]])
        assert (
            select_both_ways(unknown, rows, segments)
            == [([0, 1, 2, 3, 5, 6], [0, 1, 2, 4], [0, 2, 3, 4])] * 2
        )


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^taken: expected taken <= candidates <= rows"):
        Segments((4,), (5,), (1,))
    segments = Segments((4,), (2,), (1,))
    with pytest.raises(ValueError, match=r"^rows: expected shape \(2,\), got \(3,\)$"):
        select_rows(torch.zeros(2), torch.arange(3), segments, torch.from_numpy(segments.bounds()))


def test_sizes_that_do_not_fit_are_refused() -> None:
    scores = torch.zeros(5)
    with pytest.raises(ValueError, match=r"^scores: expected shape \(4,\), got \(5,\)$"):
        segmented_topk(scores, [4], [1])
    with pytest.raises(ValueError, match=r"^budgets: expected 2 of them, got 1$"):
        segmented_topk(scores, [2, 3], [1])
    with pytest.raises(ValueError, match=r"^budgets: expected at most \[2, 3\], got \[1, 4\]$"):
        segmented_topk(scores, [2, 3], [1, 4])
    with pytest.raises(ValueError, match=r"^scores: expected torch\.float32, got torch\.float64$"):
        segmented_topk(scores.double(), [5], [1])

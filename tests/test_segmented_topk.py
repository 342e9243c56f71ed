"""Segmented top-k: Triton and torch agree in every bit, and both with Python's sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.kernels.segmented_topk import segmented_topk
from sgl_blend.kernels.segmented_topk_triton import segmented_topk_triton
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


@settings(max_examples=40)
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

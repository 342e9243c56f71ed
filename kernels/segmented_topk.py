"""Segmented top-k: in every segment of a score vector the rows with the largest scores.

    taken = per segment the budget rows first in (score descending, row ascending), ascending
    left  = all other rows, ascending

``select_rows`` does the same among some of a batch's rows, the candidates. All other rows stay:

    kept   = the batch's rows without the candidates that are left, ascending
    places = where in kept the candidates stand that are taken

All sizes are host integers, so nothing has to be asked of the device. Scores are compared as their
float32 bits, whose order is the order of the numbers where they are not negative; the reference and
the Triton kernel compare the same integers and agree in every bit.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.kernels.checks import check_tensor
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.upload import upload

_SIGN_MASK = 0x7FFFFFFF
_NAN_KEY = 0x7F800001
"""Every NaN counts as the same, right above infinity (0x7F800000)."""


def segmented_topk(
    scores: torch.Tensor, lengths: Sequence[int], budgets: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the rows with the largest scores of each segment.

    On CUDA one program serves one segment, whatever its length: four passes of a radix select (8 bits
    each) and one that writes. A pass over 8 k rows is one step of that program; 128 k rows are 16
    steps a pass from L2, an estimated 0.1 ms. More programs for one segment would need eight launches
    or a barrier between programs, which costs as much.

    Args:
        scores: float32 [sum(lengths)], not negative; infinity and NaN are allowed, NaN is largest.
        lengths: Rows of each segment; segments follow one another.
        budgets: Rows to take from each segment.

    Returns:
        (taken, left), int64 [sum(budgets)] and the rest, numbered over all segments, each ascending.

    Raises:
        ValueError: Sizes do not fit together.
    """
    check_tensor("scores", scores, shape=(sum(lengths),), dtype=torch.float32)
    if len(budgets) != len(lengths):
        raise ValueError(f"budgets: expected {len(lengths)} of them, got {len(budgets)}")
    if any(not 0 <= budget <= rows for budget, rows in zip(budgets, lengths, strict=True)):
        raise ValueError(f"budgets: expected at most {list(lengths)}, got {list(budgets)}")
    if not scores.is_cuda:
        return _segmented_topk_torch(scores, lengths, budgets)
    from sgl_blend.kernels.segmented_topk_triton import segmented_topk_triton

    return segmented_topk_triton(scores, lengths, budgets)


@dataclass(frozen=True, slots=True)
class Segments:
    """What the host knows of a selection among some rows of a batch, per request.

    Attributes:
        rows: Rows of the batch.
        candidates: Those of them that may leave it.
        taken: Those of these that stay.

    Raises:
        ValueError: Counts do not fit together.
    """

    rows: tuple[int, ...]
    candidates: tuple[int, ...]
    taken: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = zip(self.taken, self.candidates, self.rows, strict=True)
        if not all(0 <= taken <= some <= rows for taken, some, rows in counts):
            raise ValueError(f"taken: expected taken <= candidates <= rows, got {self}")

    def bounds(self) -> NDArray[np.int32]:
        """Return where the rows, candidates and taken of each request begin, int32 [3, B + 1]."""
        counts = np.array([self.rows, self.candidates, self.taken], dtype=np.int32)
        bounds = np.zeros((3, len(self.rows) + 1), dtype=np.int32)
        np.cumsum(counts, axis=1, out=bounds[:, 1:])
        return bounds


class Selection(NamedTuple):
    """Rows that stay in a batch, on the device.

    Attributes:
        kept: int64, rows of the batch, ascending.
        taken: int64, which candidates stay, ascending.
        places: int64, the row of each of these in the new batch.
    """

    kept: torch.Tensor
    taken: torch.Tensor
    places: torch.Tensor


def select_rows(
    scores: torch.Tensor, rows: torch.Tensor, segments: Segments, bounds: torch.Tensor
) -> Selection:
    """Keep the candidates with the largest scores of each request, and every other row.

    One launch on CUDA, whose rank is made among the candidates alone. The scores of a request whose
    candidates all stay are read, but do not matter.

    Args:
        scores: float32 [candidates], as in segmented_topk.
        rows: int64 [candidates], the row of each in the batch, ascending.
        segments: How many there are of each.
        bounds: Of the segments, on the device.

    Raises:
        ValueError: Sizes do not fit together.
    """
    count = sum(segments.candidates)
    check_tensor("scores", scores, shape=(count,), dtype=torch.float32)
    check_tensor("rows", rows, shape=(count,), dtype=torch.int64)
    check_tensor("bounds", bounds, shape=(3, len(segments.rows) + 1), dtype=torch.int32)
    if not scores.is_cuda:
        return _select_rows_torch(scores, rows, segments)
    from sgl_blend.kernels.segmented_topk_triton import select_rows_triton

    return Selection(*select_rows_triton(scores, rows, segments.rows, sum(segments.taken), bounds))


def _select_rows_torch(scores: torch.Tensor, rows: torch.Tensor, segments: Segments) -> Selection:
    taken, left = _segmented_topk_torch(scores, segments.candidates, segments.taken)
    stays = torch.ones(sum(segments.rows), dtype=torch.bool, device=scores.device)
    stays[rows[left]] = False
    return Selection(stays.nonzero()[:, 0], taken, (stays.cumsum(0) - 1)[rows[taken]])


def _segmented_topk_torch(
    scores: torch.Tensor, lengths: Sequence[int], budgets: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    key = (scores.view(torch.int32) & _SIGN_MASK).clamp(max=_NAN_KEY).long()
    segment_of_row = itertools.chain.from_iterable(
        itertools.repeat(number, rows) for number, rows in enumerate(lengths)
    )
    segment = upload(list(segment_of_row), torch.int64, scores.device)
    # One stable sort by (segment, score descending): ties stay in the order of the rows.
    order = torch.sort((segment << 32) - key, stable=True).indices
    ranked = list(zip(first_rows(lengths), lengths, budgets, strict=True))
    taken = [rank for first, _, budget in ranked for rank in range(first, first + budget)]
    left = [rank for first, rows, budget in ranked for rank in range(first + budget, first + rows)]
    by_rank = [order[upload(ranks, torch.int64, scores.device)] for ranks in (taken, left)]
    return by_rank[0].sort().values, by_rank[1].sort().values

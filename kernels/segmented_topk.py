"""Segmented top-k: in every segment of a score vector the rows with the largest scores.

    taken = per segment the budget rows first in (score descending, row ascending), ascending
    left  = all other rows, ascending

All sizes are host integers, so nothing has to be asked of the device. Scores are compared as their
float32 bits, whose order is the order of the numbers where they are not negative; the reference and
the Triton kernel compare the same integers and agree in every bit.
"""

import itertools
from collections.abc import Sequence

import torch

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

"""Segmented top-k in Triton, one program per segment; definition in segmented_topk.py.

A radix select finds the budget-th largest key, the most significant 8 bits first: a histogram of one
digit over the keys that agree with all digits found so far says which digit comes next, and how many
of the keys that agree are still wanted. Then the rows are written in order, so both lists ascend and
ties go to the lower rows. Bound by latency: 4 bytes per row, read five times, mostly from L2.
"""

# mypy: disallow-untyped-decorators=False

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sgl_blend.kernels.upload import upload

_SHORT_BLOCK = 1024
_LONG_BLOCK = 8192
_ROWS_PER_WARP = 256
"""8 per thread: with 16 the scans of the long block spill."""


def segmented_topk_triton(
    scores: torch.Tensor, lengths: Sequence[int], budgets: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the selection; arguments as segmented_topk, already checked."""
    num_taken, num_rows = sum(budgets), sum(lengths)
    taken = torch.empty(num_taken, dtype=torch.int64, device=scores.device)
    left = torch.empty(num_rows - num_taken, dtype=torch.int64, device=scores.device)
    if num_rows:
        first = list(itertools.accumulate(lengths, initial=0))
        first_taken = list(itertools.accumulate(budgets, initial=0))
        bounds = upload([first, first_taken], torch.int32, scores.device)
        # Two block sizes and no more: each one is compiled anew, while a request waits.
        block = _SHORT_BLOCK if max(lengths) <= _SHORT_BLOCK else _LONG_BLOCK
        _segmented_topk[(len(lengths),)](
            scores.contiguous(), bounds[0], bounds[1], taken, left,
            BLOCK=block, num_warps=block // _ROWS_PER_WARP,
        )  # fmt: skip
    return taken, left


# The second row of bounds begins on 16 bytes for one batch size out of four. A kernel that takes
# note of that is compiled twice, the second time while a request waits.
@triton.jit(do_not_specialize_on_alignment=["first_taken_ptr"])
def _segmented_topk(  # type: ignore[no-untyped-def]
    score_ptr, first_ptr, first_taken_ptr, taken_ptr, left_ptr, BLOCK: tl.constexpr
):
    segment = tl.program_id(0)
    start = tl.load(first_ptr + segment)
    stop = tl.load(first_ptr + segment + 1)
    taken_before = tl.load(first_taken_ptr + segment)
    budget = tl.load(first_taken_ptr + segment + 1) - taken_before
    threshold, num_equal = _find_threshold(score_ptr, start, stop, budget, BLOCK)

    equal_before = 0
    for block_start in range(start, stop, BLOCK):
        row = block_start + tl.arange(0, BLOCK)
        inside = row < stop
        key = _sort_key(score_ptr, row, inside)
        equal = inside & (key == threshold)
        equal_rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        take = inside & ((key > threshold) | (equal & (equal_rank <= num_equal)))
        # Rows in front of this one, of all segments, that are taken.
        rank = taken_before + tl.cumsum(take.to(tl.int32), 0) - take.to(tl.int32)
        tl.store(taken_ptr + rank, row.to(tl.int64), mask=take)
        tl.store(left_ptr + row - rank, row.to(tl.int64), mask=inside & (take == 0))
        taken_before += tl.sum(take.to(tl.int32))
        equal_before += tl.sum(equal.to(tl.int32))


@triton.jit
def _find_threshold(  # type: ignore[no-untyped-def]
    score_ptr, start, stop, budget, BLOCK: tl.constexpr
):
    """Find the budget-th largest key, and how many keys equal to it are to be taken."""
    digit_of_bin = tl.arange(0, 256)
    found = 0
    found_mask = 0
    wanted = budget
    for place in tl.static_range(4):
        shift = 24 - 8 * place
        count = tl.zeros([256], tl.int32)
        for block_start in range(start, stop, BLOCK):
            row = block_start + tl.arange(0, BLOCK)
            inside = row < stop
            key = _sort_key(score_ptr, row, inside)
            agrees = inside & ((key & found_mask) == found)
            count += tl.histogram((key >> shift) & 255, 256, mask=agrees)
        at_least = tl.sum(count) - tl.cumsum(count, 0) + count  # keys of this digit or a larger one
        digit = tl.max(tl.where(at_least >= wanted, digit_of_bin, 0))
        wanted -= tl.sum(tl.where(digit_of_bin > digit, count, 0))
        found |= digit << shift
        found_mask |= (255 << shift) & 0x7FFFFFFF
    # Nothing is above the largest key there is, and of those equal to it none is wanted.
    threshold = tl.where(budget == 0, 0x7FFFFFFF, found)
    return threshold, tl.where(budget == 0, 0, wanted)


@triton.jit
def _sort_key(score_ptr, row, inside):  # type: ignore[no-untyped-def]
    bits = tl.load(score_ptr + row, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return tl.minimum(bits & 0x7FFFFFFF, 0x7F800001)

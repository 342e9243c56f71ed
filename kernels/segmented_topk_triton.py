"""Segmented top-k in Triton, one program per segment; definition in segmented_topk.py.

A radix select finds the budget-th largest key, the most significant 8 bits first: a histogram of one
digit over the keys that agree with all digits found so far says which digit comes next, and how many
of the keys that agree are still wanted. Then the rows are written in order, so both lists ascend and
ties go to the lower rows. Bound by latency: 4 bytes per row, read five times, mostly from L2.

Where rows leave a batch, the program marks the rows that go, and in a last pass writes the others down.
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
_LONG_ROW_BLOCK = 4096
"""Where rows leave a batch: with 8192 a thread has too few registers, and spills."""
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
        block = _block_for(max(lengths), _LONG_BLOCK)
        _segmented_topk[(len(lengths),)](
            scores.contiguous(), bounds[0], bounds[1], taken, left,
            BLOCK=block, num_warps=block // _ROWS_PER_WARP,
        )  # fmt: skip
    return taken, left


def select_rows_triton(
    scores: torch.Tensor,
    rows: torch.Tensor,
    rows_per_request: Sequence[int],
    num_taken: int,
    bounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the selection; arguments as select_rows, already checked. Returns what Selection holds."""
    num_rows = sum(rows_per_request)
    num_kept = num_rows - rows.shape[0] + num_taken
    kept, taken, places = (rows.new_empty(size) for size in (num_kept, num_taken, num_taken))
    if num_rows:
        stays = torch.empty(num_rows, dtype=torch.int8, device=rows.device)
        block = _block_for(max(rows_per_request), _LONG_ROW_BLOCK)
        _select_rows[(len(rows_per_request),)](
            scores.contiguous(), rows, bounds, len(rows_per_request), stays, kept, taken, places,
            BLOCK=block, num_warps=block // _ROWS_PER_WARP,
        )  # fmt: skip
    return kept, taken, places


def _block_for(longest: int, long_block: int) -> int:
    # Two block sizes and no more: each one is compiled anew, while a request waits.
    return _SHORT_BLOCK if longest <= _SHORT_BLOCK else long_block


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


@triton.jit(
    do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["score_ptr", "row_ptr"]
)
def _select_rows(  # type: ignore[no-untyped-def]
    score_ptr, row_ptr, bounds_ptr, num_segments, stays_ptr, kept_ptr, taken_ptr, place_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first_row_ptr = bounds_ptr + tl.program_id(0)
    first_ptr = first_row_ptr + num_segments + 1
    first_taken_ptr = first_ptr + num_segments + 1
    row_start = tl.load(first_row_ptr)
    row_stop = tl.load(first_row_ptr + 1)
    start = tl.load(first_ptr)
    stop = tl.load(first_ptr + 1)
    taken_start = tl.load(first_taken_ptr)
    budget = tl.load(first_taken_ptr + 1) - taken_start
    threshold, num_equal = _find_threshold(score_ptr, start, stop, budget, BLOCK)

    for block_start in range(row_start, row_stop, BLOCK):
        row = block_start + tl.arange(0, BLOCK)
        tl.store(stays_ptr + row, tl.full([BLOCK], 1, tl.int8), mask=row < row_stop)
    tl.debug_barrier()  # other threads of the program write and read these marks below
    kept_start = row_start - start + taken_start
    taken_before = taken_start
    equal_before = 0
    for block_start in range(start, stop, BLOCK):
        number = block_start + tl.arange(0, BLOCK)
        inside = number < stop
        key = _sort_key(score_ptr, number, inside)
        equal = inside & (key == threshold)
        equal_rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        take = inside & ((key > threshold) | (equal & (equal_rank <= num_equal)))
        rank = taken_before + tl.cumsum(take.to(tl.int32), 0) - take.to(tl.int32)
        row = tl.load(row_ptr + number, mask=inside, other=0)
        gone = (number - start) - (rank - taken_start)  # candidates in front that leave
        place = kept_start + (row - row_start) - gone
        tl.store(taken_ptr + rank, number.to(tl.int64), mask=take)
        tl.store(place_ptr + rank, place.to(tl.int64), mask=take)
        tl.store(stays_ptr + row, tl.zeros([BLOCK], tl.int8), mask=inside & (take == 0))
        taken_before += tl.sum(take.to(tl.int32))
        equal_before += tl.sum(equal.to(tl.int32))
    tl.debug_barrier()
    kept_before = kept_start
    for block_start in range(row_start, row_stop, BLOCK):
        row = block_start + tl.arange(0, BLOCK)
        stays = tl.load(stays_ptr + row, mask=row < row_stop, other=0).to(tl.int32)
        place = kept_before + tl.cumsum(stays, 0) - stays
        tl.store(kept_ptr + place, row.to(tl.int64), mask=stays != 0)
        kept_before += tl.sum(stays)


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

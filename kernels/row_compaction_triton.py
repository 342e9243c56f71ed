"""Row compaction in one Triton launch; arguments in row_compaction.py.

Memory-bound: every kept row is read once and written once. A program moves one row of all tensors.
"""

# mypy: disallow-untyped-decorators=False

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 2048
"""Columns moved at once: 16 per thread, two 16-byte accesses in half precision."""


def compact_rows_triton(rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Launch the gather; arguments as compact_rows, already checked."""
    out = [tensor.new_empty(rows.shape[0], *tensor.shape[1:]) for tensor in tensors]
    if not rows.shape[0]:
        return out
    unused = 4 - len(tensors)
    sources = [*tensors, *[rows] * unused]
    targets = [*out, *[rows] * unused]
    widths = [*(math.prod(tensor.shape[1:]) for tensor in tensors), *[0] * unused]
    is_narrow = all(width <= 1 for width in widths)
    kernel = _compact_numbers if is_narrow else _compact_rows
    kernel[(rows.shape[0],)](
        rows, *sources, *targets, *(source.stride(0) for source in sources),
        *widths, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _compact(  # type: ignore[no-untyped-def]
    row_ptr, source0, source1, source2, source3, target0, target1, target2, target3,
    stride0, stride1, stride2, stride3,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, WIDTH3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + place)
    _move_row(source0 + row * stride0, target0 + place * WIDTH0, WIDTH0, BLOCK)
    _move_row(source1 + row * stride1, target1 + place * WIDTH1, WIDTH1, BLOCK)
    _move_row(source2 + row * stride2, target2 + place * WIDTH2, WIDTH2, BLOCK)
    _move_row(source3 + row * stride3, target3 + place * WIDTH3, WIDTH3, BLOCK)


_compact_rows = triton.jit(_compact)
"""For hidden states: it takes note of their alignment, to read 16 bytes at a time."""
_compact_numbers = triton.jit(
    _compact, do_not_specialize_on_alignment=["source0", "source1", "source2", "source3"]
)
"""For numbers by row. SGLang's slots are a part of a list and begin anywhere: a kernel that took
note of that would be compiled again and again, while requests wait."""


@triton.jit
def _move_row(source, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDTH == 1:
        tl.store(target, tl.load(source))
    else:
        for first in tl.static_range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = column < WIDTH
            tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)

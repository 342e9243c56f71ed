"""Attention of scattered queries in Triton; what is computed is drawn in ragged_attention.py.

A program takes a tile of rows of one request, all query heads of one KV head packed into it, and
walks that request's KV block by block with an online softmax:

    position     0 ............ first row of the tile ....... last row ............ end
    blocks       |  no mask     |  mask by position           |  not visited        |

Nothing is planned but what is the same in all layers, and nothing is asked of the device: the grid
is counted on the host, from the rows per request. Few tiles are split along the KV (split-KV): each
share writes an unfinished result and its log-sum, and a second kernel merges them.
"""

# mypy: disallow-untyped-decorators=False

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from sgl_blend.kernels.checks import check_tensor
from sgl_blend.kernels.ragged_attention_tiles import (
    Launch,
    TileShape,
    host_bounds,
    padded_dim,
    prepare_launch,
)
from sgl_blend.kernels.upload import to_device

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Where the rows of a batch stand and where their KV lies; the same in all layers.

    Attributes:
        positions: Integers [T], absolute position of every row, ascending within a request.
        num_rows: Rows of each request.
        max_length: Positions of the longest request.
        bounds: int32 [3, B + 1] on the device: where the rows of each request begin, where its KV
            begins, and how many positions it has (last column unused).
        slots: int32 or int64, the pool slot of every position, requests one after another; None if
            K and V are such rows themselves and not a pool.
        launches: What was checked and decided for shapes of q, k and v, in the first layer that had
            them. The host spends no time on it in the others.
    """

    positions: torch.Tensor
    num_rows: tuple[int, ...]
    max_length: int
    bounds: torch.Tensor
    slots: torch.Tensor | None
    launches: dict[Any, Launch] = field(default_factory=dict, repr=False)


class TritonRagged:
    """The RaggedKernel of CUDA devices."""

    name = "triton"

    def host_counts(self, num_rows: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int32]:
        """Return the bounds of TritonPlan, int32 [3, B + 1]; see RaggedKernel."""
        return host_bounds(num_rows, lengths)

    def plan(
        self,
        positions: torch.Tensor,
        num_rows: Sequence[int],
        kv_slots: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        counts: torch.Tensor | None = None,
    ) -> TritonPlan:
        """Prepare a batch; arguments as plan_ragged. The dtype is that of the queries, any will do."""
        if len(kv_slots) != len(num_rows):
            raise ValueError(f"kv_slots: expected {len(num_rows)} requests, got {len(kv_slots)}")
        lengths = [len(slots) for slots in kv_slots]
        slots = torch.cat(list(kv_slots)) if kv_slots else positions
        return plan_triton(positions, num_rows, lengths, slots, counts)

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        plan: TritonPlan,
        *,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attend; arguments as ragged_attention_triton."""
        return ragged_attention_triton(
            q, k_pool, v_pool, plan, scale=scale * k_scale, v_scale=v_scale
        )


def plan_triton(
    positions: torch.Tensor,
    num_rows: Sequence[int],
    lengths: Sequence[int],
    slots: torch.Tensor | None,
    bounds: torch.Tensor | None = None,
) -> TritonPlan:
    """Prepare a batch, once for all layers.

    Args:
        positions: Integers [sum(num_rows)], ascending within a request.
        num_rows: Rows of each request.
        lengths: Positions of each request.
        slots: [sum(lengths)] pool slots; None if K and V come as rows [sum(lengths), ...].
        bounds: See TritonPlan; None if they are to be sent now.

    Raises:
        ValueError: The rows do not add up to the positions, or the lengths to the slots.
    """
    if sum(num_rows) != positions.shape[0]:
        raise ValueError(f"num_rows: expected a sum of {positions.shape[0]}, got {sum(num_rows)}")
    if slots is not None and num_rows:
        check_tensor("slots", slots, shape=(sum(lengths),))
    if bounds is None:
        bounds = to_device(torch.from_numpy(host_bounds(num_rows, lengths)), positions.device)
    return TritonPlan(
        positions=positions,
        num_rows=tuple(num_rows),
        max_length=max(lengths, default=0),
        bounds=bounds,
        slots=slots,
    )


def ragged_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: TritonPlan,
    *,
    scale: float,
    v_scale: float = 1.0,
    tile: TileShape | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend each query to the KV at or before its position.

    Args:
        q: [T, num_heads, head_dim], float32, float16 or bfloat16.
        k: [num_slots, num_kv_heads, head_dim], one layer of the pool, or rows if the plan has no
            slots; any floating-point dtype, fp8 included, is read as q's.
        v: [num_slots, num_kv_heads, v_head_dim], likewise.
        plan: From plan_triton.
        scale: Factor on the scores before the softmax, positive, the scale of an fp8 key included.
        v_scale: Factor on the values.
        tile: Other than choose_tile's.
        num_splits: Shares of the KV; None decides by how many programs fill the device.

    Returns:
        [T, num_heads, v_head_dim], q's dtype.

    Raises:
        ValueError: Shapes do not fit, or the plan is for another number of rows.
    """
    if scale <= 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    key = q.shape, q.dtype, k.shape, v.shape, tile, num_splits
    launch = plan.launches.get(key)
    if launch is None:
        is_paged = plan.slots is not None
        launch = prepare_launch(q, k, v, plan.num_rows, plan.max_length, is_paged, tile, num_splits)
        plan.launches[key] = launch
    num_rows, num_heads, _ = q.shape
    v_head_dim = v.shape[2]
    out = q.new_empty(num_rows, num_heads, v_head_dim)
    if not num_rows:
        return out
    partial = out if launch.partial is None else launch.partial
    _ragged_attention[launch.grid](
        q, k, v, partial, q if launch.log_sum is None else launch.log_sum,
        plan.positions, plan.bounds, plan.bounds if plan.slots is None else plan.slots,
        len(plan.num_rows), num_rows, scale * LOG2_E, v_scale,
        q.stride(0), k.stride(0), v.stride(0), **launch.constants,
    )  # fmt: skip
    if launch.log_sum is not None:
        _merge_splits[(num_rows * num_heads,)](
            partial, launch.log_sum, out, plan.bounds, len(plan.num_rows), num_heads,
            num_rows * num_heads, launch.grid[2], v_scale,
            V_HEAD_DIM=v_head_dim, BLOCK_DV=padded_dim(v_head_dim), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def _ragged_attention(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, position_ptr, bounds_ptr, slot_ptr,
    num_requests, num_rows, log2_scale, v_scale, q_stride, k_stride, v_stride,
    PAGED: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    request, tile = _find_tile(bounds_ptr, num_requests, TILE_ROWS, BLOCK_B)
    if tile < 0:
        return
    first_row = tl.load(bounds_ptr + request).to(tl.int32)
    stop_row = tl.load(bounds_ptr + request + 1).to(tl.int32)
    kv_start = tl.load(bounds_ptr + num_requests + 1 + request).to(tl.int64)
    kv_length = tl.load(bounds_ptr + 2 * (num_requests + 1) + request).to(tl.int32)

    packed = tl.arange(0, BLOCK_M)  # row of the tile, query head of the KV head
    row = first_row + tile * TILE_ROWS + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    valid = (packed < TILE_ROWS * GROUP) & (row < stop_row)
    position = tl.load(position_ptr + row, mask=valid, other=-1).to(tl.int32)
    last = tl.minimum(tl.max(position, 0), kv_length - 1)
    first = tl.min(tl.where(valid, position, last), 0)
    position = tl.where(valid, position, last)  # rows of padding look somewhere; nobody reads them

    dim = tl.arange(0, BLOCK_D)
    q_offset = row.to(tl.int64)[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)

    begin, end = _share_of(last + 1, SPLIT, BLOCK_N)
    unmasked_end = tl.maximum(begin, tl.minimum(end, (first + 1) // BLOCK_N * BLOCK_N))
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * V_HEAD_DIM
    mixed, total, peak = _attend_blocks(
        mixed, total, peak, q, position, begin, unmasked_end,
        k_head_ptr, v_head_ptr, slot_ptr, kv_start, k_stride, v_stride, log2_scale,
        False, PAGED, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    mixed, total, peak = _attend_blocks(
        mixed, total, peak, q, position, unmasked_end, end,
        k_head_ptr, v_head_ptr, slot_ptr, kv_start, k_stride, v_stride, log2_scale,
        True, PAGED, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    _store_tile(
        out_ptr, log_sum_ptr, mixed, total, peak * log2_scale, row, head, valid, num_rows, v_scale,
        SPLIT, GROUP, V_HEAD_DIM, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _find_tile(  # type: ignore[no-untyped-def]
    bounds_ptr, num_requests, TILE_ROWS: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Find the request of this program and its tile in it; the last tiles, the longest, go first.

    A grid that was fixed before the rows were known may hold more programs than there are tiles. The
    tile of those is -1.
    """
    number = tl.arange(0, BLOCK_B)
    known = number < num_requests
    start = tl.load(bounds_ptr + number, mask=known, other=0).to(tl.int32)
    stop = tl.load(bounds_ptr + number + 1, mask=known, other=0).to(tl.int32)
    tiles = (stop - start + TILE_ROWS - 1) // TILE_ROWS
    wanted = tl.sum(tiles, 0) - 1 - tl.program_id(0)
    in_front = tl.cumsum(tiles, 0) <= wanted
    request = tl.sum((known & in_front).to(tl.int32), 0)
    tile = wanted - tl.sum(tl.where(in_front, tiles, 0), 0)
    return request, tl.where(wanted < 0, -1, tile)


@triton.jit
def _share_of(length, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the positions that this program's share of the tile covers, whole blocks."""
    if SPLIT:
        num_blocks = (length + BLOCK_N - 1) // BLOCK_N
        share = (num_blocks + tl.num_programs(2) - 1) // tl.num_programs(2) * BLOCK_N
        begin = tl.program_id(2) * share
        end = tl.minimum(length, begin + share)
    else:
        begin = 0
        end = length
    return begin, end


@triton.jit
def _attend_blocks(  # type: ignore[no-untyped-def]
    mixed, total, peak, q, position, begin, end,
    k_head_ptr, v_head_ptr, slot_ptr, kv_start, k_stride, v_stride, log2_scale,
    MASKED: tl.constexpr, PAGED: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold the KV at positions [begin, end) into the online softmax of a tile."""
    for block_start in range(begin, end, BLOCK_N):
        kv_position = block_start + tl.arange(0, BLOCK_N)
        # What lies past the tile may be memory that nobody has written: not a number times the
        # weight 0 is not 0. So it is not read.
        inside = kv_position < end
        kv_row = _find_rows(slot_ptr, kv_start, kv_position, inside, MASKED, PAGED)
        k = _load_block(k_head_ptr, kv_row, k_stride, inside, MASKED, HEAD_DIM, BLOCK_D).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(kv_position[None, :] <= position[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing so far has no peak, and inf - inf is not a number.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        # Peaks are not scaled, so that a score costs one fused multiply-add before its exp2.
        base = base * log2_scale
        shrink = tl.exp2(peak * log2_scale - base)
        weight = tl.exp2(scores * log2_scale - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        v = _load_block(v_head_ptr, kv_row, v_stride, inside, MASKED, V_HEAD_DIM, BLOCK_DV)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weight.to(q.dtype), v.to(q.dtype), mixed, input_precision="ieee")
        peak = new_peak
    return mixed, total, peak


@triton.jit
def _find_rows(  # type: ignore[no-untyped-def]
    slot_ptr, kv_start, kv_position, inside, MASKED: tl.constexpr, PAGED: tl.constexpr
):
    if not PAGED:
        return kv_start + kv_position
    elif MASKED:  # noqa: RET505 - the compiler builds both branches of anything but else
        return tl.load(slot_ptr + kv_start + kv_position, mask=inside, other=0).to(tl.int64)
    else:
        return tl.load(slot_ptr + kv_start + kv_position).to(tl.int64)


@triton.jit
def _load_block(  # type: ignore[no-untyped-def]
    head_ptr, kv_row, stride, inside, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Load [BLOCK_N, BLOCK], under no more of a mask than is needed: each costs registers."""
    dim = tl.arange(0, BLOCK)[None, :]
    pointer = head_ptr + kv_row[:, None] * stride + dim
    if MASKED and BLOCK == DIM:
        block = tl.load(pointer, mask=inside[:, None], other=0.0)
    elif MASKED:
        block = tl.load(pointer, mask=inside[:, None] & (dim < DIM), other=0.0)
    elif BLOCK == DIM:
        block = tl.load(pointer)
    else:
        block = tl.load(pointer, mask=dim < DIM, other=0.0)
    return block


@triton.jit
def _store_tile(  # type: ignore[no-untyped-def]
    out_ptr, log_sum_ptr, mixed, total, peak, row, head, valid, num_rows, v_scale,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, BLOCK_DV)[None, :]
    place = row.to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    divisor = tl.where(total > 0.0, total, 1.0)  # a share may have seen nothing of a row
    if SPLIT:
        place += tl.program_id(2).to(tl.int64) * num_rows * (tl.num_programs(1) * GROUP)
        log_sum = tl.where(total > 0.0, peak + tl.log2(divisor), float("-inf"))
        tl.store(log_sum_ptr + place, log_sum, mask=valid)
        mixed = mixed / divisor[:, None]
    else:
        mixed = mixed * (v_scale / divisor)[:, None]
    target = out_ptr + place[:, None] * V_HEAD_DIM + dim
    tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dim < V_HEAD_DIM))


@triton.jit(do_not_specialize=["num_requests", "num_heads", "num_places", "num_splits"])
def _merge_splits(  # type: ignore[no-untyped-def]
    partial_ptr, log_sum_ptr, out_ptr, bounds_ptr, num_requests, num_heads, num_places, num_splits,
    v_scale, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Weigh the shares of one row and head by their sums; nobody has written those of padding."""
    place = tl.program_id(0).to(tl.int64)
    if place >= tl.load(bounds_ptr + num_requests).to(tl.int64) * num_heads:
        return
    dim = tl.arange(0, BLOCK_DV)
    inside = dim < V_HEAD_DIM
    # The first share holds position 0, which every row sees: its log-sum is finite.
    peak = tl.load(log_sum_ptr + place)
    total = 1.0
    mixed = tl.load(partial_ptr + place * V_HEAD_DIM + dim, mask=inside, other=0.0)
    for split in range(1, num_splits):
        at = place + split * num_places.to(tl.int64)
        log_sum = tl.load(log_sum_ptr + at)
        new_peak = tl.maximum(peak, log_sum)
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(log_sum - new_peak)
        share = tl.load(partial_ptr + at * V_HEAD_DIM + dim, mask=inside, other=0.0)
        mixed = mixed * shrink + share * weight
        total = total * shrink + weight
        peak = new_peak
    merged = mixed * (v_scale / total)
    tl.store(out_ptr + place * V_HEAD_DIM + dim, merged.to(out_ptr.dtype.element_ty), mask=inside)

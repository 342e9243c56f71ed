"""KV deviation in one Triton pass; formula and arguments in kv_deviation.py.

Memory-bound: the chosen rows of the fresh tensor and of the pool are read once, and nothing but one
float32 per token is written. A cached key is rotated in registers.
"""

# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from sgl_blend.kernels.delta_rope_triton import (
    load_pairs,
    load_rotation,
    pair_blocks,
    rotate_pairs,
    tail_offsets,
)
from sgl_blend.kernels.rounding import Rounding


def kv_deviation_at_triton(
    fresh: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor, bool] | None,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Launch the pass; arguments as kv_deviation_at, already checked."""
    num_tokens = rows.shape[0]
    _, num_heads, head_dim = fresh.shape
    out = torch.empty(num_tokens, dtype=torch.float32, device=fresh.device)
    if not num_tokens:
        return out
    cos, sin, neox = (out, out, True) if rotation is None else rotation
    share, half_bins = (out, out) if rounding is None else (rounding.share, rounding.half_bins)
    half = 0 if rotation is None else cos.shape[1]
    blocks = pair_blocks(num_heads, head_dim, half)
    _deviation[(triton.cdiv(num_tokens, blocks["BLOCK_T"]),)](
        fresh, rows, pool, slots, cos.contiguous(), sin.contiguous(), share, half_bins, out,
        num_tokens, fresh.stride(0), pool.stride(0),
        ROUNDED=rounding is not None, NEOX=neox,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HALF=half, **blocks, num_warps=4,
    )  # fmt: skip
    return out


# A probe compares a chunk inside longer lists of slots, which begin on 16 bytes every other time.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["row_ptr", "slot_ptr", "share_ptr"],
)
def _deviation(  # type: ignore[no-untyped-def]
    fresh_ptr, row_ptr, pool_ptr, slot_ptr, cos_ptr, sin_ptr, share_ptr, half_bin_ptr, out_ptr,
    num_tokens, fresh_stride, pool_stride,
    ROUNDED: tl.constexpr, NEOX: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < num_tokens
    row = tl.load(row_ptr + token, mask=valid, other=0)
    slot = tl.load(slot_ptr + token, mask=valid, other=0)
    fresh = fresh_ptr + row * fresh_stride  # [BLOCK_T]
    cached = pool_ptr + slot * pool_stride
    total = tl.zeros([BLOCK_T], tl.float32)
    if HALF > 0:
        cos, sin = load_rotation(cos_ptr, sin_ptr, token, valid, HALF, BLOCK_R)
        x, y = load_pairs(cached, valid, NEOX, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
        moved_x, moved_y = rotate_pairs(x, y, cos, sin)
        x, y = load_pairs(fresh, valid, NEOX, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
        total += _squared_distance(x, moved_x) + _squared_distance(y, moved_y)
    if 2 * HALF < HEAD_DIM:
        tail, mask = tail_offsets(valid, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_TAIL)
        new = tl.load(fresh[:, None, None] + tail, mask=mask, other=0.0)
        old = tl.load(cached[:, None, None] + tail, mask=mask, other=0.0)
        if ROUNDED:
            share = tl.load(share_ptr + token, mask=valid, other=0.0)
            explained = share[:, None, None] * tl.load(half_bin_ptr + tail, mask=mask, other=0.0)
            apart = tl.abs(new.to(tl.float32) - old.to(tl.float32)) - explained
            total += _squared_length(tl.maximum(apart, 0.0))
        else:
            total += _squared_distance(new, old)
    tl.store(out_ptr + token, total, mask=valid)


@triton.jit
def _squared_distance(new, old):  # type: ignore[no-untyped-def]
    return _squared_length(new.to(tl.float32) - old.to(tl.float32))


@triton.jit
def _squared_length(apart):  # type: ignore[no-untyped-def]
    return tl.sum(tl.sum(apart * apart, 2), 1)

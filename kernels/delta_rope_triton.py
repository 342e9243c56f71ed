"""Delta-RoPE copy of all layers in one Triton launch; formula and arguments in delta_rope.py.

Memory-bound: every row of K and V is read once and written once. A program moves a few tokens of one
layer. Programs that differ in the layer alone are neighbours, so a block of slots and of cos and sin
comes from memory for one layer and from L2 for the others.
"""

# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
FP8_LIMITS = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
_PAIRS_PER_PROGRAM = 2048
"""Pairs held in registers: 16 in each of 128 threads."""


def copy_rotated_layers_triton(
    addresses: torch.Tensor,
    layers: range,
    pools: tuple[torch.Tensor, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
    rotation: tuple[torch.Tensor, torch.Tensor],
    *,
    neox: bool,
) -> None:
    """Launch the copy; arguments have been checked.

    Args:
        addresses: int64 [num_layers, 2], where the K and V pools begin.
        layers: Which of them to copy in.
        pools: A K and a V pool, whose shape, strides and dtype stand for all.
        slots: Source and destination, int64 [num_tokens].
        rotation: cos and sin, float32 [num_tokens, rotary_dim / 2], contiguous.
        neox: Whether the halves of a head form the pairs.
    """
    (k, v), (source, dest), (cos, sin) = pools, slots, rotation
    num_tokens, half = cos.shape
    if not num_tokens or not layers:
        return
    blocks = copy_blocks(k.shape[1], k.shape[2], half, v.shape[2])
    _copy_rotated_layers[(len(layers) * triton.cdiv(num_tokens, blocks["BLOCK_T"]),)](
        addresses, source, dest, cos.contiguous(), sin.contiguous(),
        num_tokens, len(layers), layers.start, layers.step, k.stride(0), v.stride(0),
        DTYPE=TRITON_DTYPES[k.dtype], LIMIT=FP8_LIMITS.get(k.dtype, 0.0), NEOX=neox,
        NUM_HEADS=k.shape[1], HEAD_DIM=k.shape[2], HALF=half, V_WIDTH=v.shape[1] * v.shape[2],
        **blocks, num_warps=4,
    )  # fmt: skip


def copy_blocks(num_heads: int, head_dim: int, half: int, v_head_dim: int) -> dict[str, int]:
    """Return the block sizes for rows of this shape: powers of 2, a few tokens per program."""
    sizes = pair_blocks(num_heads, head_dim, half)
    return {**sizes, "BLOCK_V": triton.next_power_of_2(num_heads * v_head_dim)}


def pair_blocks(num_heads: int, head_dim: int, half: int) -> dict[str, int]:
    """Return the block sizes that cover the pairs of a head and the dimensions after them."""
    block_h = triton.next_power_of_2(num_heads)
    block_r = triton.next_power_of_2(max(half, 1))
    block_tail = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    pairs_per_token = block_h * max(block_r, block_tail // 2)
    return {
        "BLOCK_T": min(16, max(1, _PAIRS_PER_PROGRAM // pairs_per_token)),
        "BLOCK_H": block_h,
        "BLOCK_R": block_r,
        "BLOCK_TAIL": block_tail,
    }


# Slots are a part of a list and begin anywhere: a kernel that took note of that would be compiled again
# while requests wait.
@triton.jit(
    do_not_specialize=["num_tokens", "num_layers", "first_layer", "layer_step"],
    do_not_specialize_on_alignment=["source_ptr", "dest_ptr"],
)
def _copy_rotated_layers(  # type: ignore[no-untyped-def]
    address_ptr, source_ptr, dest_ptr, cos_ptr, sin_ptr,
    num_tokens, num_layers, first_layer, layer_step, k_stride, v_stride,
    DTYPE: tl.constexpr, LIMIT: tl.constexpr, NEOX: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    layer = first_layer + (program % num_layers) * layer_step
    token = (program // num_layers) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < num_tokens
    source = tl.load(source_ptr + token, mask=valid, other=0)
    dest = tl.load(dest_ptr + token, mask=valid, other=0)
    cos, sin = load_rotation(cos_ptr, sin_ptr, token, valid, HALF, BLOCK_R)

    k_pool = _pool_at(address_ptr + 2 * layer, DTYPE)
    k_from = k_pool + source * k_stride  # [BLOCK_T]
    k_to = k_pool + dest * k_stride
    x, y = load_pairs(k_from, valid, NEOX, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
    new_x, new_y = rotate_pairs(x, y, cos, sin)
    still = (cos == 1.0) & (sin == 0.0)
    new_x = tl.where(still, x, _round_to(new_x, DTYPE, LIMIT))
    new_y = tl.where(still, y, _round_to(new_y, DTYPE, LIMIT))
    _store_pairs(k_to, new_x, new_y, valid, NEOX, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
    if 2 * HALF < HEAD_DIM:
        tail, mask = tail_offsets(valid, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_TAIL)
        passed = tl.load(k_from[:, None, None] + tail, mask=mask, other=0.0)
        tl.store(k_to[:, None, None] + tail, passed, mask=mask)

    v_pool = _pool_at(address_ptr + 2 * layer + 1, DTYPE)
    column = tl.arange(0, BLOCK_V)[None, :]
    mask = valid[:, None] & (column < V_WIDTH)
    value = tl.load(v_pool + (source * v_stride)[:, None] + column, mask=mask, other=0.0)
    tl.store(v_pool + (dest * v_stride)[:, None] + column, value, mask=mask)


@triton.jit
def _pool_at(address_ptr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    # A pointer read from memory says nothing of its alignment; without the hint every access is as
    # narrow as one element.
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_rotation(  # type: ignore[no-untyped-def]
    cos_ptr, sin_ptr, token, valid, HALF: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Load cos and sin of some tokens, [BLOCK_T, 1, BLOCK_R], to be shared by the heads."""
    pair = tl.arange(0, BLOCK_R)[None, None, :]
    mask = valid[:, None, None] & (pair < HALF)
    offset = token.to(tl.int64)[:, None, None] * HALF + pair
    cos = tl.load(cos_ptr + offset, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + offset, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def rotate_pairs(x, y, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate pairs in float32."""
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    return wide_x * cos - wide_y * sin, wide_y * cos + wide_x * sin


@triton.jit
def load_pairs(  # type: ignore[no-untyped-def]
    row_ptr, valid,
    NEOX: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load both sides of the pairs of some rows, each [BLOCK_T, BLOCK_H, BLOCK_R], 0 where masked."""
    if NEOX:
        offset, mask = _half_offsets(valid, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
        x = tl.load(row_ptr[:, None, None] + offset, mask=mask, other=0.0)
        y = tl.load(row_ptr[:, None, None] + offset + HALF, mask=mask, other=0.0)
    else:
        offset, mask = _neighbour_offsets(valid, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
        both = tl.load(row_ptr[:, None, None] + offset, mask=mask, other=0.0)
        x, y = tl.split(tl.reshape(both, [both.shape[0], BLOCK_H, BLOCK_R, 2]))
    return x, y


@triton.jit
def _store_pairs(  # type: ignore[no-untyped-def]
    row_ptr, x, y, valid,
    NEOX: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    if NEOX:
        offset, mask = _half_offsets(valid, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
        tl.store(row_ptr[:, None, None] + offset, x, mask=mask)
        tl.store(row_ptr[:, None, None] + offset + HALF, y, mask=mask)
    else:
        offset, mask = _neighbour_offsets(valid, NUM_HEADS, HEAD_DIM, HALF, BLOCK_H, BLOCK_R)
        both = tl.reshape(tl.join(x, y), [x.shape[0], BLOCK_H, 2 * BLOCK_R])
        tl.store(row_ptr[:, None, None] + offset, both, mask=mask)


@triton.jit
def _half_offsets(  # type: ignore[no-untyped-def]
    valid,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H)[None, :, None]
    pair = tl.arange(0, BLOCK_R)[None, None, :]
    mask = valid[:, None, None] & (head < NUM_HEADS) & (pair < HALF)
    return head * HEAD_DIM + pair, mask


@triton.jit
def _neighbour_offsets(  # type: ignore[no-untyped-def]
    valid,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Both sides in one dimension: wide loads, taken apart in registers.
    head = tl.arange(0, BLOCK_H)[None, :, None]
    column = tl.arange(0, 2 * BLOCK_R)[None, None, :]
    mask = valid[:, None, None] & (head < NUM_HEADS) & (column < 2 * HALF)
    return head * HEAD_DIM + column, mask


@triton.jit
def tail_offsets(  # type: ignore[no-untyped-def]
    valid,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Offsets in a row of the dimensions that are not rotated, and their mask."""
    head = tl.arange(0, BLOCK_H)[None, :, None]
    beyond = tl.arange(0, BLOCK_TAIL)[None, None, :]
    mask = valid[:, None, None] & (head < NUM_HEADS) & (beyond < HEAD_DIM - 2 * HALF)
    return head * HEAD_DIM + 2 * HALF + beyond, mask


@triton.jit
def _round_to(wide, DTYPE: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if LIMIT > 0.0:
        wide = tl.clamp(wide, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return wide.to(DTYPE)

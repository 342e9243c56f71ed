"""Un-quantising in one Triton launch; formula and arguments in unquantise.py.

Memory-bound: packed bytes are read once, rows of the pool are written once. The scales of a layer are
few KB and come from the caches, and so does an anchor for the nine tokens after it. A program decodes
a few tokens, of one page or of two. V takes the path of NeoX keys without the rotation, so that both
halves of a byte are used where it is read.

enable_fp_fusion=False keeps one rounding an operation, as in the torch reference: bin * step + base
would be one fused operation else, and the last bit another. It holds in the machine code for sm_90
(tools/compile_kernels.py); the interpreter never fuses.
"""

# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from sgl_blend.kernels.bin_scales import ANCHOR_TOKENS, BinScales
from sgl_blend.kernels.delta_rope_triton import load_rotation, pair_blocks, rotate_pairs


def unquantise_triton(
    packed: torch.Tensor,
    scales: BinScales,
    rotation: tuple[torch.Tensor, torch.Tensor, bool] | None,
    slots: torch.Tensor,
    pool: torch.Tensor,
) -> None:
    """Launch the decoding; arguments as unquantise, already checked."""
    num_pages, page_tokens = slots.shape
    if not slots.numel():
        return
    num_heads, head_dim = scales.step.shape
    tables = [scales.step, scales.base, scales.low, scales.anchor_step]
    step, base, low, anchor_step = (table.contiguous() for table in tables)
    cos, sin, neox = (step, step, True) if rotation is None else rotation
    half = head_dim // 2 if rotation is None else cos.shape[-1]
    blocks = pair_blocks(num_heads, head_dim, half)
    _unquantise[(triton.cdiv(slots.numel(), blocks["BLOCK_T"]),)](
        packed, step, base, low, anchor_step, cos.contiguous(), sin.contiguous(),
        slots.contiguous(), pool, slots.numel(), page_tokens,
        packed.stride(0) if num_pages > 1 else 0, pool.stride(0),
        **constants(scales.bits, scales.has_anchors, rotation is not None, neox),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HALF=half, **blocks,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def constants(bits: int, has_anchors: bool, rotates: bool, neox: bool) -> dict[str, int | bool]:
    """Return what chooses the variant of the kernel, beside the shape."""
    anchor_tokens = ANCHOR_TOKENS if has_anchors else 0
    return {"BITS": bits, "ANCHOR_TOKENS": anchor_tokens, "ROTATES": rotates, "NEOX": neox}


# Slots are a part of a list and begin anywhere: a kernel that took note of that would be compiled again
# while requests wait.
@triton.jit(
    do_not_specialize=["num_tokens", "page_tokens"], do_not_specialize_on_alignment=["slot_ptr"]
)
def _unquantise(  # type: ignore[no-untyped-def]
    packed_ptr, step_ptr, base_ptr, low_ptr, anchor_step_ptr, cos_ptr, sin_ptr, slot_ptr, pool_ptr,
    num_tokens, page_tokens, page_stride, pool_stride,
    BITS: tl.constexpr, ANCHOR_TOKENS: tl.constexpr, ROTATES: tl.constexpr, NEOX: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < num_tokens
    slot = tl.load(slot_ptr + token, mask=valid, other=0)
    target = (pool_ptr + slot * pool_stride)[:, None, None]
    page = packed_ptr + (token // page_tokens).to(tl.int64) * page_stride
    own, anchor, is_other = _find_rows(
        page, token % page_tokens, page_tokens, NUM_HEADS * HEAD_DIM, BITS, ANCHOR_TOKENS
    )
    tables = (step_ptr, base_ptr, low_ptr, anchor_step_ptr)
    head = tl.arange(0, BLOCK_H)[None, :, None]
    some, others = valid[:, None, None], (valid & is_other)[:, None, None]

    if NEOX:
        column = tl.arange(0, BLOCK_R)[None, None, :]
        inside = (head < NUM_HEADS) & (column < HALF)
        x, y = _load_pair_bins(own, head, column, others & inside, BITS, HEAD_DIM, HALF)
        at = head * HEAD_DIM + column
        x = _decode(x, tables, anchor, some, others, at, inside, ANCHOR_TOKENS)
        y = _decode(y, tables, anchor, some, others, at + HALF, inside, ANCHOR_TOKENS)
        if ROTATES:
            cos, sin = load_rotation(cos_ptr, sin_ptr, token, valid, HALF, BLOCK_R)
            x, y = rotate_pairs(x, y, cos, sin)
        tl.store(target + at, x.to(pool_ptr.dtype.element_ty), mask=some & inside)
        tl.store(target + at + HALF, y.to(pool_ptr.dtype.element_ty), mask=some & inside)
    else:
        column = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        inside = (head < NUM_HEADS) & (column < 2 * HALF)
        both = _load_bins(own, head, column, others & inside, BITS, HEAD_DIM)
        at = head * HEAD_DIM + column
        both = _decode(both, tables, anchor, some, others, at, inside, ANCHOR_TOKENS)
        cos, sin = load_rotation(cos_ptr, sin_ptr, token, valid, HALF, BLOCK_R)
        x, y = tl.split(tl.reshape(both, [BLOCK_T, BLOCK_H, BLOCK_R, 2]))
        x, y = rotate_pairs(x, y, cos, sin)
        both = tl.reshape(tl.join(x, y), [BLOCK_T, BLOCK_H, 2 * BLOCK_R])
        tl.store(target + at, both.to(pool_ptr.dtype.element_ty), mask=some & inside)
    if 2 * HALF < HEAD_DIM:
        column = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]
        inside = (head < NUM_HEADS) & (column < HEAD_DIM)
        tail = _load_bins(own, head, column, others & inside, BITS, HEAD_DIM)
        at = head * HEAD_DIM + column
        tail = _decode(tail, tables, anchor, some, others, at, inside, ANCHOR_TOKENS)
        tl.store(target + at, tail.to(pool_ptr.dtype.element_ty), mask=some & inside)


@triton.jit
def _find_rows(  # type: ignore[no-untyped-def]
    page, place, page_tokens, WIDTH: tl.constexpr, BITS: tl.constexpr, ANCHOR_TOKENS: tl.constexpr
):
    """Return where tokens' own bins and their anchors begin, [BLOCK_T, 1, 1], and who is no anchor."""
    if ANCHOR_TOKENS > 0:
        group = place // ANCHOR_TOKENS
        num_anchors = (page_tokens + ANCHOR_TOKENS - 1) // ANCHOR_TOKENS
        anchor = page + group * WIDTH
        own = page + num_anchors * WIDTH + (place - group - 1) * (WIDTH * BITS // 8)
        is_other = place != group * ANCHOR_TOKENS
    else:
        own = page + place * (WIDTH * BITS // 8)
        anchor = own  # not read
        is_other = place >= 0
    return own[:, None, None], anchor[:, None, None], is_other


@triton.jit
def _load_pair_bins(  # type: ignore[no-untyped-def]
    row, head, pair, mask, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """Load the bins of both sides of the pairs that NeoX models rotate."""
    if BITS == 4 and 2 * HALF == HEAD_DIM:  # a pair is a byte
        both = tl.load(row + head * HALF + pair, mask=mask, other=0)
        x, y = both & 15, both >> 4
    else:
        x = _load_bins(row, head, pair, mask, BITS, HEAD_DIM)
        y = _load_bins(row, head, pair + HALF, mask, BITS, HEAD_DIM)
    return x, y


@triton.jit
def _load_bins(  # type: ignore[no-untyped-def]
    row, head, column, mask, BITS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Load the bins of some columns of the heads of some rows, [BLOCK_T, BLOCK_H, columns]."""
    if BITS == 8:
        bins = tl.load(row + head * HEAD_DIM + column, mask=mask, other=0)
    else:
        HALF_DIM: tl.constexpr = HEAD_DIM // 2
        at = row + head * HALF_DIM + column % HALF_DIM
        byte = tl.load(at, mask=mask, other=0)
        bins = tl.where(column < HALF_DIM, byte & 15, byte >> 4)
    return bins


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    bins, tables, anchor, some, others, at, inside, ANCHOR_TOKENS: tl.constexpr
):
    """Return the float32 values of some columns; at is where these stand in a row of the scales."""
    step_ptr, base_ptr, low_ptr, anchor_step_ptr = tables
    value = _scale(bins, step_ptr, base_ptr, at, inside)
    if ANCHOR_TOKENS > 0:
        byte = tl.load(anchor + at, mask=some & inside, other=0)
        decoded = _scale(byte, anchor_step_ptr, low_ptr, at, inside)
        value = tl.where(others, value + decoded, decoded)
    return value


@triton.jit
def _scale(bins, step_ptr, first_ptr, at, inside):  # type: ignore[no-untyped-def]
    step = tl.load(step_ptr + at, mask=inside, other=0.0)
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    return bins.to(tl.float32) * step + first

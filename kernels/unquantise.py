"""Un-quantise: packed bins of coded KV become the keys and values of paged slots.

    direct      x = bin * step + base
    anchors     tokens 0, 10, 20 ... of a page: a = byte * anchor_step + low
                the others:                     x = bin * step + base + a of the anchor before

The bins are those of sgl_blend/storage/codec/quantiser.py. Anchors stand before the others, in 8 bits.
Of 4 bits two share a byte: channel j of a head in the low half, channel j + dim / 2 in the high half.
Keys are stored unrotated and are turned here to where they are needed. One rounding an operation in
float32, and one more to the pool's dtype, so that the torch reference and the quantiser agree bit for
bit. The Triton kernel does so too, as long as no multiplication is fused with an addition; it is
compiled without such fusion.
"""

import torch

from sgl_blend.kernels.bin_scales import ANCHOR_TOKENS, BinScales, num_anchors
from sgl_blend.kernels.checks import check_rows, check_tensor

_POOLS = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT_BYTES = 16
Rotation = tuple[torch.Tensor, torch.Tensor, bool]


def unquantise(
    packed: torch.Tensor,
    scales: BinScales,
    rotation: Rotation | None,
    slots: torch.Tensor,
    pool: torch.Tensor,
) -> None:
    """Decode pages of equal length into slots of one layer's pool; one launch on CUDA.

    Args:
        packed: uint8 [pages, scales.num_bytes(tokens)], K or V of one layer. The bytes of a page are
            contiguous; on CUDA each page begins on 16 bytes.
        scales: Of this layer's K or V.
        rotation: cos, sin (float32 [pages, tokens, rotary_dim / 2]) and whether the style is NeoX:
            turns keys to their positions, dimensions beyond rotary_dim pass through. None for V.
        slots: int64 [pages, tokens], below num_slots and without repeats.
        pool: float32, float16 or bfloat16 [num_slots, heads, dim], one layer of the paged pool, whose
            rows are contiguous. Only the named slots are written.

    Raises:
        ValueError: A shape, dtype, stride or alignment does not fit.
    """
    _check(packed, scales, rotation, slots, pool)
    if not pool.is_cuda:
        _unquantise_torch(packed, scales, rotation, slots, pool)
        return
    check_alignment(packed)
    from sgl_blend.kernels.unquantise_triton import unquantise_triton

    unquantise_triton(packed, scales, rotation, slots, pool)


def _check(
    packed: torch.Tensor,
    scales: BinScales,
    rotation: Rotation | None,
    slots: torch.Tensor,
    pool: torch.Tensor,
) -> None:
    check_tensor("slots", slots, shape=(None, None), dtype=torch.int64)
    pages, tokens = slots.shape
    shape = (pages, scales.num_bytes(tokens))
    check_tensor("packed", packed, shape=shape, dtype=torch.uint8)
    check_rows("packed", packed)
    check_tensor("pool", pool, shape=(None, *scales.step.shape))
    check_rows("pool", pool)
    if pool.dtype not in _POOLS:
        raise ValueError(f"pool: expected float32, float16 or bfloat16, got {pool.dtype}")
    if rotation is not None:
        cos, sin, _ = rotation
        half, dim = cos.shape[-1], scales.step.shape[1]
        check_tensor("cos", cos, shape=(pages, tokens, half), dtype=torch.float32)
        check_tensor("sin", sin, shape=(pages, tokens, half), dtype=torch.float32)
        if 2 * half > dim:
            raise ValueError(f"cos: rotary_dim {2 * half} exceeds dim {dim} of the pool")


def check_alignment(packed: torch.Tensor) -> None:
    """Raise unless the Triton kernel can read packed pages widely and is compiled once.

    Raises:
        ValueError: A page does not begin on 16 bytes.
    """
    is_stepped = packed.shape[0] < 2 or packed.stride(0) % _ALIGNMENT_BYTES == 0
    if packed.data_ptr() % _ALIGNMENT_BYTES or not is_stepped:
        raise ValueError(f"packed: expected pages that begin on {_ALIGNMENT_BYTES} bytes")


def _unquantise_torch(
    packed: torch.Tensor,
    scales: BinScales,
    rotation: Rotation | None,
    slots: torch.Tensor,
    pool: torch.Tensor,
) -> None:
    values = _values(packed, scales, slots.shape[1])
    if rotation is not None:
        cos, sin, neox = rotation
        _turn(values, cos, sin, neox=neox)
    pool.index_copy_(0, slots.reshape(-1), values.flatten(0, 1).to(pool.dtype))


def _values(packed: torch.Tensor, scales: BinScales, tokens: int) -> torch.Tensor:
    """Return what packed bins stand for, float32 [pages, tokens, heads, dim]."""
    pages, (heads, dim) = packed.shape[0], scales.step.shape
    num = num_anchors(tokens) if scales.has_anchors else 0
    anchor_bytes, others = packed.tensor_split([num * heads * dim], dim=1)
    own = others.reshape(pages, tokens - num, heads, dim * scales.bits // 8)
    if scales.bits == 4:
        own = torch.cat([own & 15, own >> 4], dim=-1)
    values = own * scales.step + scales.base
    if not scales.has_anchors:
        return values
    anchors = anchor_bytes.reshape(pages, num, heads, dim) * scales.anchor_step + scales.low
    token = torch.arange(tokens, device=packed.device)
    is_other = token % ANCHOR_TOKENS != 0
    out = anchors[:, token // ANCHOR_TOKENS]
    out[:, is_other] += values
    return out


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool) -> None:
    """Rotate keys [pages, tokens, heads, dim] in place."""
    rotary = x[..., : 2 * cos.shape[-1]]
    a, b = rotary.tensor_split(2, dim=-1) if neox else (rotary[..., 0::2], rotary[..., 1::2])
    c, s = cos[:, :, None], sin[:, :, None]
    new_a, new_b = a * c - b * s, b * c + a * s
    a.copy_(new_a)
    b.copy_(new_b)

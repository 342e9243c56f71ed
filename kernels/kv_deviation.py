"""KV deviation: how far a token's cached KV is from its recomputed KV (CacheBlend §4.3).

    deviation[t] = sum over heads and dimensions of (fresh[t] - cached[t])^2

Measured on V it carries no position and so no rotation error; on K it must be taken after the
cached key was moved to its new position.

V that came in few bits differs from what it was by up to half a bin. Of each difference half a bin is
taken off then: what is left is what rounding does not explain.
"""

import torch

from sgl_blend.kernels.checks import check_rows, check_tensor
from sgl_blend.kernels.delta_rope import check_rotation, rotate_keys
from sgl_blend.kernels.rounding import Rounding


def kv_deviation(
    fresh: torch.Tensor, cached: torch.Tensor, rounding: Rounding | None = None
) -> torch.Tensor:
    """Squared L2 distance per token.

    Args:
        fresh: [num_tokens, num_kv_heads, head_dim], K or V just computed.
        cached: Same shape, K (already rotated) or V from the cache.
        rounding: What does not count of each difference; None if all of it does.

    Returns:
        float32 [num_tokens].

    Raises:
        ValueError: The shapes differ.
    """
    check_tensor("cached", cached, shape=tuple(fresh.shape))
    apart = fresh.float() - cached.float()
    if rounding is not None:
        explained = rounding.share[:, None, None] * rounding.half_bins
        apart = (apart.abs() - explained).clamp(min=0.0)
    return apart.square().flatten(1).sum(dim=1)


def in_units(squared: torch.Tensor, scale: float) -> torch.Tensor:
    """Return squared distances of stored values in the model's units.

    Args:
        squared: float32 [n], between values as they are stored.
        scale: What stored values are multiplied by to be the model's.
    """
    return squared if scale == 1.0 else squared * (scale * scale)


def kv_deviation_at(
    fresh: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor, bool] | None = None,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Squared L2 distance of chosen rows from chosen slots; one pass on CUDA, no gathered copies.

    Args:
        fresh: [num_rows, num_kv_heads, head_dim], K or V just computed; its rows are contiguous.
        rows: int64 [num_tokens], which rows of fresh.
        pool: [num_slots, num_kv_heads, head_dim], one layer of the paged pool; likewise.
        slots: int64 [num_tokens], which slot belongs to each row.
        rotation: cos, sin (float32 [num_tokens, rotary_dim / 2], from delta_rope_tables) and whether
            the style is NeoX: moves the cached key first, in float32. None for V.
        rounding: What does not count of each difference; not with a rotation, which mixes channels.

    Returns:
        float32 [num_tokens].

    Raises:
        ValueError: A shape, dtype or stride does not fit.
    """
    num_tokens, (_, num_heads, head_dim) = rows.shape[0], fresh.shape
    check_tensor("rows", rows, shape=(num_tokens,), dtype=torch.int64)
    check_tensor("slots", slots, shape=(num_tokens,), dtype=torch.int64)
    check_tensor("pool", pool, shape=(None, num_heads, head_dim))
    if rotation is not None:
        check_rotation(rotation[0], rotation[1], num_tokens, head_dim)
    if rounding is not None:
        if rotation is not None:
            raise ValueError("rounding: expected None with a rotation")
        check_tensor("share", rounding.share, shape=(num_tokens,), dtype=torch.float32)
        shape = (num_heads, head_dim)
        check_tensor("half_bins", rounding.half_bins, shape=shape, dtype=torch.float32)
    if not fresh.is_cuda:
        return _kv_deviation_at_torch(fresh, rows, pool, slots, rotation, rounding)
    check_rows("fresh", fresh)
    check_rows("pool", pool)
    from sgl_blend.kernels.kv_deviation_triton import kv_deviation_at_triton

    return kv_deviation_at_triton(fresh, rows, pool, slots, rotation, rounding)


def _kv_deviation_at_torch(
    fresh: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor, bool] | None,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    cached = pool[slots].float()
    if rotation is not None:
        cos, sin, neox = rotation
        cached = rotate_keys(cached, cos, sin, neox=neox)
    return kv_deviation(fresh[rows], cached, rounding)

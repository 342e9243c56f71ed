"""Scales, transforms and distributions of a model's KV, from pages of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_blend.storage.codec.entropy import PROBABILITY_BITS
from sgl_blend.storage.codec.levels import (
    CodecProfile,
    Level,
    Transform,
    UnitScales,
)
from sgl_blend.storage.codec.quantiser import UnitCode, bins_of, encode_unit, make_unit_code
from sgl_blend.storage.frames import deflate_symbols

_LEAST_SIGMA = 1e-6
_UNSEEN = 0.02
"""Counted for every bin of every channel, so that bins which no page shows can be coded."""

Unit = Sequence[torch.Tensor]
"""K or V of one layer of many pages: each float32 [tokens, heads, dim], keys before their rotation."""


def measure_scales(unit: Unit) -> UnitScales:
    """Measure what rounding needs to know of one (layer, K/V)."""
    whole = torch.cat(list(unit)).double()
    low, high = whole.amin(0), whole.amax(0)
    margin = (high - low) / 16  # other pages reach beyond
    sigma = whole.std(0, correction=0).clamp(min=_LEAST_SIGMA)
    return UnitScales(*map(_row, (whole.mean(0), sigma, low - margin, high + margin)))


def choose_transform(
    profile: CodecProfile, level: Level, index: int, unit: Unit
) -> tuple[Transform, dict[Transform, float]]:
    """Return the transform that makes a unit smallest, and the bits per element of each.

    Pages are compressed one by one, as they are stored: what repeats between them helps neither.
    """
    elements = sum(page.numel() for page in unit)
    bits = {}
    for transform in Transform:
        code = make_unit_code(profile, level, index, transform, slice(None))
        packed = [encode_unit(page, code)[0] for page in unit]
        num_bytes = sum(len(deflate_symbols(page.numpy().data)) for page in packed)
        bits[transform] = 8 * num_bytes / elements
    return min(bits, key=lambda transform: bits[transform]), bits


def count_bins(code: UnitCode, unit: Unit) -> tuple[torch.Tensor, int]:
    """Count the bins of each channel: float64 [heads, dim, bins], and the clipped values."""
    heads, dim = code.step.shape
    counts = torch.zeros(heads * dim, 2 * code.level.most + 1, dtype=torch.float64)
    clipped = 0
    for page in unit:
        packed, beyond = encode_unit(page, code)
        clipped += beyond
        bins = bins_of(packed[code.num_anchor_bytes(len(page)) :], code).long()
        flat = bins.reshape(-1, heads * dim).T
        counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float64))
    return counts.view(heads, dim, -1), clipped


def probabilities(counts: torch.Tensor) -> bytes:
    """Return distributions by counts: uint16, as LevelFigures holds them."""
    shares = counts + _UNSEEN
    shares /= shares.sum(-1, keepdim=True)
    most = (1 << PROBABILITY_BITS) - 1
    return (shares * most).round().clamp(min=1).numpy().astype("<u2").tobytes()


def ideal_bits(counts: torch.Tensor, trained: torch.Tensor) -> float:
    """Return the bits that ideal arithmetic coding takes for counted bins.

    Args:
        counts: Of the pages that are coded, float64 [heads, dim, bins].
        trained: Of the pages that gave the distributions, the same shape.
    """
    shares = trained + _UNSEEN
    shares /= shares.sum(-1, keepdim=True)
    return float(-(counts * shares.log2()).sum())


def _row(values: torch.Tensor) -> bytes:
    return values.reshape(-1).numpy().astype("<f4").tobytes()

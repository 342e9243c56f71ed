"""Round K or V of one layer to bins and back, in torch.

    direct      q = round((x - mean) / step)
    anchors     tokens 0, 10, 20 ...: a = round((x - low) / anchor_step), in 8 bits
                the others:           q = round((x - anchor as decoded) / step)

q is clipped to [-most, most] and written as q + most. Of 4 bits two share a byte: channel j of a head
in the low half, channel j + dim/2 in the high half. Those are the pairs that neox models rotate.

All arithmetic is float32, one rounding an operation, so that other implementations can agree bit for
bit (kernels/unquantise.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_blend.storage.codec.levels import (
    ANCHOR_BITS,
    ANCHOR_TOKENS,
    CodecProfile,
    Level,
    Transform,
    floats,
)

_MOST_ANCHOR = (1 << ANCHOR_BITS) - 1


@dataclass(frozen=True, slots=True)
class UnitCode:
    """How K or V of one layer is rounded; tensors are float32 [heads, dim].

    Attributes:
        transform: What is rounded.
        level: Its bits and its outermost bin.
        step: Width of a bin.
        base: What bin -most stands for: mean - most * step, or -most * step for differences.
        mean: Of a channel; zeros for differences.
        low: What anchor 0 stands for.
        anchor_step: Width of an anchor's bin.
    """

    transform: Transform
    level: Level
    step: torch.Tensor
    base: torch.Tensor
    mean: torch.Tensor
    low: torch.Tensor
    anchor_step: torch.Tensor

    def num_bytes(self, tokens: int) -> int:
        """Return the packed bytes of so many tokens."""
        heads, dim = self.step.shape
        each = heads * dim * self.level.bits // 8
        if self.transform is Transform.DIRECT:
            return tokens * each
        anchors = num_anchors(tokens)
        return anchors * heads * dim + (tokens - anchors) * each

    def num_anchor_bytes(self, tokens: int) -> int:
        """Return how many of the packed bytes are anchors; they come first."""
        if self.transform is Transform.DIRECT:
            return 0
        return num_anchors(tokens) * self.step.numel()


def num_anchors(tokens: int) -> int:
    """Return how many of so many tokens are anchors."""
    return -(-tokens // ANCHOR_TOKENS)


def make_unit_code(
    profile: CodecProfile, level: Level, index: int, transform: Transform, heads: slice
) -> UnitCode:
    """Make the code of one (layer, K/V) for the KV heads of one rank.

    Args:
        profile: Of the model.
        level: Of coding.
        index: 2 * layer, one more for V.
        transform: What is rounded.
        heads: KV heads of this rank.
    """
    scales = profile.units[index]

    def row(data: bytes) -> torch.Tensor:
        whole = torch.from_numpy(floats(data)).view(profile.heads, profile.dim)
        return whole[heads].contiguous()

    # Differences are rounded as finely as values are: transforms differ in size, not in error.
    step = row(scales.sigma) * level.bin_of(index // 2, profile.layers)
    mean = row(scales.mean) if transform is Transform.DIRECT else torch.zeros_like(step)
    low = row(scales.low)
    anchor_step = ((row(scales.high) - low) / _MOST_ANCHOR).clamp_(min=torch.finfo(step.dtype).tiny)
    return UnitCode(transform, level, step, mean - level.most * step, mean, low, anchor_step)


def stack_codes(codes: Sequence[UnitCode]) -> UnitCode:
    """Make one code of those of neighbours, none of differences: tables [units, 1, heads, dim]."""
    level = codes[0].level
    rows = [
        torch.stack([getattr(code, name) for code in codes])[:, None]
        for name in ("step", "base", "mean", "low", "anchor_step")
    ]
    return UnitCode(Transform.DIRECT, level, *rows)


def encode_unit(x: torch.Tensor, code: UnitCode) -> tuple[torch.Tensor, int]:
    """Round a unit, or several whose codes are stacked.

    Args:
        x: float32 [tokens, heads, dim], finite; of several [units, tokens, heads, dim].
        code: Of the unit.

    Returns:
        The packed bins, uint8 [code.num_bytes(tokens)], and how many values were clipped.
    """
    most = code.level.most
    if code.transform is Transform.DIRECT:
        return encode_over(x.clone(), code)
    anchors = ((x[::ANCHOR_TOKENS] - code.low) / code.anchor_step).round_()
    anchors = anchors.clamp_(0, _MOST_ANCHOR)
    decoded = anchors * code.anchor_step + code.low
    others = _is_other(len(x))
    owners = torch.arange(len(x))[others] // ANCHOR_TOKENS
    bins, clipped = _bins((x[others] - decoded[owners]).div_(code.step), most)
    packed = _packed(bins, code.level.bits)
    return torch.cat([anchors.to(torch.uint8).reshape(-1), packed.reshape(-1)]), clipped


def encode_over(x: torch.Tensor, code: UnitCode) -> tuple[torch.Tensor, int]:
    """Round units, none of differences, as encode_unit does; x is overwritten."""
    bins, clipped = _bins(x.sub_(code.mean).div_(code.step), code.level.most)
    return _packed(bins, code.level.bits).reshape(-1), clipped


def decode_unit(data: torch.Tensor, code: UnitCode, tokens: int) -> torch.Tensor:
    """Return what packed bins stand for, float32 [tokens, heads, dim].

    Args:
        data: uint8 [code.num_bytes(tokens)].
        code: Of the unit.
        tokens: Of the unit.
    """
    heads, dim = code.step.shape[-2:]
    width = dim * code.level.bits // 8
    if code.transform is Transform.DIRECT:
        return _values(data.view(*data.shape[:-1], tokens, heads, width), code)
    num = num_anchors(tokens)
    anchors = data[: num * heads * dim].view(num, heads, dim) * code.anchor_step
    anchors += code.low
    out = torch.empty(tokens, heads, dim)
    out[::ANCHOR_TOKENS] = anchors
    others = _is_other(tokens)
    owners = torch.arange(tokens)[others] // ANCHOR_TOKENS
    deltas = _values(data[num * heads * dim :].view(tokens - num, heads, width), code)
    out[others] = deltas.add_(anchors[owners])
    return out


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Rotate keys.

    Args:
        x: float32 [tokens, heads, dim]; dimensions beyond the rotated ones pass through.
        cos: float32 [tokens, rotary_dim / 2].
        sin: float32, the same shape.
        neox: Whether the halves of a head form the pairs, or neighbours.

    Returns:
        float32 [tokens, heads, dim].
    """
    out = torch.empty_like(x)
    turn_into(out, x.clone(), cos, sin, neox=neox)
    return out


def turn_into(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool
) -> None:
    """Rotate keys; as turn, but for memory.

    Args:
        out: Filled with the rotated keys, float32 [..., tokens, heads, dim].
        x: The keys, the same shape. They are overwritten.
        cos: As for turn.
        sin: As for turn.
        neox: As for turn.
    """
    half = cos.shape[1]
    if neox and 2 * half == x.shape[-1]:
        # Whole heads are multiplied at once: a - b is a + -b in every bit, and long rows are faster.
        torch.mul(x, torch.cat([cos, cos], -1)[:, None], out=out)
        x *= torch.cat([sin, -sin], -1)[:, None]
        out[..., :half] += x[..., half:]
        out[..., half:] += x[..., :half]
        return
    if neox:
        first, second = (slice(0, half), slice(half, 2 * half))
    else:
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = x[..., first], x[..., second]
    c, s = cos[:, None], sin[:, None]
    torch.mul(a, c, out=out[..., first])
    out[..., first] -= b * s
    torch.mul(b, c, out=out[..., second])
    out[..., second] += a * s
    out[..., 2 * half :] = x[..., 2 * half :]


def bins_of(packed: torch.Tensor, code: UnitCode) -> torch.Tensor:
    """Return the bins of a unit, uint8 [tokens that are no anchors, heads, dim].

    Args:
        packed: Its bytes after the anchors.
        code: Of the unit.
    """
    heads, dim = code.step.shape
    packed = packed.view(-1, heads, dim * code.level.bits // 8)
    return packed if code.level.bits == 8 else torch.cat([packed & 15, packed >> 4], dim=-1)


def pack_bins(bins: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo bins_of: uint8 [tokens, heads, dim] to [tokens, heads, dim * bits / 8]."""
    return _packed(bins, bits)


def _is_other(tokens: int) -> torch.Tensor:
    return torch.arange(tokens) % ANCHOR_TOKENS != 0


def _bins(scaled: torch.Tensor, most: int) -> tuple[torch.Tensor, int]:
    rounded, clipped = scaled.round_(), 0
    if not _is_within(rounded, most):  # few units of most models
        kept = rounded.clamp(-most, most)
        # Whole numbers: each clipped value is at least 1 away. Comparing them would be slower.
        clipped = int((rounded - kept).abs_().clamp_(max=1).sum())
        rounded = kept
    # Torch has vector instructions for int8, not for uint8. Both wrap around in the same way.
    return rounded.to(torch.int8).view(torch.uint8).add_(most), clipped


def _is_within(values: torch.Tensor, most: int) -> bool:
    """Tell whether all values are numbers from -most to most; NaN spreads to both bounds."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return -most <= float(low) and float(high) <= most


def _packed(bins: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return bins
    half = bins.shape[-1] // 2
    return torch.add(bins[..., :half], bins[..., half:], alpha=16)


def _values(packed: torch.Tensor, code: UnitCode) -> torch.Tensor:
    """Return what bins stand for, float32 [tokens, heads, dim]."""
    if code.level.bits == 8:
        return (packed * code.step).add_(code.base)
    bins = torch.cat([packed & 15, packed >> 4], -1)
    return bins.float().mul_(code.step).add_(code.base)

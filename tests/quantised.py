"""Units that the quantiser has coded, for tests of what undoes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sgl_blend.kernels.bin_scales import BinScales
from sgl_blend.kernels.unquantise import Rotation
from sgl_blend.storage.codec.levels import LEVELS, Level, Transform
from sgl_blend.storage.codec.quantiser import UnitCode, encode_unit

TRANSFORMS = list(Transform)
LEVEL_OF_BITS = {level.bits: level for level in (LEVELS["q8"], LEVELS["q4"])}
TOKEN_COUNTS = [1, 9, 10, 11, 16, 64]


@dataclass(frozen=True)
class Unit:
    """Pages of K or V of one layer as they are stored, and where they go.

    Attributes:
        code: The quantiser's.
        packed: uint8 [pages, bytes], with space between two pages.
        rotation: cos, sin [pages, tokens, half] and style; None for V.
        slots: int64 [pages, tokens]; never 0, where a mask that is missing would write.
        pool: [num_slots, heads, dim], with space between two slots.
    """

    code: UnitCode
    packed: torch.Tensor
    rotation: Rotation | None
    slots: torch.Tensor
    pool: torch.Tensor

    @property
    def scales(self) -> BinScales:
        code = self.code
        has_anchors = code.transform is Transform.ANCHORS
        tables = code.step, code.base, code.low, code.anchor_step
        return BinScales(*tables, bits=code.level.bits, has_anchors=has_anchors)

    def fresh_pool(self) -> torch.Tensor:
        """Return a copy of the pool; torch.clone would drop the space between two slots."""
        pool = torch.empty_strided(self.pool.shape, self.pool.stride(), dtype=self.pool.dtype)
        return pool.copy_(self.pool)


def make_code(level: Level, transform: Transform, heads: int, dim: int) -> UnitCode:
    """Make a code whose scales are no round numbers."""
    mean, low = torch.randn(2, heads, dim)
    step, anchor_step = torch.rand(2, heads, dim) * 0.1 + 0.01
    if transform is Transform.ANCHORS:
        mean = torch.zeros(heads, dim)
    return UnitCode(transform, level, step, mean - level.most * step, mean, low, anchor_step)


def make_unit(
    bits: int,
    transform: Transform,
    shape: tuple[int, int, int, int],
    *,
    rotary: int | None,
    neox: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Unit:
    """Code random KV.

    Args:
        bits: Of a bin.
        transform: What is rounded.
        shape: Pages, tokens of a page, heads, dim.
        rotary: Dimensions that are rotated; None for V.
        neox: Which pairs.
        dtype: Of the pool.
    """
    pages, tokens, heads, dim = shape
    code = make_code(LEVEL_OF_BITS[bits], transform, heads, dim)
    size = code.num_bytes(tokens)
    apart = torch.randint(0, 256, (pages, (size // 16 + 2) * 16)).to(torch.uint8)
    for page in apart:
        page[:size] = encode_unit(torch.randn(tokens, heads, dim), code)[0]
    rotation = None
    if rotary is not None:
        angle = torch.rand(pages, tokens, rotary // 2) * 2 * math.pi
        rotation = angle.cos(), angle.sin(), neox
    num_slots = 2 * pages * tokens + 3
    slots = 1 + torch.randperm(num_slots - 1)[: pages * tokens].view(pages, tokens)
    rows = torch.randn(num_slots, heads * dim + 16).to(dtype)
    pool = rows[:, : heads * dim].view(num_slots, heads, dim)
    return Unit(code, apart[:, :size], rotation, slots, pool)

"""Code the pages of one rank of one model at one level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from sgl_blend.kernels.delta_rope import delta_rope_tables
from sgl_blend.storage.codec.entropy import (
    ArithmeticCoder,
    EntropyCoder,
    ZstdCoder,
    probabilities_of,
)
from sgl_blend.storage.codec.levels import LEVELS, CodecProfile, Entropy, Transform
from sgl_blend.storage.codec.quantiser import (
    decode_unit,
    encode_unit,
    make_unit_code,
    turn,
)
from sgl_blend.storage.container import FRAME_BYTES, PageFormat

Coded: TypeAlias = tuple[bytes, int] | None
"""A frame and how many of its values were clipped."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a model rotates its keys.

    Attributes:
        table: Cosines, then sines, in host memory: [positions, rotary_dim].
        neox: Whether the halves of a head form the pairs, or neighbours.
    """

    table: torch.Tensor
    neox: bool

    def tables(self, first: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that rotate keys to positions from ``first`` on.

        Returns:
            Each float32 [tokens, rotary_dim / 2]. A scale that a YaRN table carries is left out: a key
            carries it already.
        """
        positions = torch.arange(first, first + tokens)
        return delta_rope_tables(self.table, torch.zeros_like(positions), positions)


class PageCoder(Protocol):
    """Codes the pages of one rank of one model; see Coder."""

    @property
    def frames(self) -> list[int]:
        """How many (layer, K/V) each frame of a page holds."""

    def knows(self, position: int) -> bool:
        """Tell whether keys can be rotated to the positions of a page."""

    def encode(self, page: torch.Tensor, first: int, count: int, position: int) -> Coded:
        """Code neighbouring units of a page."""

    def decode(
        self, data: memoryview, page: torch.Tensor, first: int, count: int, position: int
    ) -> bool:
        """Put neighbouring units into a page; return whether the frame holds just these."""


class Coder:
    """Rounds pages, and codes what is left. Safe to use from many threads.

    Args:
        profile: Of the model.
        level: Name of a level that is in it.
        form: Of the pages of this rank.
        rotation: Of the model's keys.
        first_head: First KV head of this rank.

    Attributes:
        level: Its name.
        profile: Digest of the profile.
        frames: How many (layer, K/V) each frame of a page holds.
    """

    def __init__(
        self,
        profile: CodecProfile,
        level: str,
        form: PageFormat,
        rotation: Rotation,
        first_head: int = 0,
    ) -> None:
        self.level = level
        self.profile = profile.digest()
        self._form = form
        self._rotation = rotation
        self._dtype: torch.dtype = getattr(torch, form.dtype)
        figures, rounding = profile.levels[level], LEVELS[level]
        heads = slice(first_head, first_head + form.heads)
        self.codes = [
            make_unit_code(profile, rounding, index, Transform(transform), heads)
            for index, transform in enumerate(figures.transforms)
        ]
        self._entropy: EntropyCoder = ZstdCoder()
        if profile.entropy == Entropy.ARITHMETIC:
            tables = probabilities_of(profile, rounding, figures)
            self._entropy = ArithmeticCoder(self.codes, tables[:, heads], form.tokens)
        self.sizes = [code.num_bytes(form.tokens) for code in self.codes]
        self.frames = _frames_of(self.sizes)

    def knows(self, position: int) -> bool:
        """Tell whether keys can be rotated to the positions of a page."""
        return 0 <= position <= len(self._rotation.table) - self._form.tokens

    def encode(self, page: torch.Tensor, first: int, count: int, position: int) -> Coded:
        """Code neighbouring units of a page.

        Args:
            page: Of the model's dtype, [2, layers, tokens, heads, dim].
            first: The first unit.
            count: How many.
            position: Of the page's first token.

        Returns:
            The frame; None if a value is not finite, which no bin stands for.
        """
        cos, sin = self._rotation.tables(position, self._form.tokens)
        packed, clipped = [], 0
        for index in range(first, first + count):
            layer, kind = divmod(index, 2)
            unit = page[kind, layer].float()
            if not bool(torch.isfinite(unit).all()):
                return None
            if kind == 0:
                unit = turn(unit, cos, -sin, neox=self._rotation.neox)
            made, beyond = encode_unit(unit, self.codes[index])
            packed.append(made)
            clipped += beyond
        return self._entropy.encode(packed, first), clipped

    def decode(
        self, data: memoryview, page: torch.Tensor, first: int, count: int, position: int
    ) -> bool:
        """Put neighbouring units into a page; arguments as encode.

        Returns:
            Whether the frame holds just these units.
        """
        sizes = self.sizes[first : first + count]
        packed = self._entropy.decode(data, sizes, first)
        if packed is None:
            return False
        cos, sin = self._rotation.tables(position, self._form.tokens)
        begin = 0
        for index, size in zip(range(first, first + count), sizes, strict=True):
            layer, kind = divmod(index, 2)
            unit = decode_unit(packed[begin : begin + size], self.codes[index], self._form.tokens)
            if kind == 0:
                unit = turn(unit, cos, sin, neox=self._rotation.neox)
            page[kind, layer] = unit.to(self._dtype)
            begin += size
        return True


def _frames_of(sizes: Sequence[int]) -> list[int]:
    """Let neighbours share a frame until it holds FRAME_BYTES of packed bins."""
    frames, held = [], FRAME_BYTES
    for size in sizes:
        if held >= FRAME_BYTES:
            frames.append(0)
            held = 0
        frames[-1] += 1
        held += size
    return frames

"""Code the pages of one rank of one model at one level."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.errors import ConfigError
from sgl_blend.kernels.delta_rope import delta_rope_tables
from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.entropy import (
    ArithmeticCoder,
    EntropyCoder,
    ZstdCoder,
    probabilities_of,
)
from sgl_blend.storage.codec.levels import LEVELS, CodecProfile, Entropy, Transform
from sgl_blend.storage.codec.quantiser import (
    UnitCode,
    decode_unit,
    encode_over,
    encode_unit,
    make_unit_code,
    stack_codes,
    turn_into,
)
from sgl_blend.storage.container import FRAME_BYTES, PageFormat

Coded: TypeAlias = tuple[bytes, int] | None
"""A frame and how many of its values were clipped."""

_SIGNED = {2: torch.int16, 4: torch.int32}
_MOST_TURNS = 512
"""Of so many pages the tables are kept that rotate their keys; 8 KB each for 16 tokens of 128."""


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
            Each float32 [tokens, rotary_dim / 2], contiguous. A scale that a YaRN table carries is left
            out: a key carries it already.
        """
        positions = torch.arange(first, first + tokens)
        cos, sin = delta_rope_tables(self.table, torch.zeros_like(positions), positions)
        return cos.contiguous(), sin.contiguous()


class PageCoder(Protocol):
    """Codes the pages of one rank of one model; see Coder."""

    @property
    def frames(self) -> list[int]:
        """How many (layer, K/V) each frame of a page holds."""

    def takes(self, position: int) -> bool:
        """Tell whether keys can be rotated back from the positions of a page."""

    def knows(self, position: int) -> bool:
        """Tell whether pages of these positions can be decoded."""

    def encode(self, page: torch.Tensor, first: int, count: int, position: int) -> Coded:
        """Code neighbouring units of a page."""

    def decode(
        self, frames: Sequence[memoryview], page: bytearray, first: int, position: int
    ) -> bool:
        """Put the units of neighbouring frames into a page; return whether they hold just these."""


class Coder:
    """Rounds pages, and codes what is left. Safe to use from many threads.

    Args:
        profile: Of the model.
        level: Name of a level that is in it.
        form: Of the pages of this rank.
        rotation: Of the model's keys.
        first_head: First KV head of this rank.

    Raises:
        ConfigError: The profile is of a model of another shape.

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
        own, known = (form.layers, form.dim), (profile.layers, profile.dim)
        if own != known or first_head + form.heads > profile.heads:
            raise ConfigError(
                f"--blend-store-profile is of {profile.layers} layers of {profile.heads} KV heads of "
                f"{profile.dim} values, the model has {form.layers} of {form.heads} of {form.dim}"
            )
        self.level = level
        self.profile = profile.digest()
        self._form = form
        self._rotation = rotation
        figures, rounding = profile.levels[level], LEVELS[level]
        heads = slice(first_head, first_head + form.heads)
        self.codes = [
            make_unit_code(profile, rounding, index, Transform(transform), heads)
            for index, transform in enumerate(figures.transforms)
        ]
        self._turns: dict[int, fast.Turn] = {}
        self._together: dict[int, UnitCode] = {}
        self._is_for_fast = fast.takes(
            self.codes[0], form.dtype, rotation.table.shape[1], neox=rotation.neox
        )
        self._tables = fast.tables_of(self.codes)
        self._entropy: EntropyCoder = ZstdCoder()
        if profile.entropy == Entropy.ARITHMETIC:
            tables = probabilities_of(profile, rounding, figures)
            self._entropy = ArithmeticCoder(self.codes, tables[:, heads], form.tokens)
        self.sizes = [code.num_bytes(form.tokens) for code in self.codes]
        self.frames = _frames_of(self.sizes)
        self._firsts = list(itertools.accumulate(self.frames, initial=0))
        self._sizes = [self.sizes[a:b] for a, b in itertools.pairwise(self._firsts)]
        for begin, end in itertools.pairwise(self._firsts):
            codes = self.codes[begin:end]
            if all(code.transform is Transform.DIRECT for code in codes):
                self._together[begin] = stack_codes(codes)

    def _turn(self, position: int) -> fast.Turn:
        """Return what rotates the keys of a page.

        All of its frames ask for the same, and pages of other chunks stand at the same positions.
        """
        found = self._turns.get(position)
        if found is None:
            cos, sin = self._rotation.tables(position, self._form.tokens)
            found = cos.numpy(), sin.numpy()
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            self._turns[position] = found
        return found

    def takes(self, position: int) -> bool:
        """Tell whether keys can be rotated back from the positions of a page."""
        return self.knows(position)

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
        rotation, sizes = self._rotation, self.sizes[first : first + count]
        together = self._together.get(first)
        if together is not None and self._is_for_fast and fast.is_available():
            tables = fast.Tables(*(table[first : first + count] for table in self._tables))
            turned = self._turn(position)
            made = fast.encode(_bits_of(page), tables, turned, first, together.level, self._form)
            if made is not None:
                return self._entropy.encode(made[0], sizes, first), made[1]
        end = first + count
        keys = page[0, (first + 1) // 2 : (end + 1) // 2].to(torch.float32, copy=True)
        values = page[1, first // 2 : end // 2]
        if not (_is_finite(keys) and _is_finite(values)):
            return None
        units = torch.empty(count, *page.shape[2:])
        if len(values):
            units[1 - first % 2 :: 2] = values
        if len(keys):
            cos, sin = map(torch.from_numpy, self._turn(position))
            turn_into(units[first % 2 :: 2], keys, cos, -sin, neox=rotation.neox)
        if together is not None:
            packed, clipped = encode_over(units, together)
            return self._entropy.encode(packed.numpy(), sizes, first), clipped
        parts, clipped = [], 0
        for unit, code in zip(units, self.codes[first : first + count], strict=True):
            part, beyond = encode_unit(unit, code)
            parts.append(part)
            clipped += beyond
        return self._entropy.encode(torch.cat(parts).numpy(), sizes, first), clipped

    def decode(
        self, frames: Sequence[memoryview], page: bytearray, first: int, position: int
    ) -> bool:
        """Put the units of neighbouring frames into a page.

        Args:
            frames: Their bytes.
            page: The bytes of [K/V, layer, token, head, channel]; the units are filled.
            first: Which frame of the page the first one is.
            position: Of the page's first token.

        Returns:
            Whether the frames hold just these units.
        """
        last = first + len(frames)
        firsts, parts = self._firsts[first:last], []
        for frame, sizes, begin in zip(frames, self._sizes[first:last], firsts, strict=True):
            made = self._entropy.decode(frame, sizes, begin)
            if made is None:
                return False
            parts.append(made)
        form, begin, end = self._form, self._firsts[first], self._firsts[last]
        if self._can_decode(firsts):
            tables = fast.Tables(*(table[begin:end] for table in self._tables))
            packed = np.frombuffer(bytearray().join(parts), np.uint8)
            fast.decode(packed, tables, self._turn(position), begin, page, form)
            return True
        values = torch.frombuffer(page, dtype=getattr(torch, form.dtype)).view(form.shape)
        for made, begin, count in zip(parts, firsts, self.frames[first:last], strict=True):
            self._put(made, values, begin, count, position)
        return True

    def _can_decode(self, firsts: Sequence[int]) -> bool:
        """Tell whether frames that begin with these units are decoded by numba."""
        return (
            self._is_for_fast
            and LEVELS[self.level].bits == 4
            and all(first in self._together for first in firsts)
            and fast.is_available()
        )

    def _put(self, made: bytes, page: torch.Tensor, first: int, count: int, position: int) -> None:
        """Put neighbouring units into a page by torch."""
        packed = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        tokens, neox = self._form.tokens, self._rotation.neox
        if (together := self._together.get(first)) is not None:
            units = decode_unit(packed.view(count, -1), together, tokens)
        else:
            codes = self.codes[first : first + count]
            parts = torch.split(packed, self.sizes[first : first + count])
            units = torch.stack(
                [decode_unit(part, code, tokens) for part, code in zip(parts, codes, strict=True)]
            )
        keys = page[0, (first + 1) // 2 : (first + count + 1) // 2]
        values = page[1, first // 2 : (first + count) // 2]
        if len(values):
            values.copy_(units[1 - first % 2 :: 2])
        if len(keys):
            cos, sin = map(torch.from_numpy, self._turn(position))
            turned = torch.empty(keys.shape)
            turn_into(turned, units[first % 2 :: 2], cos, sin, neox=neox)
            keys.copy_(turned)


def _bits_of(page: torch.Tensor) -> NDArray[Any]:
    """View values as integers of their size."""
    bits: NDArray[Any] = page.view(_SIGNED[page.element_size()]).numpy()
    return bits


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


def _is_finite(values: torch.Tensor) -> bool:
    """Tell whether no value is NaN or infinite, in one pass; NaN spreads to both bounds."""
    if not values.numel():
        return True
    return all(math.isfinite(bound) for bound in torch.aminmax(values))

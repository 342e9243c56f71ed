"""Write the bins of some neighbouring units down in few bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.errors import ConfigError
from sgl_blend.storage.codec.levels import CodecProfile, Floats, Level, LevelFigures
from sgl_blend.storage.codec.quantiser import UnitCode, bins_of, pack_bins
from sgl_blend.storage.frames import Octets, deflate, deflate_symbols, inflate

Counts: TypeAlias = NDArray[np.uint16]

PROBABILITY_BITS = 16
_LENGTH = struct.Struct("<I")


class EntropyCoder(Protocol):
    """Compresses packed units, as encode_unit makes them."""

    def encode(self, packed: Octets, sizes: Sequence[int], first: int) -> bytes:
        """Compress neighbours, the first of which is unit ``first`` of the page.

        Args:
            packed: Their packed bytes one after the other: uint8 [sum(sizes)].
            sizes: How many each has.
            first: The first of them.
        """

    def decode(self, data: memoryview, sizes: Sequence[int], first: int) -> bytes | None:
        """Return their packed bytes one after the other, sum(sizes); None if it is not so."""


class ZstdCoder:
    """Packed bytes, compressed by zstd."""

    def encode(self, packed: Octets, sizes: Sequence[int], first: int) -> bytes:
        """Compress neighbours."""
        return deflate_symbols(packed.data)

    def decode(self, data: memoryview, sizes: Sequence[int], first: int) -> bytes | None:
        """Return their packed bytes."""
        return inflate(data, sum(sizes))


class ArithmeticCoder:
    """CacheGen's own: range coding with a distribution for each (layer, K/V, channel).

    Args:
        codes: Of all units of a page.
        probabilities: uint16 [units, heads, dim, bins], of this rank.
        tokens: Of a page.

    Raises:
        ConfigError: constriction is not installed.
    """

    def __init__(self, codes: Sequence[UnitCode], probabilities: Counts, tokens: int) -> None:
        try:
            import constriction
        except ImportError:
            raise ConfigError(
                "--blend-store-profile: the profile wants arithmetic coding; "
                "install constriction, or make the profile with --entropy zstd"
            ) from None
        self._stream = constriction.stream
        self._family = constriction.stream.model.Categorical(perfect=False)
        self._codes = codes
        self._tokens = tokens
        self._tables = probabilities.astype(np.float32) / float((1 << PROBABILITY_BITS) - 1)

    def encode(self, packed: Octets, sizes: Sequence[int], first: int) -> bytes:
        """Compress neighbours: their anchors by zstd, the bins of each unit by its distributions."""
        encoder = self._stream.queue.RangeEncoder()
        anchors = []
        units = torch.split(torch.from_numpy(packed), list(sizes))
        for offset, unit in enumerate(units):
            code = self._codes[first + offset]
            begin = code.num_anchor_bytes(self._tokens)
            anchors.append(unit[:begin].numpy().tobytes())
            bins = bins_of(unit[begin:], code)
            if len(bins):
                symbols = bins.numpy().astype(np.int32).reshape(-1)
                encoder.encode(symbols, self._family, self._table(first + offset, len(bins)))
        head = deflate(b"".join(anchors))
        words: bytes = encoder.get_compressed().tobytes()
        return _LENGTH.pack(len(head)) + head + words

    def decode(self, data: memoryview, sizes: Sequence[int], first: int) -> bytes | None:
        """Return their packed bytes."""
        codes = self._codes[first : first + len(sizes)]
        begins = [code.num_anchor_bytes(self._tokens) for code in codes]
        if len(data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data)
        words = data[_LENGTH.size + length :]
        anchors = inflate(data[_LENGTH.size : _LENGTH.size + length], sum(begins))
        if anchors is None or len(words) % 4 or length > len(data):
            return None
        decoder = self._stream.queue.RangeDecoder(np.frombuffer(words, np.uint32).copy())
        parts, taken = [], 0
        for offset, (code, size, begin) in enumerate(zip(codes, sizes, begins, strict=True)):
            parts.append(
                torch.frombuffer(bytearray(anchors[taken : taken + begin]), dtype=torch.uint8)
                if begin
                else torch.empty(0, dtype=torch.uint8)
            )
            taken += begin
            heads, dim = code.step.shape
            tokens = (size - begin) * 8 // (heads * dim * code.level.bits)
            if not tokens:
                continue
            try:
                symbols = decoder.decode(self._family, self._table(first + offset, tokens))
            except (ValueError, AssertionError):
                return None
            bins = torch.from_numpy(symbols.astype(np.uint8)).view(tokens, heads, dim)
            parts.append(pack_bins(bins, code.level.bits).reshape(-1))
        return torch.cat(parts).numpy().tobytes()

    def _table(self, index: int, tokens: int) -> Floats:
        """Return the distribution of each symbol: float32 [tokens * heads * dim, bins]."""
        table = self._tables[index].reshape(-1, self._tables.shape[-1])
        return np.ascontiguousarray(np.broadcast_to(table, (tokens, *table.shape))).reshape(
            -1, table.shape[-1]
        )


def probabilities_of(profile: CodecProfile, level: Level, figures: LevelFigures) -> Counts:
    """Return a level's distributions: uint16 [units, heads, dim, bins]."""
    flat = np.frombuffer(figures.probabilities, "<u2")
    return flat.reshape(len(profile.units), profile.heads, profile.dim, 2 * level.most + 1)

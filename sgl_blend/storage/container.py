"""One page of KV as one self-describing object that tells when it is damaged.

An object does not depend on how host memory is laid out: a page is always [K/V, layer, token, head,
channel]. Inside the envelope (envelope.py) is::

    body      length of the header u32, header (msgpack), frames

A frame holds one or more neighbours of (layer, K/V), by layer, K first. Small neighbours share a frame.
A frame is raw, or its bytes are sorted by significance: the most significant byte of all elements is
compressed by zstd, the others stay. This is version 1, which loses nothing. Version 2 holds coded pages
(codec/coded_pages.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from sgl_blend.storage.envelope import AROUND_BYTES, Bytes, Fault, seal, unseal
from sgl_blend.storage.frames import ITEM_BYTES, Octets, grow, shrink

H = TypeVar("H")

FORMAT_VERSION = 1
LEVEL = "lossless"
FRAME_BYTES = 32 * 1024
"""Neighbours share a frame until it holds so many raw bytes."""

_HEADER_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What a page is made of.

    Attributes:
        dtype: Of an element: bfloat16, float16 or float32.
        layers: Layers of the model.
        tokens: Tokens of a page.
        heads: KV heads of this rank.
        dim: Channels of a head.
    """

    dtype: str
    layers: int
    tokens: int
    heads: int
    dim: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"no pages of {self.dtype}, only of {', '.join(ITEM_BYTES)}")
        if min(self.shape) < 1:
            raise ValueError(f"a page has no part of no size, got {self.shape}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """K/V, layers, tokens, heads, channels."""
        return (2, self.layers, self.tokens, self.heads, self.dim)

    @property
    def unit_bytes(self) -> int:
        """Bytes of K or V of one layer."""
        return self.tokens * self.heads * self.dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return 2 * self.layers * self.unit_bytes

    @property
    def frames(self) -> list[int]:
        """How many (layer, K/V) each frame holds."""
        units, each = 2 * self.layers, -(-FRAME_BYTES // self.unit_bytes)
        return [min(each, units - first) for first in range(0, units, each)]

    @property
    def max_object_bytes(self) -> int:
        """No object of such a page is longer: frames that do not shrink stay raw."""
        return self.page_bytes + AROUND_BYTES + _HEADER_LENGTH.size + _MAX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class PageLabel:
    """What an object says about itself.

    Attributes:
        name: Its own name in the store.
        format: What the page is made of.
        weights: Digest of the weights that computed it.
        rotary: Digest of how keys are rotated.
        level: How coarsely it is coded.
        profile: Digest of the profile that says how; empty if nothing is lost.
    """

    name: str
    format: PageFormat
    weights: str
    rotary: str
    level: str = LEVEL
    profile: str = ""


class _Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    units: int
    codec: int
    size: int
    raw_size: int


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    level: str
    dtype: str
    shape: tuple[int, int, int, int, int]
    weights: str
    rotary: str
    name: str
    frames: list[_Frame]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Header).decode


def pack(page: Bytes, label: PageLabel, key: bytes | None = None) -> bytearray:
    """Make the object of a page.

    Args:
        page: The bytes of [K/V, layer, token, head, channel], contiguous.
        label: What the object says about itself.
        key: 32 bytes that encrypt it; None leaves it readable.

    Returns:
        The object. Without a key the same page gives the same bytes.

    Raises:
        ValueError: The page is not as long as its format says.
    """
    form = label.format
    units = units_of(page, form)
    item = ITEM_BYTES[form.dtype]
    frames, parts, first = [], [], 0
    for count in form.frames:
        raw = units[first : first + count].reshape(-1)
        codec, data = shrink(raw, item)
        frames.append(_Frame(count, codec, sum(map(len, data)), raw.size))
        parts += data
        first += count
    header = _encode(
        _Header(
            FORMAT_VERSION,
            LEVEL,
            form.dtype,
            form.shape,
            label.weights,
            label.rotary,
            label.name,
            frames,
        )
    )
    return seal(with_header(header, parts), FORMAT_VERSION, label.name, key)


def unpack(
    data: Bytes, label: PageLabel, key: bytes | None = None, into: bytearray | None = None
) -> bytearray | Fault:
    """Read the page of an object, whatever its bytes are.

    Args:
        data: The object.
        label: What it must say about itself.
        key: As for pack. With a key, an object that is not encrypted is corrupt.
        into: Memory of just a page, which is overwritten and returned; None takes new memory.

    Returns:
        The bytes of [K/V, layer, token, head, channel], or why there are none. No bytes of an object
        make this raise. Nothing is allocated by a length that an object names.
    """
    if len(data) > label.format.max_object_bytes:
        return Fault.CORRUPT
    found = unseal(memoryview(data), label.name, key)
    if isinstance(found, Fault):
        return found
    version, body = found
    if version != FORMAT_VERSION:
        return Fault.VERSION
    parts = read_header(body, _decode)
    if parts is None:
        return Fault.CORRUPT
    header, rest = parts
    if not _is_of(header, label):
        return Fault.MISMATCH
    return _join(header.frames, rest, label.format, into) or Fault.CORRUPT


# --- what is inside: of this version ------------------------------------------------------------


def read_header(body: memoryview, decode: Callable[[memoryview], H]) -> tuple[H, memoryview] | None:
    """Return the header of a body and the bytes of its frames; None if there is none."""
    start = _HEADER_LENGTH.size
    if len(body) < start:
        return None
    (length,) = _HEADER_LENGTH.unpack_from(body)
    if length > min(_MAX_HEADER_BYTES, len(body) - start):
        return None
    try:
        header = decode(body[start : start + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return header, body[start + length :]


def with_header(header: bytes, parts: list[bytes]) -> list[bytes]:
    """Return the parts of a body.

    Raises:
        ValueError: The header is too long.
    """
    if len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes is too long")
    return [_HEADER_LENGTH.pack(len(header)), header, *parts]


def _is_of(header: _Header, label: PageLabel) -> bool:
    found = (header.v, header.level, header.dtype, header.shape)
    form = label.format
    return found == (FORMAT_VERSION, LEVEL, form.dtype, form.shape) and (
        header.name,
        header.weights,
        header.rotary,
    ) == (label.name, label.weights, label.rotary)


def _join(
    frames: list[_Frame], data: memoryview, form: PageFormat, into: bytearray | None
) -> bytearray | None:
    """Return the page of these frames; None if they are not what its format asks for."""
    unit = form.unit_bytes
    if [(frame.units, frame.raw_size) for frame in frames] != [(n, n * unit) for n in form.frames]:
        return None
    if any(frame.size < 0 for frame in frames) or sum(f.size for f in frames) != len(data):
        return None
    page = bytearray(form.page_bytes) if into is None else into
    halves = np.frombuffer(page, np.uint8).reshape(2, form.layers, unit)
    raw = np.empty((max(form.frames), unit), np.uint8)
    first = offset = 0
    for frame in frames:
        part = raw[: frame.units]
        piece = data[offset : offset + frame.size]
        if not grow(frame.codec, piece, part.reshape(-1), ITEM_BYTES[form.dtype]):
            return None
        put_units(halves, first, part)
        first += frame.units
        offset += frame.size
    return page


def put_units(halves: Octets, first: int, units: Octets) -> None:
    """Put neighbours of K and V by layer into their page.

    Args:
        halves: The page, uint8 [K/V, layer, unit_bytes].
        first: The first of them: 2 * layer, one more for V.
        units: uint8 [units, unit_bytes].
    """
    end = first + len(units)
    halves[0, (first + 1) // 2 : (end + 1) // 2] = units[first % 2 :: 2]
    halves[1, first // 2 : end // 2] = units[1 - first % 2 :: 2]


def units_of(page: Bytes, form: PageFormat) -> Octets:
    """Return K and V by layer: uint8 [2 * layers, unit_bytes]."""
    if memoryview(page).nbytes != form.page_bytes:
        raise ValueError(f"a page of {form} has {form.page_bytes} bytes, not {len(page)}")
    halves = np.frombuffer(page, np.uint8).reshape(2, form.layers, form.unit_bytes)
    return np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(2 * form.layers, form.unit_bytes)

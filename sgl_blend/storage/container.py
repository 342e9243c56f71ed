"""One page of KV as one self-describing object that tells when it is damaged.

An object does not depend on how host memory is laid out: a page is always [K/V, layer, token, head,
channel]. It is::

    prelude   16 B  "SGB1", version u16, flags u16, length of the object u64 (little endian)
    body            length of the header u32, header (msgpack), frames
    trailer   16 B  xxh3-128 of everything before

With a key the body is encrypted by AES-256-GCM. Its nonce of 12 bytes comes before the body, and its
tag takes the trailer's place. The prelude and the object's name are authenticated with it. Nonces are
random, so a key is good for about 2**32 pages (NIST SP 800-38D).

Prelude and trailer stay as they are in every version. So an intact object of another version is told
from a damaged one. A frame holds one or more neighbours of (layer, K/V), by layer, K first. Small
neighbours share a frame. A frame is raw, or its bytes are sorted by significance: the most
significant byte of all elements is compressed by zstd, the others stay.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

FORMAT_VERSION = 1
LEVEL = "lossless"
FRAME_BYTES = 32 * 1024
"""Neighbours share a frame until it holds so many raw bytes."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_MAGIC = b"SGB1"
_PRELUDE = struct.Struct("<4sHHQ")
_HEADER_LENGTH = struct.Struct("<I")
_ENCRYPTED = 1
_NONCE_BYTES = 12
_TRAILER_BYTES = 16
_MAX_HEADER_BYTES = 1 << 16
_RAW, _PLANES = 0, 1
_ZSTD_LEVEL = 1
_MIN_SAVING = 16  # one part in so many, or a frame stays raw

Bytes: TypeAlias = bytes | bytearray | memoryview
_Array: TypeAlias = NDArray[np.uint8]


class Fault(StrEnum):
    """Why an object is not the page that was asked for."""

    CORRUPT = "corrupt"
    """Its bytes are not those that were written, or the key is another."""
    VERSION = "version"
    """It is intact and of another version of the container."""
    MISMATCH = "mismatch"
    """It is intact and holds something else than its name says."""


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
        around = _PRELUDE.size + _NONCE_BYTES + _HEADER_LENGTH.size + _TRAILER_BYTES
        return self.page_bytes + around + _MAX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class PageLabel:
    """What an object says about itself.

    Attributes:
        name: Its own name in the store.
        format: What the page is made of.
        weights: Digest of the weights that computed it.
        rotary: Digest of how keys are rotated.
    """

    name: str
    format: PageFormat
    weights: str
    rotary: str


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
    units = _units(page, form)
    item, compressor = ITEM_BYTES[form.dtype], zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    frames, parts, first = [], [], 0
    for count in form.frames:
        raw = units[first : first + count].reshape(-1)
        codec, data = _shrink(raw, item, compressor)
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
    if len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes is too long for a page of {form}")
    return _seal([_HEADER_LENGTH.pack(len(header)), header, *parts], label.name, key)


def unpack(data: Bytes, label: PageLabel, key: bytes | None = None) -> bytearray | Fault:
    """Read the page of an object, whatever its bytes are.

    Args:
        data: The object.
        label: What it must say about itself.
        key: As for pack. With a key, an object that is not encrypted is corrupt.

    Returns:
        The bytes of [K/V, layer, token, head, channel], or why there are none. No bytes of an object
        make this raise. Nothing is allocated by a length that an object names.
    """
    if len(data) > label.format.max_object_bytes:
        return Fault.CORRUPT
    body = _open(memoryview(data), label.name, key)
    if isinstance(body, Fault):
        return body
    parts = _read_header(body)
    if parts is None:
        return Fault.CORRUPT
    header, rest = parts
    if not _is_of(header, label):
        return Fault.MISMATCH
    return _join(header.frames, rest, label.format) or Fault.CORRUPT


# --- the envelope: the same in every version ----------------------------------------------------


def _seal(parts: list[bytes], name: str, key: bytes | None) -> bytearray:
    body_bytes = sum(map(len, parts))
    length = _PRELUDE.size + body_bytes + _TRAILER_BYTES + (_NONCE_BYTES if key else 0)
    prelude = _PRELUDE.pack(_MAGIC, FORMAT_VERSION, _ENCRYPTED if key else 0, length)
    if key is None:
        sealed = bytearray().join([prelude, *parts])
        sealed += xxh3_128_digest(sealed)
        return sealed
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(_NONCE_BYTES)
    sealed = bytearray(prelude + nonce)
    sealed += AESGCM(key).encrypt(nonce, b"".join(parts), prelude + name.encode())
    return sealed


def _open(data: memoryview, name: str, key: bytes | None) -> memoryview | Fault:
    if len(data) < _PRELUDE.size + _TRAILER_BYTES:
        return Fault.CORRUPT
    magic, version, flags, length = _PRELUDE.unpack_from(data)
    if magic != _MAGIC or length != len(data) or flags != (_ENCRYPTED if key else 0):
        return Fault.CORRUPT
    if key is None:
        body: memoryview | None = data[_PRELUDE.size : -_TRAILER_BYTES]
        if xxh3_128_digest(data[:-_TRAILER_BYTES]) != data[-_TRAILER_BYTES:]:
            return Fault.CORRUPT
    else:
        body = _decrypt(data, name, key)
    if body is None:
        return Fault.CORRUPT
    return body if version == FORMAT_VERSION else Fault.VERSION


def _decrypt(data: memoryview, name: str, key: bytes) -> memoryview | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    start = _PRELUDE.size + _NONCE_BYTES
    if len(data) < start + _TRAILER_BYTES:
        return None
    prelude, nonce = bytes(data[: _PRELUDE.size]), bytes(data[_PRELUDE.size : start])
    try:
        return memoryview(AESGCM(key).decrypt(nonce, data[start:], prelude + name.encode()))
    except InvalidTag:
        return None


# --- what is inside: of this version ------------------------------------------------------------


def _read_header(body: memoryview) -> tuple[_Header, memoryview] | None:
    """Return the header and the bytes of the frames."""
    start = _HEADER_LENGTH.size
    if len(body) < start:
        return None
    (length,) = _HEADER_LENGTH.unpack_from(body)
    if length > min(_MAX_HEADER_BYTES, len(body) - start):
        return None
    try:
        header = _decode(body[start : start + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return header, body[start + length :]


def _is_of(header: _Header, label: PageLabel) -> bool:
    found = (header.v, header.level, header.dtype, header.shape)
    form = label.format
    return found == (FORMAT_VERSION, LEVEL, form.dtype, form.shape) and (
        header.name,
        header.weights,
        header.rotary,
    ) == (label.name, label.weights, label.rotary)


def _join(frames: list[_Frame], data: memoryview, form: PageFormat) -> bytearray | None:
    """Return the page of these frames; None if they are not what its format asks for."""
    unit = form.unit_bytes
    if [(frame.units, frame.raw_size) for frame in frames] != [(n, n * unit) for n in form.frames]:
        return None
    if any(frame.size < 0 for frame in frames) or sum(f.size for f in frames) != len(data):
        return None
    page = bytearray(form.page_bytes)
    halves = np.frombuffer(page, np.uint8).reshape(2, form.layers, unit)
    raw = np.empty((max(form.frames), unit), np.uint8)
    first = offset = 0
    for frame in frames:
        part = raw[: frame.units]
        if not _grow(frame, data[offset : offset + frame.size], part.reshape(-1), form.dtype):
            return None
        for index in range(frame.units):
            layer, kind = divmod(first + index, 2)
            halves[kind, layer] = part[index]
        first += frame.units
        offset += frame.size
    return page


def _units(page: Bytes, form: PageFormat) -> _Array:
    """Return K and V by layer: uint8 [2 * layers, unit_bytes]."""
    if memoryview(page).nbytes != form.page_bytes:
        raise ValueError(f"a page of {form} has {form.page_bytes} bytes, not {len(page)}")
    halves = np.frombuffer(page, np.uint8).reshape(2, form.layers, form.unit_bytes)
    return np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(2 * form.layers, form.unit_bytes)


def _shrink(raw: _Array, item: int, zstd: zstandard.ZstdCompressor) -> tuple[int, list[bytes]]:
    """Return how a frame is stored, and its bytes."""
    planes = raw.reshape(-1, item).T
    top = zstd.compress(planes[-1].tobytes())
    if raw.size // item - len(top) < raw.size // _MIN_SAVING:
        return _RAW, [raw.tobytes()]
    return _PLANES, [planes[:-1].tobytes(), top]


def _grow(frame: _Frame, data: memoryview, raw: _Array, dtype: str) -> bool:
    """Fill uint8 [raw_size] with what a frame holds; return whether it holds so much."""
    if frame.codec == _RAW:
        if len(data) != raw.size:
            return False
        raw[:] = np.frombuffer(data, np.uint8)
        return True
    item = ITEM_BYTES[dtype]
    elements = raw.size // item
    below = elements * (item - 1)
    if frame.codec != _PLANES or len(data) <= below:
        return False
    top = _inflate(data[below:], elements)
    if top is None:
        return False
    planes = raw.reshape(elements, item).T
    planes[:-1] = np.frombuffer(data[:below], np.uint8).reshape(item - 1, elements)
    planes[-1] = np.frombuffer(top, np.uint8)
    return True


def _inflate(data: memoryview, size: int) -> bytes | None:
    try:
        # zstandard allocates what the frame claims to hold, so the claim is looked at first.
        if zstandard.frame_content_size(data) != size:
            return None
        made = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError:
        return None
    return made if len(made) == size else None

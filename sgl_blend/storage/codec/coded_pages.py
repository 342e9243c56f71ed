"""One coded page as one self-describing object: version 2 of the container.

Inside the envelope (storage/envelope.py) is::

    body      length of the header u32, header (msgpack), frames

A frame holds one or more neighbours of (layer, K/V), by layer, K first: bins, coded. A frame with a
value that is not finite holds the bytes of the elements instead, and loses nothing.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import torch

from sgl_blend.storage.codec.coder import PageCoder
from sgl_blend.storage.container import PageLabel, put_units, read_header, units_of, with_header
from sgl_blend.storage.envelope import Bytes, Fault, seal, unseal
from sgl_blend.storage.frames import ITEM_BYTES, grow, shrink

FORMAT_VERSION = 2
_CODED = 2
"""How a frame is stored, beside those of storage/frames.py."""


class _Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    units: int
    codec: int
    size: int


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What an object says about itself; as PageLabel, and where its first token stands."""

    level: str
    dtype: str
    shape: tuple[int, int, int, int, int]
    weights: str
    rotary: str
    name: str
    profile: str
    position: int
    frames: list[_Frame]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


def pack_coded(
    page: Bytes, label: PageLabel, coder: PageCoder, position: int, key: bytes | None = None
) -> tuple[bytearray, int]:
    """Make the object of a page.

    Args:
        page: The bytes of [K/V, layer, token, head, channel], contiguous.
        label: What the object says about itself.
        coder: Of the label's level.
        position: Of the page's first token, for which its keys are rotated.
        key: 32 bytes that encrypt it; None leaves it readable.

    Returns:
        The object, and how many values were clipped.

    Raises:
        ValueError: The page is not as long as its format says, or stands beyond the model's positions.
    """
    form = label.format
    if memoryview(page).nbytes != form.page_bytes:
        raise ValueError(f"a page of {form} has {form.page_bytes} bytes, not {len(page)}")
    if memoryview(page).readonly:
        page = bytearray(page)  # torch views no other; nothing writes to it
    values = torch.frombuffer(page, dtype=getattr(torch, form.dtype)).view(form.shape)
    if not coder.takes(position):
        raise ValueError(f"keys cannot be rotated to position {position}")
    frames, parts, first, clipped = [], [], 0, 0
    for count in coder.frames:
        coded = coder.encode(values, first, count, position)
        if coded is None:
            raw = units_of(page, form)[first : first + count].reshape(-1)
            codec, data = shrink(raw, ITEM_BYTES[form.dtype])
        else:
            codec, data = _CODED, [coded[0]]
            clipped += coded[1]
        frames.append(_Frame(count, codec, sum(map(len, data))))
        parts += data
        first += count
    header = Header(
        label.level,
        form.dtype,
        form.shape,
        label.weights,
        label.rotary,
        label.name,
        label.profile,
        position,
        frames,
    )
    body = with_header(_encode(header), parts)
    return seal(body, FORMAT_VERSION, label.name, key), clipped


def unpack_coded(
    data: Bytes,
    label: PageLabel,
    coder: PageCoder,
    key: bytes | None = None,
    into: bytearray | None = None,
) -> bytearray | Fault:
    """Read the page of an object, whatever its bytes are.

    Args:
        data: The object.
        label: What it must say about itself.
        coder: Of the label's level.
        key: As for pack_coded. With a key, an object that is not encrypted is corrupt.
        into: Memory of just a page, which is overwritten and returned; None takes new memory.

    Returns:
        The bytes of [K/V, layer, token, head, channel], or why there are none. No bytes of an object
        make this raise. Nothing is allocated by a length that an object names.
    """
    form = label.format
    if len(data) > form.max_object_bytes:
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
    if not coder.knows(header.position):
        return Fault.POSITION
    return _join(header, rest, label, coder, into) or Fault.CORRUPT


def read_body(data: memoryview) -> tuple[Header, memoryview] | None:
    """Return the header and the frames of an object that nobody has a name for."""
    found = unseal(data, "", None)
    if isinstance(found, Fault) or found[0] != FORMAT_VERSION:
        return None
    return read_header(found[1], _decode)


def _is_of(header: Header, label: PageLabel) -> bool:
    form = label.format
    return (header.dtype, header.shape) == (form.dtype, form.shape) and (
        header.level,
        header.name,
        header.weights,
        header.rotary,
        header.profile,
    ) == (label.level, label.name, label.weights, label.rotary, label.profile)


def _join(
    header: Header,
    data: memoryview,
    label: PageLabel,
    coder: PageCoder,
    into: bytearray | None,
) -> bytearray | None:
    """Return the page of these frames; None if they are not what its format asks for."""
    form, frames = label.format, header.frames
    if [frame.units for frame in frames] != coder.frames:
        return None
    if any(frame.size < 0 for frame in frames) or sum(f.size for f in frames) != len(data):
        return None
    page = bytearray(form.page_bytes) if into is None else into
    ends = itertools.accumulate(frame.size for frame in frames)
    pieces = [data[end - frame.size : end] for frame, end in zip(frames, ends, strict=True)]
    first = unit = 0
    while first < len(frames):
        end = first
        while end < len(frames) and frames[end].codec == _CODED:
            end += 1
        if end > first:  # what is coded is decoded in one call
            if not coder.decode(pieces[first:end], page, first, header.position):
                return None
            unit += sum(coder.frames[first:end])
            first = end
            continue
        frame = frames[first]
        raw = np.empty((frame.units, form.unit_bytes), np.uint8)
        if not grow(frame.codec, pieces[first], raw.reshape(-1), ITEM_BYTES[form.dtype]):
            return None
        halves = np.frombuffer(page, np.uint8).reshape(2, form.layers, form.unit_bytes)
        put_units(halves, unit, raw)
        unit += frame.units
        first += 1
    return page

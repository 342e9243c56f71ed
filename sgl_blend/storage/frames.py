"""Bytes of elements, a little shorter, and nothing lost."""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

Octets: TypeAlias = NDArray[np.uint8]

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
RAW, PLANES = 0, 1
"""How a frame is stored: as it is, or sorted by significance."""

_ZSTD_LEVEL = 1
_LONG_MATCH = 7
_MIN_SAVING = 16  # one part in so many, or a frame stays raw


def shrink(raw: Octets, item: int) -> tuple[int, list[bytes]]:
    """Return how a frame is stored, and its bytes.

    Args:
        raw: uint8 [bytes of the frame].
        item: Bytes of an element.
    """
    planes = raw.reshape(-1, item).T
    top = deflate(planes[-1].tobytes())
    if raw.size // item - len(top) < raw.size // _MIN_SAVING:
        return RAW, [raw.tobytes()]
    return PLANES, [planes[:-1].tobytes(), top]


def grow(codec: int, data: memoryview, raw: Octets, item: int) -> bool:
    """Undo shrink.

    Args:
        codec: How the frame is stored.
        data: Its bytes.
        raw: uint8, filled with the frame.
        item: Bytes of an element.

    Returns:
        Whether the bytes hold just as much.
    """
    if codec == RAW:
        if len(data) != raw.size:
            return False
        raw[:] = np.frombuffer(data, np.uint8)
        return True
    elements = raw.size // item
    below = elements * (item - 1)
    if codec != PLANES or len(data) <= below:
        return False
    top = inflate(data[below:], elements)
    if top is None:
        return False
    low, high = np.frombuffer(data[:below], np.uint8), np.frombuffer(top, np.uint8)
    if item == 2:  # to write every other byte takes several times as long
        values = raw.view("<u2")
        values[:] = high
        values <<= 8
        values |= low
    else:
        planes = raw.reshape(elements, item).T
        planes[:-1] = low.reshape(item - 1, elements)
        planes[-1] = high
    return True


class _Zstd(threading.local):
    """A compressor and a decompressor for each thread: making one takes as long as a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        few = zstandard.ZstdCompressionParameters.from_level(_ZSTD_LEVEL, min_match=_LONG_MATCH)
        self.symbol_compressor = zstandard.ZstdCompressor(compression_params=few)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def deflate(data: bytes | memoryview) -> bytes:
    """Compress by zstd."""
    return _zstd.compressor.compress(data)


def deflate_symbols(data: bytes | memoryview) -> bytes:
    """Compress symbols that follow one another by chance, as bins do.

    Short matches are found among them, and take more than the symbols would. With few of them, zstd
    is nearly a Huffman coder.
    """
    return _zstd.symbol_compressor.compress(data)


def inflate(data: memoryview, size: int) -> bytes | None:
    """Return what zstd compressed, if it is just so long; nothing is allocated by other claims."""
    try:
        # zstandard allocates what the frame claims to hold, so the claim is looked at first.
        if zstandard.frame_content_size(data) != size:
            return None
        made = _zstd.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    return made if len(made) == size else None

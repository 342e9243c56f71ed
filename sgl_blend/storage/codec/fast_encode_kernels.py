"""The loops of fast.py that encode. Importing this needs numba."""

# mypy: disallow-untyped-decorators=False

from typing import Any, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

from sgl_blend.storage.codec.fast_kernels import Floats, Octets

Bits: TypeAlias = NDArray[Any]

# To divide by zero gives no exception, as in torch; to look for it would keep vector instructions away.
_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")

NOT_FINITE = -1

_MAGIC = np.float32(3 << 22)
"""Added to a number below 2**22, it leaves the whole number nearest to it in the lowest bits, halves to
even, as torch rounds."""
_INFINITE = np.uint32(0x7F800000)


# Loops are short and many for the reason that fast_kernels.py tells. All rows stay in the first cache.


@_jit
def _unturn(row: Floats, cos: Floats, sin: Floats, kept: Floats) -> None:
    """Rotate the keys of a token back, float32 [heads * dim], by halves of a head; kept is scratch."""
    half = cos.shape[0]
    for begin in range(0, row.shape[0], 2 * half):
        low, high = row[begin : begin + half], row[begin + half : begin + 2 * half]
        for j in range(half):
            kept[j] = low[j]
        for j in range(half):
            low[j] = low[j] * cos[j] + high[j] * sin[j]
        for j in range(half):
            high[j] = high[j] * cos[j] - kept[j] * sin[j]


@_jit
def _scale(row: Floats, mean: Floats, step: Floats) -> None:
    """Measure the channels of a token in bins."""
    for j in range(row.shape[0]):
        row[j] = (row[j] - mean[j]) / step[j]


@_jit
def _clip(row: Floats, most: np.float32) -> int:
    """Move what is beyond the outermost bin into it; return how many values that were."""
    clipped = 0
    for j in range(row.shape[0]):
        if row[j] >= most + np.float32(0.5):  # most is odd, so the half is rounded away from it
            row[j] = most
            clipped += 1
        elif row[j] <= -most - np.float32(0.5):
            row[j] = -most
            clipped += 1
    return clipped


@_jit
def _pack(bits: Bits, most: np.uint32, to: Octets) -> None:
    """Write the bins of a token down, uint8 [heads, dim] or two to a byte, [heads, dim / 2].

    Args:
        bits: Of its numbers of bins plus _MAGIC, uint32 [heads * dim].
        most: The outermost bin.
        to: Where they are written.
    """
    heads, width = to.shape
    if heads * width == bits.shape[0]:
        flat = to.reshape(-1)
        for j in range(bits.shape[0]):
            flat[j] = np.uint8(bits[j] + most)
        return
    offset = most * np.uint32(17)  # most in either half of the byte
    for h in range(heads):
        low = bits[2 * h * width : (2 * h + 1) * width]
        high = bits[(2 * h + 1) * width : (2 * h + 2) * width]
        head_to = to[h]
        for j in range(width):
            head_to[j] = np.uint8(low[j] + (high[j] << np.uint32(4)) + offset)


@_jit
def _top_of(bits: Bits) -> np.uint32:
    """Return the bits of the largest magnitude of floats; those of NaN are larger than any."""
    top = np.uint32(0)
    for j in range(bits.shape[0]):
        top = max(top, bits[j] & np.uint32(0x7FFFFFFF))
    return top


@_jit
def encode_units(
    page: Bits,
    first: int,
    shift: np.uint32,
    step: Floats,
    mean: Floats,
    cos: Floats,
    sin: Floats,
    most: np.float32,
    out: Octets,
) -> int:
    """Round neighbouring units of a page to packed bins; see fast.encode.

    Args:
        page: Bits of floats, uint16 or uint32 [K/V, layer, token, heads * dim].
        first: The first unit.
        shift: By which bits are shifted to be those of float32.
        step: Width of a bin, float32 [units, heads * dim].
        mean: Of a channel, the same shape.
        cos: float32 [tokens, dim / 2].
        sin: float32, the same shape.
        most: The outermost bin.
        out: uint8 [units, tokens, heads, dim] for bins of 8 bits, [..., dim / 2] for those of 4.

    Returns:
        How many values were clipped; NOT_FINITE if a value is not, or becomes so.
    """
    tokens, channels = page.shape[2:]
    # One row, in place: of two that lie 4 KiB apart, the processor takes one for the other, and waits.
    row, kept = np.empty(channels, np.float32), np.empty(cos.shape[1], np.float32)
    bits = row.view(np.uint32)
    beyond = np.full(1, most + np.float32(0.5), np.float32).view(np.uint32)[0]
    clipped = 0
    for u in range(out.shape[0]):
        kind, layer = (first + u) % 2, (first + u) // 2
        for t in range(tokens):
            source = page[kind, layer, t]
            for j in range(channels):
                bits[j] = np.uint32(source[j]) << shift
            if kind == 0:
                _unturn(row, cos[t], sin[t], kept)
            _scale(row, mean[u], step[u])
            top = _top_of(bits)
            if top >= _INFINITE:
                return NOT_FINITE
            if top >= beyond:
                clipped += _clip(row, most)
            for j in range(channels):
                row[j] += _MAGIC
            _pack(bits, np.uint32(most), out[u, t])
    return clipped

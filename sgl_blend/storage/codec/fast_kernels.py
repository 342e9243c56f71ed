"""The loops of fast.py. Importing this needs numba."""

# mypy: disallow-untyped-decorators=False

from typing import TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

Octets: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Shorts: TypeAlias = NDArray[np.uint16]
Bits: TypeAlias = NDArray[np.uint32]

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)


_inlined = numba.njit(inline="always", boundscheck=False)


# Loops are written out for a unit: a call for each row would cost more than the row. Each inner loop
# writes one array in one direction, over slices that begin where they are read, or the compiler does
# not use vector instructions. That makes five times the speed. And it makes better loops of a length
# that it knows. So there are copies for heads of 128 and 64, and one for all others. Pages of bfloat16
# are written in order, as it is memory that those of many heads wait for.


@_inlined
def _round(bits: Bits, out: Shorts, dim: int) -> None:
    """Round bits of float32 to those of bfloat16, halves to even."""
    for j in range(dim):
        even = (bits[j] >> np.uint32(16)) & np.uint32(1)
        out[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_inlined
def _keys_to_bfloat16(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Shorts, half: int
) -> None:
    """Decode and rotate keys of a layer to bits of bfloat16, uint16 [tokens, heads, 2 * half]."""
    tokens, heads = packed.shape[:2]
    low, high = np.empty(half, np.float32), np.empty(half, np.float32)
    row = np.empty(2 * half, np.float32)
    low_row, high_row, bits = row[:half], row[half:], row.view(np.uint32)
    for t in range(tokens):
        for h in range(heads):
            low_step, high_step = step[h, :half], step[h, half:]
            low_base, high_base = base[h, :half], base[h, half:]
            octets, c, n = packed[t, h], cos[t], sin[t]
            for j in range(half):
                low[j] = np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
            for j in range(half):
                high[j] = (
                    np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                )
            for j in range(half):
                low_row[j] = low[j] * c[j] - high[j] * n[j]
            for j in range(half):
                high_row[j] = high[j] * c[j] + low[j] * n[j]
            _round(bits, out[t, h], 2 * half)


@_inlined
def _values_to_bfloat16(packed: Octets, step: Floats, base: Floats, out: Shorts, half: int) -> None:
    """Decode values of a layer to bits of bfloat16, uint16 [tokens, heads, 2 * half]."""
    tokens, heads = packed.shape[:2]
    row = np.empty(2 * half, np.float32)
    low, high, bits = row[:half], row[half:], row.view(np.uint32)
    for t in range(tokens):
        for h in range(heads):
            low_step, high_step = step[h, :half], step[h, half:]
            low_base, high_base = base[h, :half], base[h, half:]
            octets = packed[t, h]
            for j in range(half):
                low[j] = np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
            for j in range(half):
                high[j] = (
                    np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                )
            _round(bits, out[t, h], 2 * half)


@_inlined
def _keys_to_float32(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Floats, half: int
) -> None:
    """Decode and rotate keys of a layer, float32 [tokens, heads, 2 * half]."""
    tokens, heads = packed.shape[:2]
    low, high = np.empty(half, np.float32), np.empty(half, np.float32)
    for h in range(heads):
        low_step, high_step = step[h, :half], step[h, half:]
        low_base, high_base = base[h, :half], base[h, half:]
        for t in range(tokens):
            octets, c, n = packed[t, h], cos[t], sin[t]
            low_to, high_to = out[t, h, :half], out[t, h, half:]
            for j in range(half):
                low[j] = np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
            for j in range(half):
                high[j] = (
                    np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                )
            for j in range(half):
                low_to[j] = low[j] * c[j] - high[j] * n[j]
            for j in range(half):
                high_to[j] = high[j] * c[j] + low[j] * n[j]


@_inlined
def _values_to_float32(packed: Octets, step: Floats, base: Floats, out: Floats, half: int) -> None:
    """Decode values of a layer, float32 [tokens, heads, 2 * half]."""
    tokens, heads = packed.shape[:2]
    for h in range(heads):
        low_step, high_step = step[h, :half], step[h, half:]
        low_base, high_base = base[h, :half], base[h, half:]
        for t in range(tokens):
            octets = packed[t, h]
            low_to, high_to = out[t, h, :half], out[t, h, half:]
            for j in range(half):
                low_to[j] = (
                    np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
                )
            for j in range(half):
                high_to[j] = (
                    np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                )


@_jit
def decode_to_bfloat16(
    packed: Octets,
    step: Floats,
    base: Floats,
    cos: Floats,
    sin: Floats,
    first: int,
    page: Shorts,
) -> None:
    """Decode units into a page, uint16 [K/V, layer, token, head, dim]; see fast.decode."""
    half = packed.shape[3]
    for u in range(packed.shape[0]):
        kind, layer = (first + u) % 2, (first + u) // 2
        bins, steps, bases, out = packed[u], step[u], base[u], page[kind, layer]
        if kind == 0 and half == 64:
            _keys_to_bfloat16(bins, steps, bases, cos, sin, out, 64)
        elif kind == 0 and half == 32:
            _keys_to_bfloat16(bins, steps, bases, cos, sin, out, 32)
        elif kind == 0:
            _keys_to_bfloat16(bins, steps, bases, cos, sin, out, half)
        elif half == 64:
            _values_to_bfloat16(bins, steps, bases, out, 64)
        elif half == 32:
            _values_to_bfloat16(bins, steps, bases, out, 32)
        else:
            _values_to_bfloat16(bins, steps, bases, out, half)


@_jit
def decode_to_float32(
    packed: Octets,
    step: Floats,
    base: Floats,
    cos: Floats,
    sin: Floats,
    first: int,
    page: Floats,
) -> None:
    """Decode units into a page, float32 [K/V, layer, token, head, dim]; see fast.decode."""
    half = packed.shape[3]
    for u in range(packed.shape[0]):
        kind, layer = (first + u) % 2, (first + u) // 2
        bins, steps, bases, out = packed[u], step[u], base[u], page[kind, layer]
        if kind == 0 and half == 64:
            _keys_to_float32(bins, steps, bases, cos, sin, out, 64)
        elif kind == 0 and half == 32:
            _keys_to_float32(bins, steps, bases, cos, sin, out, 32)
        elif kind == 0:
            _keys_to_float32(bins, steps, bases, cos, sin, out, half)
        elif half == 64:
            _values_to_float32(bins, steps, bases, out, 64)
        elif half == 32:
            _values_to_float32(bins, steps, bases, out, 32)
        else:
            _values_to_float32(bins, steps, bases, out, half)

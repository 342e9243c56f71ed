"""The loops of fast.py. Importing this needs numba."""

# mypy: disallow-untyped-decorators=False

from typing import TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

Octets: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Shorts: TypeAlias = NDArray[np.uint16]

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)


# Loops are written out for a unit: a call for each row would cost more than the row. Each inner loop
# writes one array in one direction, over slices that begin where they are read, or the compiler does
# not use vector instructions. That makes five times the speed.


@_jit
def _keys_to_bfloat16(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Shorts
) -> None:
    """Decode and rotate keys of a layer to bits of bfloat16, uint16 [tokens, heads, dim]."""
    tokens, heads, half = packed.shape
    low, high = np.empty(half, np.float32), np.empty(half, np.float32)
    row = np.empty(half, np.float32)
    bits = row.view(np.uint32)
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
                row[j] = low[j] * c[j] - high[j] * n[j]
            for j in range(half):
                even = (bits[j] >> np.uint32(16)) & np.uint32(1)
                low_to[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))
            for j in range(half):
                row[j] = high[j] * c[j] + low[j] * n[j]
            for j in range(half):
                even = (bits[j] >> np.uint32(16)) & np.uint32(1)
                high_to[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_jit
def _values_to_bfloat16(packed: Octets, step: Floats, base: Floats, out: Shorts) -> None:
    """Decode values of a layer to bits of bfloat16, uint16 [tokens, heads, dim]."""
    tokens, heads, half = packed.shape
    row = np.empty(half, np.float32)
    bits = row.view(np.uint32)
    for h in range(heads):
        low_step, high_step = step[h, :half], step[h, half:]
        low_base, high_base = base[h, :half], base[h, half:]
        for t in range(tokens):
            octets = packed[t, h]
            low_to, high_to = out[t, h, :half], out[t, h, half:]
            for j in range(half):
                row[j] = np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
            for j in range(half):
                even = (bits[j] >> np.uint32(16)) & np.uint32(1)
                low_to[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))
            for j in range(half):
                row[j] = (
                    np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                )
            for j in range(half):
                even = (bits[j] >> np.uint32(16)) & np.uint32(1)
                high_to[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_jit
def _keys_to_float32(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Floats
) -> None:
    """Decode and rotate keys of a layer, float32 [tokens, heads, dim]."""
    tokens, heads, half = packed.shape
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


@_jit
def _values_to_float32(packed: Octets, step: Floats, base: Floats, out: Floats) -> None:
    """Decode values of a layer, float32 [tokens, heads, dim]."""
    tokens, heads, half = packed.shape
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
    for u in range(packed.shape[0]):
        kind, layer = (first + u) % 2, (first + u) // 2
        if kind == 0:
            _keys_to_bfloat16(packed[u], step[u], base[u], cos, sin, page[0, layer])
        else:
            _values_to_bfloat16(packed[u], step[u], base[u], page[1, layer])


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
    for u in range(packed.shape[0]):
        kind, layer = (first + u) % 2, (first + u) // 2
        if kind == 0:
            _keys_to_float32(packed[u], step[u], base[u], cos, sin, page[0, layer])
        else:
            _values_to_float32(packed[u], step[u], base[u], page[1, layer])

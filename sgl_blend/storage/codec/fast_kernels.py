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


# Loops are written out where they run: a call for each row costs more than the row. Each inner loop
# writes one array in one direction, over slices that begin where they are read, or the compiler does
# not use vector instructions. That makes five times the speed.


@_jit
def keys_to_bfloat16(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Shorts
) -> None:
    """Decode and rotate to bits of bfloat16, uint16 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    low, high = np.empty(half, np.float32), np.empty(half, np.float32)
    row = np.empty(half, np.float32)
    bits = row.view(np.uint32)
    for u in range(units):
        for h in range(heads):
            low_step, high_step = step[u, h, :half], step[u, h, half:]
            low_base, high_base = base[u, h, :half], base[u, h, half:]
            for t in range(tokens):
                octets, c, n = packed[u, t, h], cos[t], sin[t]
                low_to, high_to = out[u, t, h, :half], out[u, t, h, half:]
                for j in range(half):
                    low[j] = (
                        np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
                    )
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
def values_to_bfloat16(packed: Octets, step: Floats, base: Floats, out: Shorts) -> None:
    """Decode to bits of bfloat16, uint16 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    row = np.empty(half, np.float32)
    bits = row.view(np.uint32)
    for u in range(units):
        for h in range(heads):
            low_step, high_step = step[u, h, :half], step[u, h, half:]
            low_base, high_base = base[u, h, :half], base[u, h, half:]
            for t in range(tokens):
                octets = packed[u, t, h]
                low_to, high_to = out[u, t, h, :half], out[u, t, h, half:]
                for j in range(half):
                    row[j] = (
                        np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
                    )
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
def keys_to_float32(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Floats
) -> None:
    """Decode and rotate to float32 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    low, high = np.empty(half, np.float32), np.empty(half, np.float32)
    for u in range(units):
        for h in range(heads):
            low_step, high_step = step[u, h, :half], step[u, h, half:]
            low_base, high_base = base[u, h, :half], base[u, h, half:]
            for t in range(tokens):
                octets, c, n = packed[u, t, h], cos[t], sin[t]
                low_to, high_to = out[u, t, h, :half], out[u, t, h, half:]
                for j in range(half):
                    low[j] = (
                        np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
                    )
                for j in range(half):
                    high[j] = (
                        np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                    )
                for j in range(half):
                    low_to[j] = low[j] * c[j] - high[j] * n[j]
                for j in range(half):
                    high_to[j] = high[j] * c[j] + low[j] * n[j]


@_jit
def values_to_float32(packed: Octets, step: Floats, base: Floats, out: Floats) -> None:
    """Decode to float32 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    for u in range(units):
        for h in range(heads):
            low_step, high_step = step[u, h, :half], step[u, h, half:]
            low_base, high_base = base[u, h, :half], base[u, h, half:]
            for t in range(tokens):
                octets = packed[u, t, h]
                low_to, high_to = out[u, t, h, :half], out[u, t, h, half:]
                for j in range(half):
                    low_to[j] = (
                        np.float32(np.int32(octets[j]) & np.int32(15)) * low_step[j] + low_base[j]
                    )
                for j in range(half):
                    high_to[j] = (
                        np.float32(np.int32(octets[j]) >> np.int32(4)) * high_step[j] + high_base[j]
                    )

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


# Loops are written out where they run: a call for each row costs more than the row.


@_jit
def keys_to_bfloat16(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Shorts
) -> None:
    """Decode and rotate to bits of bfloat16, uint16 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    row = np.empty(2 * half, np.float32)
    bits = row.view(np.uint32)
    for u in range(units):
        for t in range(tokens):
            c, n = cos[t], sin[t]
            for h in range(heads):
                octets, s, z, to = packed[u, t, h], step[u, h], base[u, h], out[u, t, h]
                for j in range(half):
                    bins = np.int32(octets[j])
                    a = np.float32(bins & np.int32(15)) * s[j] + z[j]
                    b = np.float32(bins >> np.int32(4)) * s[half + j] + z[half + j]
                    row[j] = a * c[j] - b * n[j]
                    row[half + j] = b * c[j] + a * n[j]
                for j in range(2 * half):
                    even = (bits[j] >> np.uint32(16)) & np.uint32(1)
                    to[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_jit
def values_to_bfloat16(packed: Octets, step: Floats, base: Floats, out: Shorts) -> None:
    """Decode to bits of bfloat16, uint16 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    row = np.empty(2 * half, np.float32)
    bits = row.view(np.uint32)
    for u in range(units):
        for t in range(tokens):
            for h in range(heads):
                octets, s, z, to = packed[u, t, h], step[u, h], base[u, h], out[u, t, h]
                for j in range(half):
                    bins = np.int32(octets[j])
                    row[j] = np.float32(bins & np.int32(15)) * s[j] + z[j]
                    row[half + j] = np.float32(bins >> np.int32(4)) * s[half + j] + z[half + j]
                for j in range(2 * half):
                    even = (bits[j] >> np.uint32(16)) & np.uint32(1)
                    to[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_jit
def keys_to_float32(
    packed: Octets, step: Floats, base: Floats, cos: Floats, sin: Floats, out: Floats
) -> None:
    """Decode and rotate to float32 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    for u in range(units):
        for t in range(tokens):
            c, n = cos[t], sin[t]
            for h in range(heads):
                octets, s, z, to = packed[u, t, h], step[u, h], base[u, h], out[u, t, h]
                for j in range(half):
                    bins = np.int32(octets[j])
                    a = np.float32(bins & np.int32(15)) * s[j] + z[j]
                    b = np.float32(bins >> np.int32(4)) * s[half + j] + z[half + j]
                    to[j] = a * c[j] - b * n[j]
                    to[half + j] = b * c[j] + a * n[j]


@_jit
def values_to_float32(packed: Octets, step: Floats, base: Floats, out: Floats) -> None:
    """Decode to float32 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    for u in range(units):
        for t in range(tokens):
            for h in range(heads):
                octets, s, z, to = packed[u, t, h], step[u, h], base[u, h], out[u, t, h]
                for j in range(half):
                    bins = np.int32(octets[j])
                    to[j] = np.float32(bins & np.int32(15)) * s[j] + z[j]
                    to[half + j] = np.float32(bins >> np.int32(4)) * s[half + j] + z[half + j]

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


@_jit
def _unpack(octets: Octets, step: Floats, base: Floats, row: Floats) -> None:
    half = len(octets)
    for j in range(half):
        row[j] = np.float32(octets[j] & np.uint8(15)) * step[j] + base[j]
    for j in range(half):
        row[half + j] = np.float32(octets[j] >> np.uint8(4)) * step[half + j] + base[half + j]


@_jit
def _turn(row: Floats, cos: Floats, sin: Floats, neox: bool, out: Floats) -> None:
    pairs = len(cos)
    if neox:
        for j in range(pairs):
            out[j] = row[j] * cos[j] - row[pairs + j] * sin[j]
        for j in range(pairs):
            out[pairs + j] = row[pairs + j] * cos[j] + row[j] * sin[j]
    else:
        for j in range(pairs):
            out[2 * j] = row[2 * j] * cos[j] - row[2 * j + 1] * sin[j]
            out[2 * j + 1] = row[2 * j + 1] * cos[j] + row[2 * j] * sin[j]
    for j in range(2 * pairs, len(row)):
        out[j] = row[j]


@_jit
def _round_to_bfloat16(row: Floats, out: Shorts) -> None:
    bits = row.view(np.uint32)
    for j in range(len(out)):
        even = (bits[j] >> np.uint32(16)) & np.uint32(1)
        out[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + even) >> np.uint32(16))


@_jit
def decode_to_bfloat16(
    packed: Octets,
    step: Floats,
    base: Floats,
    cos: Floats,
    sin: Floats,
    turns: bool,
    neox: bool,
    out: Shorts,
) -> None:
    """Decode to bits of bfloat16, uint16 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    row, turned = np.empty(2 * half, np.float32), np.empty(2 * half, np.float32)
    for u in range(units):
        for t in range(tokens):
            for h in range(heads):
                _unpack(packed[u, t, h], step[u, h], base[u, h], row)
                if turns:
                    _turn(row, cos[t], sin[t], neox, turned)
                    _round_to_bfloat16(turned, out[u, t, h])
                else:
                    _round_to_bfloat16(row, out[u, t, h])


@_jit
def decode_to_float32(
    packed: Octets,
    step: Floats,
    base: Floats,
    cos: Floats,
    sin: Floats,
    turns: bool,
    neox: bool,
    out: Floats,
) -> None:
    """Decode to float32 [units, tokens, heads, dim]; see fast.decode."""
    units, tokens, heads, half = packed.shape
    row = np.empty(2 * half, np.float32)
    for u in range(units):
        for t in range(tokens):
            for h in range(heads):
                if turns:
                    _unpack(packed[u, t, h], step[u, h], base[u, h], row)
                    _turn(row, cos[t], sin[t], neox, out[u, t, h])
                else:
                    _unpack(packed[u, t, h], step[u, h], base[u, h], out[u, t, h])

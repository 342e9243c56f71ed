"""Encode pages, and decode those of 4 bits, in one pass over memory, where numba is installed.

The result is bit for bit what torch does, but for the sign and payload of a NaN. The pass unpacks,
scales, rotates and rounds a value while it is at hand. Each operation is a float32 operation of its
own, as in quantiser.py: numba fuses none unless it is told to.

Calls of the store and the scheduler have threads beside the one that decodes. Whoever lets go of
Python's lock may wait long for it, and each operation of torch lets go of it, also to view a tensor. So
there is none here, and one call of numba's for as many units as there are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_blend.storage.codec.levels import LEVELS, Floats, Level
from sgl_blend.storage.codec.quantiser import UnitCode
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.frames import Octets

logger = logging.getLogger(__name__)

Turn = tuple[Floats, Floats]
"""cos and sin of the tokens of a page: [tokens, dim / 2], contiguous."""

_BITS = {"bfloat16": np.uint16, "float32": np.float32}
_SIGNED = {"bfloat16": np.int16, "float32": np.int32}


class Tables(NamedTuple):
    """What bins of neighbouring units stand for: bin * step + base.

    Attributes:
        step: float32 [units, heads, dim].
        base: float32, the same shape.
        mean: Of a channel, which the middle bin stands for; the same shape.
    """

    step: Floats
    base: Floats
    mean: Floats


def tables_of(codes: Sequence[UnitCode]) -> Tables:
    """Return the tables of units, none of them of differences where they are used."""
    return Tables(
        *(
            np.stack([getattr(code, name).numpy() for code in codes])
            for name in ("step", "base", "mean")
        )
    )


@functools.cache
def is_available() -> bool:
    """Tell whether numba is installed and can keep what it compiles."""
    if find_spec("numba") is None:
        return False
    try:
        from sgl_blend.storage.codec import (  # noqa: F401 - they are found where they are used
            fast_encode_kernels,
            fast_kernels,
        )
    except (ImportError, RuntimeError) as err:  # numba finds no folder that it may write to
        logger.warning("sgl-blend: pages are coded without numba: %s", err)
        return False
    return True


def takes(code: UnitCode, dtype: str, rotary_dim: int, *, neox: bool) -> bool:
    """Tell whether units are coded here, if numba is: heads that are rotated as a whole, by halves.

    Args:
        code: Of a unit.
        dtype: Of the pages.
        rotary_dim: How many channels of a head are rotated.
        neox: Whether the halves of a head form the pairs, or neighbours.
    """
    return dtype in _BITS and neox and rotary_dim == code.step.shape[-1]


def warm_up() -> None:
    """Have everything compiled, or read from the disk: no request waits for it."""
    if not is_available():
        return
    zeros = np.zeros((2, 1, 2), np.float32)
    still = zeros[:1, :, 0]
    for dtype in _BITS:
        form = PageFormat(dtype, 1, 1, 1, 2)
        page = bytearray(form.page_bytes)
        decode(np.zeros(2, np.uint8), Tables(zeros, zeros, zeros), (still, still), 0, page, form)
        values = np.zeros(form.shape, _SIGNED[dtype])
        encode(values, Tables(zeros + 1, zeros, zeros), (still, still), 0, LEVELS["q4"], form)


def encode(
    page: NDArray[Any], tables: Tables, turn: Turn, first: int, level: Level, form: PageFormat
) -> tuple[Octets, int] | None:
    """Encode neighbouring units of a page; keys and values take turns, layer by layer.

    Args:
        page: Bits of the values, int16 or int32 [K/V, layer, token, head, channel].
        tables: Of the units.
        turn: Of the page.
        first: The first unit: 2 * layer, one more for V.
        level: Of coding.
        form: Of the page, bfloat16 or float32.

    Returns:
        The packed bins, uint8, as decode takes them, and how many values were clipped. None if a
        value is not finite, or is beyond the range of float32 once it is rotated or scaled.
    """
    from sgl_blend.storage.codec import fast_encode_kernels as kernels

    units = len(tables.step)
    width = form.dim * level.bits // 8
    out = np.empty((units, form.tokens, form.heads, width), np.uint8)
    bits, shift = (np.uint16, 16) if form.dtype == "bfloat16" else (np.uint32, 0)
    clipped = kernels.encode_units(
        page.view(bits).reshape(*form.shape[:3], -1),
        first,
        np.uint32(shift),
        tables.step.reshape(units, -1),
        tables.mean.reshape(units, -1),
        *turn,
        np.float32(level.most),
        out,
    )
    return None if clipped == kernels.NOT_FINITE else (out.reshape(-1), clipped)


def decode(
    packed: Octets, tables: Tables, turn: Turn, first: int, page: bytearray, form: PageFormat
) -> None:
    """Decode neighbouring units into their page; keys and values take turns, layer by layer.

    Args:
        packed: uint8, units of [tokens, heads, dim / 2] one after the other.
        tables: Of the units.
        turn: Of the page.
        first: The first unit: 2 * layer, one more for V.
        page: The bytes of [K/V, layer, token, head, channel]; the units are filled.
        form: Of the page, bfloat16 or float32.
    """
    from sgl_blend.storage.codec import fast_kernels as kernels

    bins = packed.reshape(len(tables.step), form.tokens, form.heads, form.dim // 2)
    values = np.frombuffer(page, _BITS[form.dtype]).reshape(form.shape)
    if form.dtype == "bfloat16":
        kernels.decode_to_bfloat16(bins, tables.step, tables.base, *turn, first, values)
    else:
        kernels.decode_to_float32(bins, tables.step, tables.base, *turn, first, values)

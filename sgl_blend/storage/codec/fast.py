"""Decode 4-bit pages in one pass over memory, where numba is installed; bit for bit what torch does.

The pass unpacks, scales, rotates and rounds a value while it is at hand. Each operation is a float32
operation of its own, as in quantiser.py: numba fuses none unless it is told to.

Calls of the store and the scheduler have threads beside the one that decodes. Whoever lets go of
Python's lock may wait long for it, and each operation of torch lets go of it, also to view a tensor. So
there is none here, and one call of numba's for as many units as there are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from sgl_blend.storage.codec.levels import Floats
from sgl_blend.storage.codec.quantiser import UnitCode
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.frames import Octets

logger = logging.getLogger(__name__)

Turn = tuple[Floats, Floats]
"""cos and sin of the tokens of a page: [tokens, dim / 2], contiguous."""

_BITS = {"bfloat16": np.uint16, "float32": np.float32}


class Tables(NamedTuple):
    """What bins of neighbouring units stand for: bin * step + base.

    Attributes:
        step: float32 [units, heads, dim].
        base: float32, the same shape.
    """

    step: Floats
    base: Floats


def tables_of(codes: Sequence[UnitCode]) -> Tables:
    """Return the tables of units, none of them of differences where they are used."""
    step, base = (
        np.stack([getattr(code, name).numpy() for code in codes]) for name in ("step", "base")
    )
    return Tables(step, base)


@functools.cache
def is_available() -> bool:
    """Tell whether numba is installed and can keep what it compiles."""
    if find_spec("numba") is None:
        return False
    try:
        from sgl_blend.storage.codec import fast_kernels  # noqa: F401 - is found where it is used
    except (ImportError, RuntimeError) as err:  # numba finds no folder that it may write to
        logger.warning("sgl-blend: coded pages are decoded without numba: %s", err)
        return False
    return True


def can_decode(code: UnitCode, dtype: str, rotary_dim: int, *, neox: bool) -> bool:
    """Tell whether units are decoded here: heads that are rotated as a whole, by halves."""
    return (
        code.level.bits == 4
        and dtype in _BITS
        and neox
        and rotary_dim == code.step.shape[-1]
        and is_available()
    )


def warm_up() -> None:
    """Have everything compiled, or read from the disk: no request waits for it."""
    if not is_available():
        return
    zeros = np.zeros((2, 1, 2), np.float32)
    still = zeros[:1, :, 0]
    for dtype in _BITS:
        form = PageFormat(dtype, 1, 1, 1, 2)
        page = bytearray(form.page_bytes)
        decode(np.zeros(2, np.uint8), Tables(zeros, zeros), (still, still), 0, page, form)


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
        kernels.decode_to_bfloat16(bins, *tables, *turn, first, values)
    else:
        kernels.decode_to_float32(bins, *tables, *turn, first, values)

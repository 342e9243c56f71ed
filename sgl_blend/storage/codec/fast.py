"""Decode 4-bit pages in one pass over memory, where numba is installed; bit for bit what torch does.

The pass unpacks, scales, rotates and rounds a value while it is at hand. Each operation is a float32
operation of its own, as in quantiser.py: numba fuses none unless it is told to.
"""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from sgl_blend.storage.codec.levels import LEVELS, Floats, Transform
from sgl_blend.storage.codec.quantiser import UnitCode

logger = logging.getLogger(__name__)

Turn = tuple[torch.Tensor, torch.Tensor]


class Tables(NamedTuple):
    """What bins of neighbouring units stand for: bin * step + base.

    Attributes:
        step: float32 [units, heads, dim].
        base: float32, the same shape.
    """

    step: Floats
    base: Floats


def tables_of(code: UnitCode) -> Tables:
    """Return the tables of units whose codes are stacked."""
    # Loops over other strides than those of whole arrays are many times slower.
    step, base = (
        np.ascontiguousarray(table.flatten(0, 1).numpy()) for table in (code.step, code.base)
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


def can_decode(code: UnitCode, dtype: torch.dtype, rotary_dim: int, *, neox: bool) -> bool:
    """Tell whether units are decoded here: heads that are rotated as a whole, by halves."""
    return (
        code.level.bits == 4
        and dtype in (torch.bfloat16, torch.float32)
        and neox
        and rotary_dim == code.step.shape[-1]
        and is_available()
    )


def warm_up() -> None:
    """Have everything compiled, or read from the disk: no request waits for it."""
    if not is_available():
        return
    table, still = torch.zeros(2, 1, 1, 2), torch.zeros(1, 1)
    tables = tables_of(UnitCode(Transform.DIRECT, LEVELS["q4"], table, table, table, table, table))
    for dtype in (torch.bfloat16, torch.float32):
        page = torch.empty(2, 1, 1, 1, 2, dtype=dtype)
        decode(torch.zeros(2, dtype=torch.uint8), tables, (still, still), 0, page)


def decode(
    packed: torch.Tensor, tables: Tables, turn: Turn, first: int, page: torch.Tensor
) -> None:
    """Decode neighbouring units into their page; keys and values take turns, layer by layer.

    It is one call of Python's for many units: short ones of several threads wait for one another.

    Args:
        packed: uint8, units of [tokens, heads, dim / 2] one after the other.
        tables: Of the units.
        turn: cos and sin of the page's tokens, float32 [tokens, dim / 2], contiguous.
        first: The first unit: 2 * layer, one more for V.
        page: bfloat16 or float32 [K/V, layer, token, head, dim], contiguous; the units are filled.
    """
    from sgl_blend.storage.codec import fast_kernels as kernels

    units, heads, dim = tables.step.shape
    bins = packed.numpy().reshape(units, page.shape[2], heads, dim // 2)
    cos, sin = (part.numpy() for part in turn)
    if page.dtype == torch.bfloat16:
        bits = page.view(torch.uint16).numpy()
        kernels.decode_to_bfloat16(bins, *tables, cos, sin, first, bits)
    else:
        kernels.decode_to_float32(bins, *tables, cos, sin, first, page.numpy())

"""Decode 4-bit pages in one pass over memory, where numba is installed; bit for bit what torch does.

The pass unpacks, scales, rotates and rounds a value while it is at hand. Each operation is a float32
operation of its own, as in quantiser.py: numba fuses none unless it is told to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch

from sgl_blend.storage.codec.levels import LEVELS, Transform
from sgl_blend.storage.codec.quantiser import UnitCode

Turn = tuple[torch.Tensor, torch.Tensor, bool]


@functools.cache
def is_available() -> bool:
    """Tell whether numba is installed."""
    return find_spec("numba") is not None


def can_decode(code: UnitCode, dtype: torch.dtype) -> bool:
    """Tell whether units are decoded here."""
    return code.level.bits == 4 and dtype in (torch.bfloat16, torch.float32) and is_available()


def warm_up() -> None:
    """Have everything compiled, or read from the disk: no request waits for it."""
    if not is_available():
        return
    table, still = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1)
    code = UnitCode(Transform.DIRECT, LEVELS["q4"], table, table, table, table, table)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(1, 1, 1, 2, dtype=dtype)
        packed = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        for turn in (None, (still, still, True)):
            decode(packed, code, turn, out)


def decode(packed: torch.Tensor, code: UnitCode, turn: Turn | None, out: torch.Tensor) -> None:
    """Decode neighbouring units of one kind.

    Args:
        packed: uint8 [units, tokens, heads, dim / 2].
        code: Of the units, stacked.
        turn: cos and sin, float32 [tokens, rotary_dim / 2], and whether the halves of a head form the
            pairs; None for V.
        out: bfloat16 or float32 [units, tokens, heads, dim]; filled.
    """
    cos, sin, neox = turn or (torch.empty(len(out[0]), 0), torch.empty(len(out[0]), 0), True)
    kernel, bits = _kernel_for(out)
    kernel(
        packed.contiguous().numpy(),  # loops over other strides are many times slower
        code.step[:, 0].contiguous().numpy(),
        code.base[:, 0].contiguous().numpy(),
        cos.numpy(),
        sin.numpy(),
        turn is not None,
        neox,
        bits,
    )


def _kernel_for(out: torch.Tensor) -> tuple[Callable[..., None], np.ndarray]:
    from sgl_blend.storage.codec import fast_kernels

    if out.dtype == torch.bfloat16:
        return fast_kernels.decode_to_bfloat16, out.view(torch.int16).numpy().view(np.uint16)
    return fast_kernels.decode_to_float32, out.numpy()

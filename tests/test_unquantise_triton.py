"""The Triton kernel against the torch reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from quantised import TOKEN_COUNTS, TRANSFORMS, Unit, make_unit

from sgl_blend.kernels.bin_scales import BinScales
from sgl_blend.kernels.unquantise import unquantise
from sgl_blend.kernels.unquantise_triton import unquantise_triton
from sgl_blend.storage.codec.levels import Transform
from support import DEVICE, KERNEL_DTYPES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (heads, dim, rotary_dim, neox); rotary_dim None for V
CASES = [
    (2, 128, None, True),
    (2, 128, 128, True),
    (2, 128, 128, False),
    (3, 80, None, True),
    (3, 80, 32, True),  # both sides of the pairs in low halves of bytes
    (3, 80, 60, True),  # the second side in low and high halves
    (3, 80, 20, False),
    (1, 96, 48, True),
    (8, 16, 16, True),
    (1, 64, 64, False),
    (2, 16, 0, True),
]


def run_triton(unit: Unit) -> torch.Tensor:
    pool = unit.fresh_pool()
    there = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=DEVICE)
    there.copy_(pool)
    size = unit.packed.stride(0)
    packed = unit.packed.as_strided((len(unit.packed), size), (size, 1)).to(DEVICE)
    scales = unit.scales
    on_device = BinScales(
        scales.step.to(DEVICE),
        scales.base.to(DEVICE),
        scales.low.to(DEVICE),
        scales.anchor_step.to(DEVICE),
        bits=scales.bits,
        has_anchors=scales.has_anchors,
    )
    rotation = None
    if unit.rotation is not None:
        cos, sin, neox = unit.rotation
        rotation = cos.to(DEVICE), sin.to(DEVICE), neox
    bins = packed[:, : unit.packed.shape[1]]
    unquantise_triton(bins, on_device, rotation, unit.slots.to(DEVICE), there)
    return there.cpu()


def run_torch(unit: Unit) -> torch.Tensor:
    pool = unit.fresh_pool()
    unquantise(unit.packed, unit.scales, unit.rotation, unit.slots, pool)
    return pool


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.name.lower())
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference_bit_for_bit(
    case: tuple[int, int, int | None, bool], bits: int, transform: Transform, dtype: torch.dtype
) -> None:
    heads, dim, rotary, neox = case
    unit = make_unit(bits, transform, (3, 13, heads, dim), rotary=rotary, neox=neox, dtype=dtype)

    assert torch.equal(run_triton(unit), run_torch(unit))


@pytest.mark.parametrize("tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("pages", [1, 3])
def test_anchors_begin_anew_in_every_page(pages: int, tokens: int) -> None:
    unit = make_unit(4, Transform.ANCHORS, (pages, tokens, 1, 16), rotary=16)

    assert torch.equal(run_triton(unit), run_torch(unit))


def test_slots_that_are_not_named_keep_their_bits() -> None:
    unit = make_unit(8, Transform.ANCHORS, (2, 11, 2, 16), rotary=None)

    changed = (run_triton(unit) != unit.pool).any(dim=(1, 2)).nonzero()[:, 0].tolist()

    assert changed == sorted(unit.slots.flatten().tolist())


@pytest.mark.parametrize("shape", [(0, 11, 1, 16), (2, 0, 1, 16)], ids=str)
def test_no_tokens_are_nothing(shape: tuple[int, int, int, int]) -> None:
    unit = make_unit(4, Transform.DIRECT, shape, rotary=16)

    assert torch.equal(run_triton(unit), unit.pool)

"""The torch reference against the quantiser's own decoding, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantised import TOKEN_COUNTS, TRANSFORMS, Unit, make_unit

from sgl_blend.kernels import bin_scales
from sgl_blend.kernels.bin_scales import BinScales
from sgl_blend.kernels.unquantise import check_alignment, unquantise
from sgl_blend.storage.codec import levels
from sgl_blend.storage.codec.levels import Transform
from sgl_blend.storage.codec.quantiser import decode_unit, turn

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [16, 32, 64, 80, 96, 128]
# (rotated share of dim, neox); None for V
ROTATIONS = [None, (1.0, True), (1.0, False), (0.5, True), (0.25, True), (0.25, False)]
NAMES = ["v", "neox", "gptj", "half", "quarter", "gptj-quarter"]


def by_quantiser(unit: Unit) -> torch.Tensor:
    """Decode page by page and token by token."""
    pool = unit.fresh_pool()
    for page, data in enumerate(unit.packed):
        tokens = unit.slots.shape[1]
        values = decode_unit(data, unit.code, tokens)
        if unit.rotation is not None:
            cos, sin, neox = unit.rotation
            values = turn(values, cos[page], sin[page], neox=neox)
        for token in range(tokens):
            pool[unit.slots[page, token]] = values[token].to(pool.dtype)
    return pool


@pytest.mark.parametrize("rotated", ROTATIONS, ids=NAMES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.name.lower())
@pytest.mark.parametrize("bits", [4, 8])
def test_it_undoes_the_quantiser_bit_for_bit(
    bits: int, transform: Transform, rotated: tuple[float, bool] | None
) -> None:
    for dtype in DTYPES:
        for tokens in TOKEN_COUNTS:
            for dim in DIMS:
                share, neox = rotated or (0.0, True)
                rotary = None if rotated is None else int(share * dim)
                unit = make_unit(
                    bits, transform, (2, tokens, 2, dim), rotary=rotary, neox=neox, dtype=dtype
                )
                pool = unit.fresh_pool()

                unquantise(unit.packed, unit.scales, unit.rotation, unit.slots, pool)

                assert torch.equal(pool, by_quantiser(unit)), (dtype, tokens, dim)


def test_slots_that_are_not_named_keep_their_bits() -> None:
    unit = make_unit(4, Transform.ANCHORS, (2, 11, 2, 16), rotary=None)
    pool = unit.fresh_pool()

    unquantise(unit.packed, unit.scales, None, unit.slots, pool)

    changed = (pool != unit.pool).any(dim=(1, 2)).nonzero()[:, 0].tolist()
    assert changed == sorted(unit.slots.flatten().tolist())


def test_no_pages_and_no_tokens_are_nothing() -> None:
    unit = make_unit(4, Transform.ANCHORS, (2, 11, 2, 16), rotary=16)
    assert unit.rotation is not None
    cos, sin, neox = unit.rotation
    pool = unit.fresh_pool()

    unquantise(unit.packed[:0], unit.scales, (cos[:0], sin[:0], neox), unit.slots[:0], pool)
    unquantise(
        unit.packed[:, :0], unit.scales, (cos[:, :0], sin[:, :0], neox), unit.slots[:, :0], pool
    )

    assert torch.equal(pool, unit.pool)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.name.lower())
@pytest.mark.parametrize("bits", [4, 8])
def test_the_sizes_are_the_quantisers(bits: int, transform: Transform) -> None:
    unit = make_unit(bits, transform, (1, 1, 3, 16), rotary=None)

    assert bin_scales.ANCHOR_TOKENS == levels.ANCHOR_TOKENS
    sizes = [unit.scales.num_bytes(tokens) for tokens in range(70)]
    assert sizes == [unit.code.num_bytes(tokens) for tokens in range(70)]


def test_arguments_that_do_not_fit_are_refused() -> None:
    unit = make_unit(4, Transform.DIRECT, (2, 3, 2, 16), rotary=8)
    assert unit.rotation is not None
    packed, scales, slots, pool = unit.packed, unit.scales, unit.slots, unit.pool
    cos, sin, _ = unit.rotation

    with pytest.raises(ValueError, match=r"^packed: expected shape \(2, 48\), got \(2, 47\)$"):
        unquantise(packed[:, :47], scales, None, slots, pool)
    with pytest.raises(ValueError, match=r"^packed: expected torch\.uint8, got torch\.int8$"):
        unquantise(packed.view(torch.int8), scales, None, slots, pool)
    with pytest.raises(ValueError, match=r"^packed: expected contiguous rows, got strides"):
        unquantise(packed.t().contiguous().t(), scales, None, slots, pool)
    with pytest.raises(ValueError, match=r"^slots: expected torch\.int64, got torch\.int32$"):
        unquantise(packed, scales, None, slots.int(), pool)
    with pytest.raises(ValueError, match=r"^slots: expected shape \(None, None\), got \(6,\)$"):
        unquantise(packed, scales, None, slots.flatten(), pool)
    with pytest.raises(ValueError, match=r"^pool: expected shape \(None, 2, 16\), got"):
        unquantise(packed, scales, None, slots, pool[:, :1])
    with pytest.raises(ValueError, match=r"^pool: expected contiguous rows, got strides"):
        unquantise(packed, scales, None, slots, torch.zeros(9, 16, 2).transpose(1, 2))
    with pytest.raises(ValueError, match=r"^pool: expected float32, float16 or bfloat16, got"):
        unquantise(packed, scales, None, slots, pool.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"^cos: expected shape \(2, 3, 4\), got \(2, 2, 4\)$"):
        unquantise(packed, scales, (cos[:, :2], sin, True), slots, pool)
    with pytest.raises(ValueError, match=r"^sin: expected torch\.float32, got torch\.float64$"):
        unquantise(packed, scales, (cos, sin.double(), True), slots, pool)
    wide = torch.ones(2, 3, 9)
    with pytest.raises(ValueError, match=r"^cos: rotary_dim 18 exceeds dim 16 of the pool$"):
        unquantise(packed, scales, (wide, wide, True), slots, pool)


def test_scales_that_do_not_fit_are_refused() -> None:
    scales = make_unit(4, Transform.DIRECT, (1, 1, 2, 16), rotary=None).scales
    odd = torch.ones(2, 3)

    with pytest.raises(ValueError, match=r"^bits: expected 4 or 8, got 2$"):
        replace(scales, bits=2)
    with pytest.raises(ValueError, match=r"^base: expected shape \(2, 16\), got \(2, 3\)$"):
        replace(scales, base=odd)
    with pytest.raises(ValueError, match=r"^low: expected torch\.float32, got torch\.float64$"):
        replace(scales, low=scales.low.double())
    with pytest.raises(ValueError, match=r"^step: expected an even dim, got 3$"):
        BinScales(odd, odd, odd, odd, bits=4, has_anchors=False)


def test_pages_of_a_gpu_begin_on_sixteen_bytes() -> None:
    apart = torch.zeros(3, 40, dtype=torch.uint8)
    for bad in (apart, apart[:1, 8:]):
        with pytest.raises(ValueError, match=r"^packed: expected pages that begin on 16 bytes$"):
            check_alignment(bad)
    check_alignment(apart[:1])
    check_alignment(apart.view(-1)[:96].view(3, 32))

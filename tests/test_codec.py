"""Coded pages: what comes back is as near as the level says, and damage is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from codec_cases import coder_of, label_of, page_at, profile_of, rotation, unrotated
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.coded_pages import pack_coded, unpack_coded
from sgl_blend.storage.codec.coder import Coder
from sgl_blend.storage.codec.levels import (
    ANCHOR_TOKENS,
    LEVELS,
    CodecProfile,
    Entropy,
    Level,
    Transform,
)
from sgl_blend.storage.codec.quantiser import decode_unit, encode_unit, make_unit_code, turn
from sgl_blend.storage.codec.statistics import choose_transform
from sgl_blend.storage.container import PageFormat

DATA = Path(__file__).parent / "data"
KEY = bytes(range(32))
FORM = PageFormat("bfloat16", 3, 16, 2, 16)
EXACT = PageFormat("float32", 3, 16, 2, 16)
POSITION = 37
EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS)
TRANSFORMS = pytest.mark.parametrize("transform", Transform)


def values_of(page: bytearray, form: PageFormat) -> torch.Tensor:
    return torch.frombuffer(page, dtype=getattr(torch, form.dtype)).view(form.shape).float()


def round_trip(
    form: PageFormat, level: str, position: int = POSITION, key: bytes | None = None, **more: Any
) -> tuple[torch.Tensor, torch.Tensor, CodecProfile]:
    """Return what was stored, what came back, and the profile."""
    coder, profile = coder_of(form, level, **more)
    page, values = page_at(form, rotation(form), position, 5)
    label = label_of(form, profile, level)
    data, clipped = pack_coded(page, label, coder, position, key)
    assert clipped <= len(values.view(-1)) // 100
    back = unpack_coded(data, label, coder, key)
    assert isinstance(back, bytearray), back
    return values, values_of(back, form), profile


def half_bins(profile: CodecProfile, form: PageFormat, level: Level, transform: Transform) -> Any:
    """Return half a bin by [K/V, layer, 1, head, channel]; keys' after their rotation."""
    steps = [
        make_unit_code(profile, level, index, transform, slice(None)).step / 2
        for index in range(2 * form.layers)
    ]
    bound = torch.stack(steps).view(form.layers, 2, 1, form.heads, form.dim).transpose(0, 1)
    # A rotation mixes the two channels of a pair.
    half = form.dim // 2
    pairs = torch.hypot(bound[0, ..., :half], bound[0, ..., half:])
    return torch.stack([torch.cat([pairs, pairs], -1), bound[1]])


@EVERY_LEVEL
@TRANSFORMS
@pytest.mark.parametrize("entropy", Entropy)
def test_no_value_moves_by_more_than_half_a_bin(
    level: str, transform: Transform, entropy: Entropy
) -> None:
    if entropy is Entropy.ARITHMETIC:
        pytest.importorskip("constriction")
    sent, back, profile = round_trip(EXACT, level, transform=transform, entropy=entropy)
    bound = half_bins(profile, EXACT, LEVELS[level], transform)
    if transform is Transform.ANCHORS:
        # Anchors themselves are rounded to 8 bits, which is coarser than a bin of q8 is.
        sent, back = sent[:, :, 1:ANCHOR_TOKENS], back[:, :, 1:ANCHOR_TOKENS]
    assert ((sent - back).abs() <= bound * (1 + 1e-4) + 1e-5).all()
    assert (sent != back).any(), "nothing was rounded"


@EVERY_LEVEL
def test_coarser_levels_are_smaller_and_further_off(level: str) -> None:
    form = PageFormat("bfloat16", 3, 64, 2, 64)
    sizes, errors = [], []
    for name in LEVELS:
        coder, profile = coder_of(form, name)
        page, values = page_at(form, rotation(form), 0, 5)
        label = label_of(form, profile, name)
        data, _ = pack_coded(page, label, coder, 0)
        back = unpack_coded(data, label, coder)
        assert isinstance(back, bytearray)
        sizes.append(len(data))
        errors.append(float((values_of(back, form) - values).square().mean()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


def test_deeper_layers_have_coarser_bins() -> None:
    level = LEVELS["q4"]
    assert [level.bin_of(layer, 6) for layer in range(6)] == [2 / 3, 2 / 3, 1, 1, 1.5, 1.5]
    assert [level.bin_of(layer, 2) for layer in range(2)] == [2 / 3, 1]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.tuples(
        st.integers(1, 7), st.integers(1, 33), st.integers(1, 3), st.sampled_from([8, 16, 64])
    ),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    level=st.sampled_from(sorted(LEVELS)),
    transform=st.sampled_from(Transform),
    position=st.integers(0, 200),
)
def test_pages_of_any_shape_come_back(
    sizes: tuple[int, int, int, int],
    dtype: str,
    level: str,
    transform: Transform,
    position: int,
) -> None:
    form = PageFormat(dtype, *sizes)
    sent, back, _ = round_trip(form, level, position, KEY, transform=transform)
    assert (sent - back).square().mean() < sent.square().mean()  # which a page of zeros has


@pytest.mark.parametrize("neox", [True, False])
def test_the_same_tokens_elsewhere_have_the_same_bins(neox: bool) -> None:
    form, level = EXACT, "q4"
    profile = profile_of(form)
    coder = Coder(profile, level, form, rotation(form, neox=neox))
    frames = []
    for position in (0, 90):
        page, _ = page_at(form, rotation(form, neox=neox), position, 5)
        values = torch.frombuffer(bytearray(page), dtype=torch.float32).view(form.shape)
        coded = coder.encode(values, 0, coder.frames[0], position)
        assert coded is not None
        frames.append(np.frombuffer(zstandard.ZstdDecompressor().decompress(coded[0]), np.uint8))
    assert (frames[0] != frames[1]).mean() < 1e-3, (
        "only values at the border of two bins may differ"
    )


def test_a_value_that_is_no_number_is_kept_bit_for_bit() -> None:
    coder, profile = coder_of(FORM, "q4")
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    label = label_of(FORM, profile, "q4")
    bits = np.frombuffer(page, "<u2").copy()
    bits[5], bits[-3] = 0x7FC1, 0xFF80  # a NaN with a payload, and -inf
    data, _ = pack_coded(bits.tobytes(), label, coder, POSITION)
    assert unpack_coded(data, label, coder) == bytearray(bits.tobytes())


@pytest.mark.parametrize("bits_of_one", [0x7FC1, 0x7F80, 0xFF80], ids=["NaN", "inf", "-inf"])
def test_one_value_without_a_bin_keeps_its_frame_lossless(bits_of_one: int) -> None:
    coder, profile = coder_of(FORM, "q4")
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    label = label_of(FORM, profile, "q4")
    bits = np.frombuffer(page, "<u2").copy()
    bits[5] = bits_of_one
    data, clipped = pack_coded(bits.tobytes(), label, coder, POSITION)
    made = unpack_coded(data, label, coder)
    assert isinstance(made, bytearray)
    assert np.frombuffer(made, "<u2")[5] == bits_of_one
    assert clipped == 0


def test_clipped_values_are_counted() -> None:
    coder, profile = coder_of(EXACT, "q4")
    _, values = page_at(EXACT, rotation(EXACT), 0, 5)
    values[1, 2, 3, 1, 7] = 1e6
    page = values.numpy().tobytes()
    _, clipped = pack_coded(page, label_of(EXACT, profile, "q4"), coder, 0)
    assert clipped == 1


def test_arithmetic_coding_is_no_larger_than_what_its_distributions_say() -> None:
    pytest.importorskip("constriction")
    form = PageFormat("bfloat16", 2, 64, 2, 64)
    sizes = {}
    for entropy in Entropy:
        coder, profile = coder_of(form, "q4-1.5", entropy=entropy)
        page, _ = page_at(form, rotation(form), 0, 5)
        sizes[entropy] = len(pack_coded(page, label_of(form, profile, "q4-1.5"), coder, 0)[0])
    assert sizes[Entropy.ARITHMETIC] < sizes[Entropy.ZSTD] < 1.25 * sizes[Entropy.ARITHMETIC]


def test_alike_neighbours_are_coded_as_differences() -> None:
    form = PageFormat("float32", 1, 40, 1, 64)
    profile = profile_of(form)
    level = LEVELS["q4"]
    draw = torch.Generator().manual_seed(3)
    bases = [torch.randn(4, 1, 1, 64, generator=draw).repeat(1, 10, 1, 1) for _ in range(8)]
    alike = [b.view(40, 1, 64) + 0.2 * torch.randn(40, 1, 64, generator=draw) for b in bases]
    apart = [unrotated(form, seed)[1, 0] for seed in range(4)]
    like = profile_of(form, pages=[torch.stack([page[None], page[None]]) for page in alike])
    assert choose_transform(like, level, 1, alike)[0] is Transform.ANCHORS
    assert choose_transform(profile, level, 1, apart)[0] is Transform.DIRECT
    # Pages are stored one by one: those that repeat an earlier one are no smaller.
    once, again = (choose_transform(like, level, 1, alike[:1] * n)[1] for n in (1, 4))
    assert once == pytest.approx(again)


def test_numpy_agrees_bit_for_bit() -> None:
    code = make_unit_code(profile_of(EXACT), LEVELS["q4"], 3, Transform.DIRECT, slice(None))
    x = unrotated(EXACT, 7)[1, 1]
    packed, _ = encode_unit(x, code)
    step, base, mean = (t.numpy() for t in (code.step, code.base, code.mean))
    bins = (np.rint((x.numpy() - mean) / step).clip(-7, 7) + 7).astype(np.uint8)
    octets = packed.numpy().reshape(16, 2, 8)
    assert (np.concatenate([octets & 15, octets >> 4], -1) == bins).all()
    values = bins.astype(np.float32) * step + base
    assert (decode_unit(packed, code, 16).numpy() == values).all()


def test_turning_back_is_no_turn() -> None:
    x = unrotated(EXACT, 1)[0, 0]
    cos, sin = rotation(EXACT).tables(11, EXACT.tokens)
    for neox in (True, False):
        there = turn(x, cos, sin, neox=neox)
        assert (turn(there, cos, -sin, neox=neox) - x).abs().max() < 1e-5
        assert (there - x).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (3, 16, 2, 64), (8, 5, 3, 16), (2, 64, 8, 128)])
def test_numba_agrees_bit_for_bit(
    dtype: str, neox: bool, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    form = PageFormat(dtype, *sizes)
    profile = profile_of(form)
    pages = []
    for has_numba in (True, False):
        monkeypatch.setattr(fast, "is_available", lambda has_numba=has_numba: has_numba)
        coder = Coder(profile, "q4-1.5", form, rotation(form, neox=neox))
        page, _ = page_at(form, rotation(form, neox=neox), POSITION, 5)
        label = label_of(form, profile, "q4-1.5")
        data, _ = pack_coded(page, label, coder, POSITION)
        pages.append(unpack_coded(data, label, coder))
    assert isinstance(pages[0], bytearray)
    assert pages[0] == pages[1]


def test_numba_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    seen = []
    stock = fast.decode

    def decode(*args: Any) -> None:
        seen.append(1)
        stock(*args)

    monkeypatch.setattr(fast, "decode", decode)
    round_trip(FORM, "q4")
    assert seen
    seen.clear()
    round_trip(FORM, "q8")
    assert not seen

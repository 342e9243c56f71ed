"""Pages are encoded to the same bytes with numba as without it, and stay as they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from codec_cases import coder_of, label_of, page_at, profile_of, rotation, unrotated
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.coded_pages import pack_coded
from sgl_blend.storage.codec.coder import Coder
from sgl_blend.storage.codec.levels import LEVELS, Transform
from sgl_blend.storage.codec.quantiser import UnitCode, encode_unit, make_unit_code, turn
from sgl_blend.storage.container import PageFormat

POSITION = 37
SIZES = [(1, 1, 1, 2), (3, 5, 3, 6), (2, 16, 1, 64), (8, 16, 2, 64), (2, 64, 8, 128)]
DTYPES = {"bfloat16": (torch.bfloat16, torch.int16), "float32": (torch.float32, torch.int32)}
BEYOND = [0.0, -0.0, 1e-45, -1e-40, 30.0, -30.0, 1e4, -1e9, 3e38, -3e38]
NOT_FINITE = [math.inf, -math.inf, math.nan]


def values_of(form: PageFormat, extremes: list[float], seed: int = 5) -> torch.Tensor:
    """Return a page with extremes at chance places: of the form's dtype, [2, layers, ...]."""
    page, _ = page_at(form, rotation(form), POSITION, seed)
    values = torch.frombuffer(bytearray(page), dtype=DTYPES[form.dtype][0]).clone()
    draw = torch.Generator().manual_seed(seed)
    for extreme in extremes:
        values[int(torch.randint(len(values), (), generator=draw))] = extreme
    return values.view(form.shape)


def packed_by(
    has_numba: bool, values: torch.Tensor, form: PageFormat, level: str, **more: Any
) -> tuple[bytes, int]:
    """Return the object of a page and how many values were clipped."""
    profile = profile_of(form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "is_available", lambda: has_numba)
        coder = Coder(profile, level, form, rotation(form, **more))
        page = values.reshape(-1).view(torch.uint8).numpy()
        data, clipped = pack_coded(page.data, label_of(form, profile, level), coder, POSITION)
    return bytes(data), clipped


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("extremes", [[], BEYOND, NOT_FINITE[:1], BEYOND + NOT_FINITE], ids=len)
def test_numba_encodes_the_same_bytes(
    level: str, dtype: str, sizes: tuple[int, int, int, int], extremes: list[float]
) -> None:
    pytest.importorskip("numba")
    form = PageFormat(dtype, *sizes)
    values = values_of(form, extremes)
    with_numba, without = (packed_by(one, values, form, level) for one in (True, False))
    assert with_numba == without
    if extremes == BEYOND and values.numel() > 1000:
        assert with_numba[1] >= 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_numba_does_not_rotate_is_encoded_by_torch(dtype: str) -> None:
    form = PageFormat(dtype, 3, 16, 2, 16)
    values = values_of(form, BEYOND)
    made = [packed_by(one, values, form, "q4", neox=False) for one in (True, False)]
    assert made[0] == made[1]


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8),
    level=st.sampled_from(list(LEVELS)),
)
def test_numba_encodes_any_bits_as_torch_does(bits: list[int], level: str) -> None:
    pytest.importorskip("numba")
    form = PageFormat("float32", 1, 1, 1, 4)
    values = torch.from_numpy(np.array(bits, np.uint32).view(np.float32)).view(form.shape)
    found: list[tuple[bytes, int] | str] = []
    for has_numba in (True, False):
        try:
            found.append(packed_by(has_numba, values, form, level))
        except (ValueError, RuntimeError) as err:  # what is rotated may have no value
            found.append(str(err))
    assert found[0] == found[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_halves_between_bins_are_rounded_to_even_ones_and_clipped_beyond_the_last(
    bits: int,
) -> None:
    pytest.importorskip("numba")
    level = next(level for level in LEVELS.values() if level.bits == bits)
    form = PageFormat("float32", 1, 5, 2, 256)
    halves = torch.linspace(-129.5, 130, 520)[:512].repeat(2 * 5).view(form.shape)
    ones, zeros = torch.ones(2, 2, 256).numpy(), torch.zeros(2, 2, 256).numpy()
    still = torch.ones(5, 128).numpy(), torch.zeros(5, 128).numpy()
    tables = fast.Tables(ones, zeros, zeros)
    made = fast.encode(halves.view(torch.int32).numpy(), tables, still, 0, level, form)
    assert made is not None
    rounded = np.rint(halves.numpy())
    bins = (rounded.clip(-level.most, level.most) + level.most).astype(np.uint8)
    if bits == 4:
        bins = bins[..., :128] | bins[..., 128:] << 4
    assert (made[0] == bins.reshape(-1)).all()
    assert made[1] == (abs(rounded) > level.most).sum() > 0


@pytest.mark.parametrize("level", ["q4", "q8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_only_value_that_is_clipped_is_counted(level: str, sign: int) -> None:
    chosen = LEVELS[level]
    form = PageFormat("float32", 1, 2, 1, 4)
    values = torch.zeros(form.shape)
    values[1, 0, 1, 0, 2] = sign * (chosen.most + 0.5)  # rounded to the even number beyond
    ones, zeros = torch.ones(1, 4), torch.zeros(1, 4)
    code = UnitCode(Transform.DIRECT, chosen, ones, zeros, zeros, zeros, ones)
    packed, clipped = encode_unit(values[1, 0], code)
    assert clipped == 1
    pytest.importorskip("numba")
    tables = fast.Tables(*(part.expand(1, 1, 4).numpy() for part in (ones, zeros, zeros)))
    still = torch.ones(2, 2).numpy(), torch.zeros(2, 2).numpy()
    made = fast.encode(values.view(torch.int32).numpy(), tables, still, 1, chosen, form)
    assert made is not None
    assert (made[0] == packed.numpy()).all()
    assert made[1] == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("tokens", [1, 2, 10, 21])
def test_torch_rounds_as_its_formula_says(level: str, transform: Transform, tokens: int) -> None:
    form = PageFormat("float32", 3, tokens, 2, 16)
    code = make_unit_code(profile_of(form), LEVELS[level], 3, transform, slice(None))
    x = unrotated(form, 7)[1, 1]
    x[0, 0, :2] = torch.tensor([1e9, -1e9])
    before = x.clone()
    packed, clipped = encode_unit(x, code)
    assert torch.equal(x, before)
    step, mean, low, wide = (
        part.numpy() for part in (code.step, code.mean, code.low, code.anchor_step)
    )
    origin, rows, head = mean[None], x.numpy(), np.empty(0, np.uint8)
    if transform is Transform.ANCHORS:
        anchors = np.rint((x[::10].numpy() - low) / wide).clip(0, 255)
        head = anchors.astype(np.uint8).reshape(-1)
        owners = np.array([t // 10 for t in range(tokens) if t % 10], np.int64)
        origin = (anchors * wide + low)[owners]
        rows = rows[[t for t in range(tokens) if t % 10]]
    most = code.level.most
    rounded = np.rint((rows - origin) / step)
    bins = (rounded.clip(-most, most) + most).astype(np.uint8)
    if code.level.bits == 4:
        bins = bins[..., :8] | bins[..., 8:] << 4
    assert (packed.numpy() == np.concatenate([head, bins.reshape(-1)])).all()
    assert clipped == (abs(rounded) > most).sum()


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_torch_rotates_as_its_formula_says(neox: bool, rotary_dim: int) -> None:
    form = PageFormat("float32", 1, 5, 3, 16)
    x = unrotated(form, 7)[0, 0]
    cos, sin = (part[:, : rotary_dim // 2] for part in rotation(form).tables(11, 5))
    half = rotary_dim // 2
    first = list(range(half)) if neox else list(range(0, rotary_dim, 2))
    second = [one + (half if neox else 1) for one in first]
    c, s, before = cos.numpy()[:, None], sin.numpy()[:, None], x.numpy().copy()
    wanted = before.copy()
    wanted[..., first] = before[..., first] * c - before[..., second] * s
    wanted[..., second] = before[..., second] * c + before[..., first] * s
    assert (turn(x, cos.contiguous(), sin.contiguous(), neox=neox).numpy() == wanted).all()
    assert (x.numpy() == before).all()


@pytest.mark.parametrize("has_numba", [True, False], ids=["numba", "torch"])
@pytest.mark.parametrize("level", ["q8", "q4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_is_not_changed_by_being_encoded(level: str, dtype: str, has_numba: bool) -> None:
    if has_numba:
        pytest.importorskip("numba")
    form = PageFormat(dtype, 2, 64, 8, 128)  # of frames of one unit
    values = values_of(form, BEYOND)
    before = values.clone()
    packed_by(has_numba, values, form, level)
    bits = DTYPES[dtype][1]
    assert torch.equal(values.view(bits), before.view(bits))


def test_numba_encodes_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    seen: list[str] = []
    stock = fast.encode

    def encode(*args: Any) -> Any:
        seen.append(args[4].name)
        return stock(*args)

    monkeypatch.setattr(fast, "encode", encode)
    form = PageFormat("bfloat16", 3, 16, 2, 16)
    for level in ("q8", "q4"):
        coder, profile = coder_of(form, level)
        page, _ = page_at(form, rotation(form), POSITION, 5)
        pack_coded(page, label_of(form, profile, level), coder, POSITION)
    assert set(seen) == {"q8", "q4"}

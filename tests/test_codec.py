"""Coded pages: what comes back is as near as the level says, and damage is noticed."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from codec_cases import WEIGHTS, label_of, page_at, profile_of, rotation, unrotated
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from sgl_blend.errors import ConfigError
from sgl_blend.storage.codec import coded_pages, fast
from sgl_blend.storage.codec.coded_pages import pack_coded, unpack_coded
from sgl_blend.storage.codec.coder import Coder
from sgl_blend.storage.codec.levels import (
    ANCHOR_TOKENS,
    LEVELS,
    CodecProfile,
    Entropy,
    Level,
    Transform,
    check_levels,
    read_profile,
    write_profile,
)
from sgl_blend.storage.codec.quantiser import decode_unit, encode_unit, make_unit_code, turn
from sgl_blend.storage.codec.statistics import choose_transform
from sgl_blend.storage.container import PageFormat, unpack
from sgl_blend.storage.envelope import Fault

DATA = Path(__file__).parent / "data"
KEY = bytes(range(32))
FORM = PageFormat("bfloat16", 3, 16, 2, 16)
EXACT = PageFormat("float32", 3, 16, 2, 16)
POSITION = 37
EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS)
TRANSFORMS = pytest.mark.parametrize("transform", Transform)


def coder_of(form: PageFormat, level: str, **more: Any) -> tuple[Coder, CodecProfile]:
    profile = profile_of(form, **more)
    return Coder(profile, level, form, rotation(form)), profile


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
    assert (sent - back).square().mean() < 3 * sent.square().mean()


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
@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (3, 16, 2, 64), (8, 5, 3, 16)])
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


# --- what is damaged is noticed -----------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@TRANSFORMS
def test_every_flipped_byte_and_every_cut_is_noticed(
    key: bytes | None, transform: Transform
) -> None:
    form = PageFormat("bfloat16", 2, 11, 1, 8)
    coder, profile = coder_of(form, "q4", transform=transform)
    page, _ = page_at(form, rotation(form), POSITION, 5)
    label = label_of(form, profile, "q4")
    data, _ = pack_coded(page, label, coder, POSITION, key)
    for index in range(len(data)):
        for flip in (0x01, 0x80):
            data[index] ^= flip
            assert unpack_coded(data, label, coder, key) is Fault.CORRUPT, index
            data[index] ^= flip
        assert unpack_coded(data[:index], label, coder, key) is Fault.CORRUPT, index
    assert isinstance(unpack_coded(data, label, coder, key), bytearray)


def _sealed(body: bytes, version: int = 2) -> bytes:
    data = struct.pack("<4sHHQ", b"SGB1", version, 0, 32 + len(body)) + body
    return data + xxh3_128_digest(data)


def _changed(place: int, value: Any) -> tuple[bytes, Any, Coder]:
    """Return an object with a good checksum and another header, its label and its coder."""
    coder, profile = coder_of(FORM, "q4")
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    label = label_of(FORM, profile, "q4")
    good, _ = pack_coded(page, label, coder, POSITION)
    (length,) = struct.unpack_from("<I", good, 16)
    header = msgspec.msgpack.decode(good[20 : 20 + length])
    header[place] = value
    made = msgspec.msgpack.encode(header)
    body = struct.pack("<I", len(made)) + made + bytes(good[20 + length : -16])
    return _sealed(body), label, coder


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "q8"),
        (1, "float16"),
        (2, [2, 3, 16, 2, 32]),
        (3, "v" * 32),
        (4, "another rotary"),
        (5, "another name"),
        (6, "another profile"),
    ],
)
def test_what_is_of_something_else_is_a_mismatch(place: int, value: Any) -> None:
    data, label, coder = _changed(place, value)
    assert unpack_coded(data, label, coder) is Fault.MISMATCH


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (7, -1),
        (7, 1 << 40),  # beyond what the model can rotate to
        (8, []),
        (8, [[6, 2, 1 << 40]]),
        (8, [[6, 2, -1]]),
        (8, [[6, 9, 100]]),
        (8, [[1 << 40, 2, 100]]),
        (8, [[3, 2, 100], [3, 2, 100]]),
    ],
)
def test_absurd_headers_are_corrupt(place: int, value: Any) -> None:
    data, label, coder = _changed(place, value)
    assert unpack_coded(data, label, coder) is Fault.CORRUPT


@pytest.mark.parametrize("size", [0, 1, 767, 769, 1 << 34])
def test_a_frame_that_grows_to_another_size_is_corrupt(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coder, profile = coder_of(FORM, "q4")
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    label = label_of(FORM, profile, "q4")
    if size < 1 << 30:
        bomb = zstandard.ZstdCompressor().compress(bytes(size))
    else:  # a frame that says that it holds 16 GiB
        bomb = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x02\x00\x00"
    monkeypatch.setattr(coder, "encode", lambda *args: (bomb, 0))
    data, _ = pack_coded(page, label, coder, POSITION)
    assert unpack_coded(data, label, coder) is Fault.CORRUPT


@settings(deadline=None, max_examples=200)
@given(body=st.binary(max_size=300))
def test_no_body_with_a_good_checksum_makes_it_raise(body: bytes) -> None:
    coder, profile = _CASE
    label = label_of(FORM, profile, "q4")
    for data in (_sealed(body), _sealed(struct.pack("<I", len(body)) + body), body):
        assert isinstance(unpack_coded(data, label, coder), Fault)


_CASE = coder_of(FORM, "q4")


def test_versions_know_each_other() -> None:
    coder, profile = coder_of(FORM, "q4")
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    label = label_of(FORM, profile, "q4")
    data, _ = pack_coded(page, label, coder, POSITION)
    assert unpack(data, label) is Fault.VERSION
    assert unpack_coded(_sealed(b"", version=1), label, coder) is Fault.VERSION
    assert unpack_coded(_sealed(b"", version=3), label, coder) is Fault.VERSION


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_objects_of_this_version_are_readable_for_ever(name: str) -> None:
    # Written once by version 2, with the profile beside it.
    profile = read_profile(DATA / "codec-v1.profile")
    form = PageFormat("bfloat16", 2, 16, 1, 16)
    coder = Coder(profile, "q4", form, rotation(form))
    label = replace(label_of(form, profile, "q4"), name="sgb2-q4-golden")
    data = (DATA / f"page-v2-{name}.sgb").read_bytes()
    back = unpack_coded(data, label, coder, KEY if name == "encrypted" else None)
    assert back == bytearray((DATA / "page-v2.kv").read_bytes())


# --- profiles -----------------------------------------------------------------------------------


def test_a_profile_comes_back(tmp_path: Path) -> None:
    profile = profile_of(FORM)
    write_profile(profile, tmp_path / "profile")
    assert read_profile(tmp_path / "profile") == profile
    assert read_profile(tmp_path / "profile").digest() == profile.digest()


def test_profiles_that_round_in_another_way_have_another_digest() -> None:
    profile = profile_of(FORM)
    others = [
        profile_of(FORM, transform=Transform.ANCHORS),
        profile_of(FORM, weights="v" * 32),
        profile_of(FORM, pages=[unrotated(FORM, 1)]),
    ]
    assert len({other.digest() for other in (profile, *others)}) == 4
    same = msgspec.structs.replace(profile, data="another name", prompts=7)
    assert same.digest() == profile.digest()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v": 2}, "version 2"),
        ({"layers": 4}, "do not fit"),
        ({"heads": 0}, "shape"),
        ({"dim": 15}, "shape"),
        ({"entropy": 7}, "unknown coder 7"),
        ({"units": []}, "do not fit"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write_profile(msgspec.structs.replace(profile_of(FORM), **changes), tmp_path / "profile")
    with pytest.raises(ConfigError, match=reason):
        read_profile(tmp_path / "profile")


def test_scales_that_are_no_scales_are_refused(tmp_path: Path) -> None:
    profile = profile_of(FORM)
    rows = len(profile.units[0].sigma)
    for name, value in (("sigma", 0.0), ("sigma", float("nan")), ("low", 1e9)):
        row = np.full(rows // 4, value, "<f4").tobytes()
        unit = msgspec.structs.replace(profile.units[0], **{name: row})
        made = msgspec.structs.replace(profile, units=[unit, *profile.units[1:]])
        write_profile(made, tmp_path / "profile")
        with pytest.raises(ConfigError, match="scale"):
            read_profile(tmp_path / "profile")


def test_a_level_that_cannot_be_is_refused(tmp_path: Path) -> None:
    profile = profile_of(FORM)
    figures = profile.levels["q4"]
    for levels, reason in (
        ({"q3": figures}, "unknown level 'q3'"),
        ({"q4": msgspec.structs.replace(figures, transforms=[0])}, "unknown transforms"),
        ({"q4": msgspec.structs.replace(figures, transforms=[9] * 6)}, "unknown transforms"),
    ):
        write_profile(msgspec.structs.replace(profile, levels=levels), tmp_path / "profile")
        with pytest.raises(ConfigError, match=reason):
            read_profile(tmp_path / "profile")
    made = msgspec.structs.replace(profile, entropy=int(Entropy.ARITHMETIC))
    write_profile(made, tmp_path / "profile")
    with pytest.raises(ConfigError, match="no distributions"):
        read_profile(tmp_path / "profile")


@pytest.mark.parametrize("content", [b"", b"\x00", b"\x80", b"\xff" * 100, b"{}", b"\x81\xa1\xff"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "profile").write_bytes(content)
    with pytest.raises(ConfigError, match="is no codec profile"):
        read_profile(tmp_path / "profile")
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "missing")


def test_levels_are_those_of_the_profile() -> None:
    profile = profile_of(FORM)
    assert check_levels(["q4-2.0", "lossless", "q8"], profile) == ("lossless", "q8", "q4-2.0")
    bare = msgspec.structs.replace(profile, levels={"q8": profile.levels["q8"]})
    with pytest.raises(ConfigError, match="q4 is not in the profile, which has lossless, q8"):
        check_levels(["q4"], bare)
    with pytest.raises(ConfigError, match="needs --blend-store-profile"):
        check_levels(["q8"], None)
    with pytest.raises(ConfigError, match="unknown level 'q5'"):
        check_levels(["q5"], profile)
    assert check_levels(["lossless"], None) == ("lossless",)


def test_the_version_of_coded_pages_is_not_that_of_lossless_ones() -> None:
    assert coded_pages.FORMAT_VERSION == 2
    assert WEIGHTS not in label_of(FORM, profile_of(FORM), "q4").name

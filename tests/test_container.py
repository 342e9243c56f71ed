"""A stored page comes back bit for bit, or the container says what is wrong with it."""

import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from sgl_blend.storage import container
from sgl_blend.storage.container import PageFormat, PageLabel, pack, unpack
from sgl_blend.storage.envelope import Fault

DATA = Path(__file__).parent / "data"
KEY = bytes(range(32))
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
DTYPES = ("bfloat16", "float16", "float32")
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 65504.0, 1.0)
SMALL = PageLabel("sgb1-lossless-00", PageFormat("bfloat16", 3, 4, 1, 8), "w" * 32, "r")
BIG = PageFormat("bfloat16", 4, 64, 8, 128)


def random_page(form: PageFormat, seed: int = 0) -> bytes:
    made = torch.randn(form.shape, generator=torch.Generator().manual_seed(seed))
    made.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return made.to(getattr(torch, form.dtype)).view(torch.uint8).numpy().tobytes()


def random_bits(form: PageFormat) -> bytes:
    return np.random.default_rng(1).bytes(form.page_bytes)


def _sealed(body: bytes, *, version: int = 1, flags: int = 0) -> bytes:
    """Return an object with any body, and a checksum that is right."""
    data = struct.pack("<4sHHQ", b"SGB1", version, flags, 32 + len(body)) + body
    return data + xxh3_128_digest(data)


def _with_header(*, body: bytes | None = None, **changes: Any) -> bytes:
    """Return the object of a page of zeros whose header says something else."""
    good = pack(bytes(SMALL.format.page_bytes), SMALL)
    (length,) = struct.unpack_from("<I", good, 16)
    header = msgspec.msgpack.decode(good[20 : 20 + length]) | changes
    made = msgspec.msgpack.encode(header)
    frames = good[20 + length : -16] if body is None else body
    return _sealed(struct.pack("<I", len(made)) + made + frames)


# --- what was written comes back ----------------------------------------------------------------


@KEYS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (3, 4, 1, 8), (6, 16, 2, 64), (2, 64, 8, 128)])
def test_a_page_comes_back_bit_for_bit(
    dtype: str, sizes: tuple[int, int, int, int], key: bytes | None
) -> None:
    label = replace(SMALL, format=PageFormat(dtype, *sizes))
    for page in (random_page(label.format), random_bits(label.format)):
        assert unpack(pack(page, label, key), label, key) == bytearray(page)


@settings(deadline=None, max_examples=50)
@given(
    form=st.builds(
        PageFormat,
        st.sampled_from(DTYPES),
        *(st.integers(1, most) for most in (9, 70, 3, 65)),
    ),
    seed=st.integers(0, 99),
)
def test_a_page_of_any_shape_comes_back(form: PageFormat, seed: int) -> None:
    label = replace(SMALL, format=form)
    page = np.random.default_rng(seed).integers(0, 256, form.page_bytes, np.uint8)
    page[1::2] &= 0x43
    data = pack(page.tobytes(), label)
    assert unpack(data, label) == bytearray(page.tobytes())
    assert len(data) <= form.max_object_bytes


def test_the_same_page_gives_the_same_object_and_a_nonce_is_never_used_twice() -> None:
    page = random_page(SMALL.format)
    assert pack(page, SMALL) == pack(page, SMALL)
    assert len({bytes(pack(page, SMALL, KEY)[16:28]) for _ in range(100)}) == 100


def test_kv_is_about_a_quarter_smaller() -> None:
    label = replace(SMALL, format=BIG)
    assert len(pack(random_page(BIG), label)) < 0.75 * BIG.page_bytes


def test_frames_are_small_pages_or_layers() -> None:
    assert PageFormat("bfloat16", 6, 16, 2, 64).frames == [8, 4]
    assert BIG.frames == [1] * 8
    assert sum(PageFormat("float32", 7, 5, 1, 64).frames) == 14


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_objects_of_this_version_are_readable_for_ever(name: str) -> None:
    # Written once by version 1; a later version reads them, or has another number.
    label = PageLabel("sgb1-lossless-golden", PageFormat("bfloat16", 3, 16, 2, 8), "weights", "rot")
    page = np.arange(label.format.page_bytes // 2, dtype=np.uint64) * 2654435761 >> 7
    page = (page & 0x81FF | 0x3E00).astype("<u2")
    data = (DATA / f"page-v1-{name}.sgb").read_bytes()
    assert unpack(data, label, KEY if name == "encrypted" else None) == bytearray(page.tobytes())


# --- what is damaged is noticed -----------------------------------------------------------------


@KEYS
def test_every_flipped_byte_is_noticed(key: bytes | None) -> None:
    data = bytearray(pack(random_page(SMALL.format), SMALL, key))
    for index in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            data[index] ^= flip
            assert unpack(data, SMALL, key) is Fault.CORRUPT, index
            data[index] ^= flip
    assert isinstance(unpack(data, SMALL, key), bytearray)


@KEYS
def test_every_cut_is_noticed_and_so_is_more(key: bytes | None) -> None:
    data = pack(random_page(SMALL.format), SMALL, key)
    for length in range(len(data)):
        assert unpack(data[:length], SMALL, key) is Fault.CORRUPT, length
    assert unpack(data + b"\0", SMALL, key) is Fault.CORRUPT
    assert unpack(data + bytes(1 << 20), SMALL, key) is Fault.CORRUPT


@KEYS
@settings(deadline=None, max_examples=300)
@given(blob=st.binary(max_size=600))
def test_no_bytes_make_it_raise(key: bytes | None, blob: bytes) -> None:
    assert unpack(blob, SMALL, key) is Fault.CORRUPT
    assert unpack(b"SGB1" + blob, SMALL, key) is Fault.CORRUPT


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=200), header=st.binary(max_size=200))
@example(body=b"", header=b"\x81\xa4\x00\x00\x00\x80")  # a name that is no UTF-8
def test_no_body_with_a_good_checksum_makes_it_raise(body: bytes, header: bytes) -> None:
    assert unpack(_sealed(body), SMALL) is Fault.CORRUPT
    framed = struct.pack("<I", len(header)) + header + body
    assert unpack(_sealed(framed), SMALL) is Fault.CORRUPT


@pytest.mark.parametrize("length", [0xFFFFFFFF, 1 << 31, 1 << 16, (1 << 16) + 1, 5])
def test_an_absurd_header_length_is_noticed(length: int) -> None:
    assert unpack(_sealed(struct.pack("<I", length) + b"abcd"), SMALL) is Fault.CORRUPT


def test_a_nested_header_is_noticed() -> None:
    deep = b"\x91" * (sys.getrecursionlimit() * 4) + b"\xc0"
    for header in (deep, b"\x88" + b"\xa1v" + deep, b"\x88" + b"\xa6frames" + deep):
        body = struct.pack("<I", len(header)) + header
        assert unpack(_sealed(body), SMALL) is Fault.CORRUPT


RAW_SIZE = SMALL.format.page_bytes


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [[6, 0, 10**15, RAW_SIZE]],
        [[6, 0, -1, RAW_SIZE]],
        [[6, 0, RAW_SIZE, 10**15]],
        [[10**15, 0, RAW_SIZE, RAW_SIZE]],
        [[-6, 0, RAW_SIZE, RAW_SIZE]],
        [[6, 7, RAW_SIZE, RAW_SIZE]],
        [[6, 1, RAW_SIZE, RAW_SIZE]],
        [[6, 0, RAW_SIZE - 1, RAW_SIZE]],
        [[3, 0, RAW_SIZE // 2, RAW_SIZE // 2]] * 2,
        [[6, 0, RAW_SIZE + 5, RAW_SIZE], [0, 0, -5, 0]],
    ],
)
def test_frames_with_absurd_sizes_are_noticed(frames: list[list[int]]) -> None:
    body = bytes(RAW_SIZE)
    good = _with_header(body=body, frames=[[6, 0, RAW_SIZE, RAW_SIZE]])
    assert unpack(good, SMALL) == bytearray(body)
    assert unpack(_with_header(body=body, frames=frames), SMALL) is Fault.CORRUPT


def test_a_frame_that_grows_without_end_is_never_grown() -> None:
    # 64 MB of zeros take 6 KB, and zstandard would allocate what the frame claims to hold.
    half = RAW_SIZE // 2
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    twice = zstandard.ZstdCompressor().compress(bytes(half)) * 2
    for top in (bomb, unknown, twice, twice[:-3], b"", b"no zstd"):
        frames = [[6, 1, half + len(top), RAW_SIZE]]
        data = _with_header(body=bytes(half) + top, frames=frames)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(container, "bytearray", _small_alone, raising=False)
            assert unpack(data, SMALL) is Fault.CORRUPT


def _small_alone(size: int) -> bytearray:
    assert size <= RAW_SIZE
    return bytearray(size)


# --- another object than the one that was asked for ---------------------------------------------


def test_another_version_is_not_a_damaged_object() -> None:
    good = pack(random_page(SMALL.format), SMALL)
    assert unpack(_sealed(bytes(good[16:-16]), version=2), SMALL) is Fault.VERSION
    assert unpack(_sealed(b"what version 2 holds", version=2), SMALL) is Fault.VERSION


@pytest.mark.parametrize("flags", [1, 2, 0x8000])
def test_unknown_flags_are_noticed(flags: int) -> None:
    good = pack(random_page(SMALL.format), SMALL)
    assert _sealed(bytes(good[16:-16])) == bytes(good)
    assert unpack(_sealed(bytes(good[16:-16]), flags=flags), SMALL) is Fault.CORRUPT


@pytest.mark.parametrize("change", [{"v": 2}, {"level": "q4"}])
def test_another_level_inside_is_a_mismatch(change: dict[str, Any]) -> None:
    assert unpack(_with_header(**change), SMALL) is Fault.MISMATCH


@pytest.mark.parametrize(
    "other",
    [
        replace(SMALL, name="sgb1-lossless-01"),
        replace(SMALL, weights="v" * 32),
        replace(SMALL, rotary="s"),
        replace(SMALL, format=replace(SMALL.format, dtype="float16")),
        replace(SMALL, format=replace(SMALL.format, heads=2, dim=4)),
        replace(SMALL, format=replace(SMALL.format, tokens=2, layers=6)),
    ],
    ids=["name", "weights", "rotary", "dtype", "heads", "tokens"],
)
def test_a_page_of_something_else_is_a_mismatch(other: PageLabel) -> None:
    data = pack(random_page(SMALL.format), SMALL)
    assert unpack(data, other) is Fault.MISMATCH
    assert isinstance(unpack(data, SMALL), bytearray)


def test_with_a_key_only_its_own_objects_count() -> None:
    page = random_page(SMALL.format)
    plain, encrypted = pack(page, SMALL), pack(page, SMALL, KEY)
    assert unpack(plain, SMALL, KEY) is Fault.CORRUPT
    assert unpack(encrypted, SMALL) is Fault.CORRUPT
    assert unpack(encrypted, SMALL, bytes(32)) is Fault.CORRUPT
    assert unpack(encrypted, replace(SMALL, name="sgb1-lossless-01"), KEY) is Fault.CORRUPT
    assert SMALL.name.encode() in plain
    assert SMALL.name.encode() not in encrypted


def test_a_page_of_another_size_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="has 384 bytes, not 383"):
        pack(bytes(383), SMALL)
    with pytest.raises(ValueError, match="no pages of int8"):
        PageFormat("int8", 1, 1, 1, 1)
    with pytest.raises(ValueError, match="no part of no size"):
        PageFormat("float32", 1, 0, 1, 1)

"""Coded objects that are damaged, or of something else, are told from good ones."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from codec_cases import coder_of, label_of, page_at, profile_of, rotation
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from sgl_blend.errors import ConfigError
from sgl_blend.storage.codec.coded_pages import pack_coded, unpack_coded
from sgl_blend.storage.codec.coder import Coder
from sgl_blend.storage.codec.levels import (
    Transform,
    read_profile,
)
from sgl_blend.storage.container import PageFormat, unpack
from sgl_blend.storage.envelope import Fault

DATA = Path(__file__).parent / "data"
KEY = bytes(range(32))
FORM = PageFormat("bfloat16", 3, 16, 2, 16)
POSITION = 37
TRANSFORMS = pytest.mark.parametrize("transform", Transform)


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


@pytest.mark.parametrize("position", [-1, 241, 1 << 40])
def test_a_position_beyond_the_model_s_is_left_alone(position: int) -> None:
    data, label, coder = _changed(7, position)
    assert unpack_coded(data, label, coder) is Fault.POSITION  # another server may need it
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    with pytest.raises(ValueError, match=f"cannot be rotated to position {position}"):
        pack_coded(page, label, coder, position)


@pytest.mark.parametrize(
    "form",
    [
        PageFormat("bfloat16", 4, 16, 2, 16),
        PageFormat("bfloat16", 2, 16, 2, 16),
        PageFormat("bfloat16", 3, 16, 3, 16),
        PageFormat("bfloat16", 3, 16, 2, 32),
    ],
)
def test_a_profile_of_another_shape_is_refused(form: PageFormat) -> None:
    with pytest.raises(ConfigError, match="of 3 layers of 2 KV heads of 16 values"):
        Coder(profile_of(FORM), "q4", form, rotation(form))

"""Codec profiles: what is written comes back, and what cannot be is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from codec_cases import WEIGHTS, label_of, profile_of, unrotated

from sgl_blend.errors import ConfigError
from sgl_blend.storage.codec import coded_pages
from sgl_blend.storage.codec.levels import (
    Entropy,
    Transform,
    check_levels,
    read_profile,
    write_profile,
)
from sgl_blend.storage.container import PageFormat

FORM = PageFormat("bfloat16", 3, 16, 2, 16)


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


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("bits_per_element", float("nan")),
        ("bits_per_element", float("inf")),
        ("bits_per_element", 0.0),
        ("bits_per_element", -1.0),
        ("bits_per_element", 1e30),
        ("kl", float("nan")),
        ("clipped", float("inf")),
        ("accuracy_lost", float("nan")),
    ],
)
def test_figures_that_nobody_measured_are_refused(
    tmp_path: Path, figure: str, value: float
) -> None:
    profile = profile_of(FORM)
    figures = msgspec.structs.replace(profile.levels["q4"], **{figure: value})
    made = msgspec.structs.replace(profile, levels={"q4": figures})
    write_profile(made, tmp_path / "profile")
    with pytest.raises(ConfigError, match="its level q4 has figures that nobody can have measured"):
        read_profile(tmp_path / "profile")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is no codec profile: it is no file"):
            read_profile(path)


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

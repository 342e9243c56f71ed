"""Presets: settings by a name or from a profile, and what is said of those that do not go."""

from pathlib import Path

import msgspec
import pytest
from test_config import parse

from sgl_blend.errors import ConfigError
from sgl_blend.settings.config import BlendConfig
from sgl_blend.settings.preset import (
    FORMAT,
    NOT_JUDGED,
    PACKAGE,
    Profile,
    Quality,
    check_architecture,
    load_profile,
    quality_of,
)

QUALITY = Quality(judged=True, data="mine.jsonl", digest="ab", prompts=300)
PROFILE = Profile(
    format=FORMAT,
    architecture="0123",
    settings={"blend_policy": "gradual", "blend_recompute_ratio": 0.1, "blend_check_layer": 2},
    measured={"kl": 0.01},
    quality=QUALITY,
)
END = b'"measured": {}, "quality": {"judged": false, "data": "", "digest": "", "prompts": 0}}'


def test_a_profile_fills_in_what_was_not_given(tmp_path: Path) -> None:
    preset = str(tmp_path / "p.json")
    PROFILE.save(tmp_path / "p.json")
    flags = ("--enable-blend", "--blend-check-layer", "3", "--blend-preset", preset)

    filled = parse(*flags)

    assert (filled.blend_policy, filled.blend_recompute_ratio) == ("gradual", 0.1)
    assert filled.blend_check_layer == 3
    # What is given wins, also where it is the default.
    default = BlendConfig().blend_policy
    assert parse(*flags, "--blend-policy", default).blend_policy == default
    assert BlendConfig.resolve(msgspec.to_builtins(filled)) == filled
    with pytest.raises(ConfigError, match=r"^blend_policy has no effect without enable_blend"):
        parse("--blend-policy", default)
    with pytest.raises(ConfigError, match=r"blend_preset a\x00b"):
        parse("--enable-blend", "--blend-preset", "a\x00b")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"blend_preset": "block", "blend_find": "learned"},
            r"not allowed with blend_on_miss build: .* \(blend_preset block sets blend_on_miss\)$",
        ),
        ({"blend_preset": "block", "blend_find": "all"}, r"^blend_find must be one of [^(]*$"),
        ({"blend_preset": ""}, "^blend_preset must not be empty$"),
        (
            {"blend_preset": "blok"},
            "^blend_preset blok: there is no such file, and no .* but block$",
        ),
    ],
)
def test_what_a_preset_has_set_is_said(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BlendConfig.resolve({"enable_blend": True, **given})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no such file"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (
            b'{"format": 1, "architecture": "", "settings": {}, "measured": {}}',
            r"has format 1, expected 2; run sgl-blend verify again",
        ),
        (b'{"format": 3}', "format 3"),
        (b'{"format": 2, "architecture": "", "settings": {}, "measured": {}}', "quality"),
        (b'{"format": 2, "architecture": "", "settings": {"blend_x": 1}, ' + END, "blend_x"),
        (
            b'{"format": 2, "architecture": "", "settings": {"blend_policy": 1}, ' + END,
            "blend_policy",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_profile_that_cannot_be_used_is_refused(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        BlendConfig.resolve({"enable_blend": True, "blend_preset": str(path)})


def test_a_profile_of_another_model_is_refused() -> None:
    check_architecture(PROFILE, "p.json", "0123")
    with pytest.raises(ConfigError, match=r"made for another model .* run sgl-blend verify"):
        check_architecture(PROFILE, "p.json", "4567")


def test_a_profile_names_the_data_it_was_judged_by(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")).quality == QUALITY


def test_a_server_says_by_what_quality_was_judged() -> None:
    served = {"blend_policy": "gradual", "blend_recompute_ratio": 0.1, "blend_check_layer": 2}
    assert quality_of(PROFILE, served) == "judged by mine.jsonl (300 prompts)"
    package = msgspec.structs.replace(
        PROFILE, quality=msgspec.structs.replace(QUALITY, data=PACKAGE)
    )
    assert quality_of(package, served) == "judged by the package's own prompts (300 prompts)"


def test_a_server_says_when_quality_was_not_judged() -> None:
    served = {"blend_policy": "gradual", "blend_recompute_ratio": 0.1, "blend_check_layer": 2}
    assert NOT_JUDGED == "not judged for this model, run sgl-blend verify --data"
    assert quality_of(None, served) == NOT_JUDGED
    idle = msgspec.structs.replace(QUALITY, judged=False, reason="too few")
    assert quality_of(msgspec.structs.replace(PROFILE, quality=idle), served) == NOT_JUDGED
    other = quality_of(PROFILE, {**served, "blend_recompute_ratio": 0.05})
    assert other.startswith(NOT_JUDGED)
    assert "another blend_recompute_ratio" in other

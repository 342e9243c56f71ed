"""Settings of coded chunks and of deadlines."""

import argparse
import math
from typing import Any

import pytest

from sgl_blend.errors import ConfigError
from sgl_blend.settings.config import BlendConfig, add_flags, settings_from_flags

BAD: list[tuple[str, Any, str]] = [
    ("blend_store_profile", "", "blend_store_profile must not be empty"),
    ("blend_store_levels", "q5", "blend_store_levels must be one of lossless, q8, .*, got 'q5'"),
    ("blend_store_levels", "lossless,,q8", "blend_store_levels must be one of .*, got ''"),
    ("blend_ttft_slo_ms", 0.0, "blend_ttft_slo_ms must be a positive number of .*, got 0.0"),
    ("blend_ttft_slo_ms", math.inf, "blend_ttft_slo_ms must be a positive number of .*, got inf"),
    ("blend_store_levels", "q8", "blend_store_levels q8 needs blend_store_profile"),
]


def parse(*flags: str) -> BlendConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return BlendConfig.from_settings(settings_from_flags(parser.parse_args(flags)))


@pytest.mark.parametrize(("name", "value", "sentence"), BAD)
def test_a_value_out_of_range_is_refused_in_one_sentence(
    name: str, value: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        BlendConfig.from_settings({"enable_blend": True, name: value})


def test_a_deadline_is_a_number_as_a_flag_too() -> None:
    config = parse("--enable-blend", "--blend-store-profile", "p", "--blend-ttft-slo-ms", "250")
    assert config.blend_ttft_slo_ms == 250.0
    assert parse("--enable-blend").blend_ttft_slo_ms is None


def test_a_deadline_without_levels_to_choose_from_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^blend_ttft_slo_ms has no effect without"):
        BlendConfig(enable_blend=True, blend_ttft_slo_ms=100.0)


def test_levels_may_have_blanks_between_them() -> None:
    config = BlendConfig(
        enable_blend=True, blend_store_profile="p", blend_store_levels="q8, q4-2.0"
    )
    assert config.store_levels == ("q8", "q4-2.0")

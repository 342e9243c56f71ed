import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from sgl_blend.errors import ConfigError
from sgl_blend.policies import POLICIES
from sgl_blend.settings.config import (
    ENV_VAR,
    ON_MISS,
    BlendConfig,
    add_flags,
    check_policy,
    check_ratio,
    settings_from_flags,
)

BAD: list[tuple[str, Any, str]] = [
    ("blend_recompute_ratio", 1.5, r"blend_recompute_ratio must be a number in \[0, 1\], got 1.5"),
    ("blend_recompute_ratio", -0.1, r"blend_recompute_ratio must be a number .*, got -0.1"),
    ("blend_recompute_ratio", math.nan, r"blend_recompute_ratio must be a number .*, got nan"),
    ("blend_policy", "best", "blend_policy must be one of hkvd, .*, got 'best'"),
    ("blend_check_layer", 0, "blend_check_layer must be at least 1 because KV of .*, got 0"),
    ("blend_check_layer", -1, "blend_check_layer must be at least 1 because KV of .*, got -1"),
    ("blend_separator", "", "blend_separator must not be empty"),
    ("blend_min_chunk_tokens", 0, "blend_min_chunk_tokens must be at least 1, got 0"),
    ("blend_find", "all", "blend_find must be one of marks, known, learned, got 'all'"),
    ("blend_on_miss", "wait", "blend_on_miss must be one of compute, build, got 'wait'"),
    ("blend_cuda_graph", "yes", "blend_cuda_graph must be one of on, off, got 'yes'"),
    ("blend_build_prefix", "system", "blend_build_prefix must be one of first, .*, got 'system'"),
    ("blend_max_build_prefix", -1, "blend_max_build_prefix must not be negative, got -1"),
    ("blend_canary_rate", 1.1, r"blend_canary_rate must be a number in \[0, 1\], got 1.1"),
    ("blend_canary_max_kl", 0.0, "blend_canary_max_kl must be a positive number, got 0.0"),
    ("blend_canary_max_kl", math.nan, "blend_canary_max_kl must be a positive number, got nan"),
    ("blend_canary_max_kl", math.inf, "blend_canary_max_kl must be a positive number, got inf"),
    ("blend_canary_max_kl", 0.1, "blend_canary_max_kl has no effect without blend_canary_rate"),
]
WRONG_TYPE: list[tuple[str, Any]] = [
    ("enable_blend", "yes"),
    ("enable_blend", 1),
    ("blend_recompute_ratio", "0.5"),
    ("blend_recompute_ratio", True),
    ("blend_recompute_ratio", None),
    ("blend_policy", 1),
    ("blend_check_layer", 1.5),
    ("blend_separator", 7),
    ("blend_min_chunk_tokens", "32"),
]

settings = st.fixed_dictionaries(
    {"enable_blend": st.just(True)},
    optional={
        "blend_recompute_ratio": st.floats(0, 1),
        "blend_policy": st.sampled_from(
            sorted(name for name, policy in POLICIES.items() if not policy.evaluation_only)
        ),
        "blend_check_layer": st.integers(1, 200),
        "blend_separator": st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1),
        "blend_min_chunk_tokens": st.integers(1, 10_000),
        "blend_on_miss": st.sampled_from(ON_MISS),
        "blend_max_build_prefix": st.integers(0, 1 << 40),
        "blend_canary_rate": st.floats(0, 1),
    },
).filter(
    lambda chosen: chosen.get("blend_policy") != "block" or not chosen.get("blend_canary_rate")
)


def parse(*flags: str) -> BlendConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return BlendConfig.resolve(settings_from_flags(parser.parse_args(flags)))


def test_blending_is_off_by_default() -> None:
    assert BlendConfig().enable_blend is False


def test_the_defaults_are_the_documented_ones() -> None:
    assert msgspec.to_builtins(BlendConfig()) == {
        "enable_blend": False,
        "blend_recompute_ratio": 0.15,
        "blend_policy": "funnel",
        "blend_check_layer": 2,
        "blend_separator": None,
        "blend_min_chunk_tokens": 32,
        "blend_on_miss": "compute",
        "blend_build_prefix": "first",
        "blend_max_build_prefix": 1024,
        "blend_find": "marks",
        "blend_learn_share": 0.15,
        "blend_preset": None,
        "blend_eval": False,
        "blend_canary_rate": 0.0,
        "blend_canary_max_kl": 0.5,
        "blend_when": "faster",
        "blend_attention": "auto",
        "blend_cuda_graph": "on",
        "blend_allow_untested": False,
        "blend_store_key_file": None,
        "blend_store_unchecked": False,
        "blend_store_profile": None,
        "blend_store_levels": None,
        "blend_ttft_slo_ms": None,
    }


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_value_out_of_range_is_refused_in_one_sentence(
    name: str, value: Any, message: str
) -> None:
    wrong = {"enable_blend": True, name: value}
    with pytest.raises(ConfigError, match=f"^{message}$"):
        BlendConfig(**wrong)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        BlendConfig.from_settings(wrong)


@pytest.mark.parametrize(("name", "value"), WRONG_TYPE)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^blend settings: Expected .* - at `[$].{name}`$"):
        BlendConfig.from_settings({"enable_blend": True, name: value})


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^blend settings: .*unknown field `blend_ratio`$"):
        BlendConfig.from_settings({"enable_blend": True, "blend_ratio": 0.5})


@pytest.mark.parametrize(
    "idle",
    [
        {"blend_recompute_ratio": 0.3},
        {"blend_separator": "<sep>"},
        {"blend_policy": "random", "blend_on_miss": "build"},
    ],
    ids=str,
)
def test_settings_without_enable_blend_are_refused(idle: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"^{', '.join(idle)} has no effect without enable_blend$"
    ):
        BlendConfig.from_settings(idle)


def test_a_default_that_is_written_out_is_no_idle_setting() -> None:
    assert BlendConfig.from_settings({"blend_policy": "funnel"}) == BlendConfig()


@given(settings)
def test_settings_survive_the_environment(chosen: dict[str, Any]) -> None:
    environ = {ENV_VAR: msgspec.json.encode(chosen).decode()}
    assert BlendConfig.from_env(environ) == BlendConfig(**chosen)


def test_an_unset_variable_means_the_defaults() -> None:
    assert BlendConfig.from_env({}) == BlendConfig()


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"on"', "null", "{'enable_blend': true}"])
def test_a_variable_that_holds_no_json_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^SGLANG_BLEND_CONFIG: "):
        BlendConfig.from_env({ENV_VAR: text})


def test_a_bad_value_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^blend_min_chunk_tokens must be at least 1, got 0$"):
        BlendConfig.from_env({ENV_VAR: '{"enable_blend": true, "blend_min_chunk_tokens": 0}'})


@given(settings)
def test_settings_survive_the_command_line(chosen: dict[str, Any]) -> None:
    flags = ["--enable-blend"]
    for name, value in chosen.items():
        if name != "enable_blend":
            flags.append(f"--{name.replace('_', '-')}={value}")
    assert parse(*flags) == BlendConfig(**chosen)


def test_no_flags_mean_the_defaults() -> None:
    assert parse() == BlendConfig()


def test_every_setting_has_a_flag_with_a_help_text() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)

    actions = {action.dest: action for action in parser._actions}

    assert list(actions) == [field.name for field in msgspec.structs.fields(BlendConfig)]
    for name, action in actions.items():
        assert action.option_strings[0] == f"--{name.replace('_', '-')}"
        assert action.option_strings[1:] == (["--blend-profile"] if name == "blend_preset" else [])
        assert action.help


def test_a_preset_is_still_known_by_its_former_name() -> None:
    former = {"enable_blend": True, "blend_profile": "block"}
    want = BlendConfig.resolve({"enable_blend": True, "blend_preset": "block"})
    assert parse("--enable-blend", "--blend-profile", "block") == want
    assert BlendConfig.resolve(former) == want
    assert BlendConfig.from_env({ENV_VAR: json.dumps(former)}) == want
    with pytest.raises(ConfigError, match=r"^blend_profile is the former name of"):
        BlendConfig.resolve({**former, "blend_preset": "q.json"})


def test_flags_settle_beside_sglangs_own_and_in_its_yaml_file(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--enable-blend" not in parser._option_string_actions:  # the plugin's hook may be in place
        add_flags(parser)
    file = tmp_path / "server.yaml"
    file.write_text("enable-blend: true\nblend-recompute-ratio: 0.3\nblend-separator: <sep>\n")

    merger = ConfigArgumentMerger(parser)
    argv = merger.merge_config_with_args(["--model-path", "m", "--config", str(file)])
    config = BlendConfig.resolve(settings_from_flags(parser.parse_args(argv)))

    assert config == BlendConfig(
        enable_blend=True, blend_recompute_ratio=0.3, blend_separator="<sep>"
    )


def test_a_namespace_of_another_parser_gives_no_settings() -> None:
    assert settings_from_flags(argparse.Namespace(model_path="m")) == {}


@given(settings)
def test_settings_travel_with_the_server_arguments(chosen: dict[str, Any]) -> None:
    config, server_args = BlendConfig(**chosen), SimpleNamespace()

    config.attach(server_args)

    assert BlendConfig.of(server_args) == config


def test_what_travels_is_plain_data() -> None:
    # SGLang pickles and prints its arguments in processes that may not know this package.
    server_args = SimpleNamespace()
    BlendConfig(enable_blend=True).attach(server_args)
    (carried,) = vars(server_args).values()
    assert type(carried) is dict
    assert all(isinstance(value, bool | int | float | str | None) for value in carried.values())


def test_server_arguments_without_settings_read_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENV_VAR, '{"enable_blend": true, "blend_check_layer": 3}')
    assert BlendConfig.of(SimpleNamespace()).blend_check_layer == 3


def test_attached_settings_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server_args = SimpleNamespace()
    BlendConfig().attach(server_args)
    monkeypatch.setenv(ENV_VAR, '{"enable_blend": true}')
    assert BlendConfig.of(server_args) == BlendConfig()


@given(st.floats())
def test_a_ratio_is_accepted_exactly_in_the_unit_interval(value: float) -> None:
    if value >= 0 and value <= 1:
        check_ratio("ratio", value, ConfigError)
    else:
        with pytest.raises(ConfigError, match=r"^ratio must be a number"):
            check_ratio("ratio", value, ConfigError)


def test_a_check_raises_the_error_it_is_given() -> None:
    with pytest.raises(KeyError):
        check_ratio("ratio", 2, KeyError)
    with pytest.raises(KeyError):
        check_policy("policy", "x", KeyError, evaluation=True)


def test_a_policy_for_evaluation_needs_a_server_for_evaluation() -> None:
    with pytest.raises(ConfigError, match=r"blend_policy oracle needs a server .* --blend-eval"):
        BlendConfig(enable_blend=True, blend_policy="oracle")
    config = BlendConfig(enable_blend=True, blend_policy="oracle", blend_eval=True)
    assert config.blend_policy == "oracle"


def test_settings_cannot_be_changed_later() -> None:
    config = BlendConfig()
    with pytest.raises(AttributeError, match="immutable"):
        config.enable_blend = True  # type: ignore[misc]

"""All settings: server flags, Engine keyword arguments, and the only reader of the environment."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from sgl_blend.errors import ConfigError
from sgl_blend.policies import POLICIES

ENV_VAR = "SGL_BLEND_CONFIG"
ATTRIBUTE = "_sgl_blend"
"""Attribute of SGLang's ServerArgs that carries the settings to every process."""

ON_MISS = ("compute", "build")

_HELP = {
    "enable_blend": "Reuse the KV of text chunks wherever they stand in a prompt (CacheBlend).",
    "blend_recompute_ratio": "Share of the reused tokens that is recomputed, in [0, 1].",
    "blend_policy": f"Which reused tokens are recomputed: {', '.join(POLICIES)}.",
    "blend_check_layer": "Layer whose KV deviation selects the tokens; layers up to it are computed "
    "in full.",
    "blend_separator": "Special token that separates chunks in a prompt; by default one that the "
    "model does not use is chosen from the tokenizer.",
    "blend_min_chunk_tokens": "Shorter chunks are computed, not reused.",
    "blend_on_miss": "compute: answer at once as stock SGLang does and build missing chunks in the "
    "background; build: build them first, so that an answer never depends on the cache.",
    "blend_max_build_prefix": "Chunks are built behind the text that stands before the first one, "
    "if it has at most this many tokens, else behind BOS.",
}


class BlendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, checked once at start and never changed.

    Field names are Engine keyword arguments; with dashes they are server flags. Ratios are
    fractions in [0, 1], lengths are tokens.
    """

    enable_blend: bool = False
    blend_recompute_ratio: float = 0.15
    blend_policy: str = "hkvd"
    blend_check_layer: int = 1
    blend_separator: str | None = None
    blend_min_chunk_tokens: int = 32
    blend_on_miss: str = "compute"
    blend_max_build_prefix: int = 1024

    def __post_init__(self) -> None:
        check_ratio("blend_recompute_ratio", self.blend_recompute_ratio, ConfigError)
        check_policy("blend_policy", self.blend_policy, ConfigError)
        if self.blend_check_layer < 1:
            raise ConfigError(
                "blend_check_layer must be at least 1 because KV of layer 0 never deviates, "
                f"got {self.blend_check_layer}"
            )
        if self.blend_separator is not None and not self.blend_separator:
            raise ConfigError("blend_separator must not be empty")
        if self.blend_min_chunk_tokens < 1:
            raise ConfigError(
                f"blend_min_chunk_tokens must be at least 1, got {self.blend_min_chunk_tokens}"
            )
        if self.blend_on_miss not in ON_MISS:
            raise ConfigError(
                f"blend_on_miss must be one of {', '.join(ON_MISS)}, got {self.blend_on_miss!r}"
            )
        if self.blend_max_build_prefix < 0:
            raise ConfigError(
                f"blend_max_build_prefix must not be negative, got {self.blend_max_build_prefix}"
            )
        if not self.enable_blend and (idle := self._changed()):
            raise ConfigError(f"{', '.join(idle)} has no effect without enable_blend")

    def _changed(self) -> list[str]:
        return [
            field.name
            for field in msgspec.structs.fields(self)
            if getattr(self, field.name) != field.default
        ]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "BlendConfig":
        """Check settings from any source.

        Raises:
            ConfigError: A name is unknown, a type is wrong or a value is out of range.
        """
        try:
            return msgspec.convert(dict(settings), type=cls)
        except msgspec.ValidationError as err:
            # msgspec wraps what __post_init__ raises; show the sentence without the wrapping.
            if isinstance(err.__cause__, ConfigError):
                raise err.__cause__ from None
            raise ConfigError(f"blend settings: {err}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "BlendConfig":
        """Read the JSON object in SGL_BLEND_CONFIG; an unset variable means the defaults.

        For programs that build SGLang's arguments themselves (``sgl.Runtime``, ``bench_*``).

        Raises:
            ConfigError: The JSON is malformed, a name is unknown or a value is out of range.
        """
        try:
            settings = msgspec.json.decode(environ.get(ENV_VAR, "{}"), type=dict[str, Any])
        except msgspec.DecodeError as err:
            raise ConfigError(f"{ENV_VAR}: {err}") from err
        return cls.from_settings(settings)

    @classmethod
    def of(cls, server_args: Any) -> "BlendConfig":
        """Return the settings that travel with SGLang's server arguments, else the environment's."""
        settings = getattr(server_args, ATTRIBUTE, None)
        return cls.from_env() if settings is None else cls.from_settings(settings)

    def attach(self, server_args: Any) -> None:
        """Let the settings travel with SGLang's server arguments into every process."""
        setattr(server_args, ATTRIBUTE, msgspec.to_builtins(self))


def check_ratio(name: str, value: Any, error: type[Exception]) -> None:
    """Raise error unless value is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise error(f"{name} must be a number in [0, 1], got {value!r:.80}")


def check_policy(name: str, value: Any, error: type[Exception]) -> None:
    """Raise error unless value names a policy."""
    if not isinstance(value, str) or value not in POLICIES:
        raise error(f"{name} must be one of {', '.join(POLICIES)}, got {value!r:.80}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the server flags; only ``store`` actions, the ones SGLang's YAML ``--config`` knows."""
    group = parser.add_argument_group("sgl-blend")
    for field in msgspec.structs.fields(BlendConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            group.add_argument(flag, action="store_true", help=_HELP[field.name])
        else:
            kind = field.type if field.type in (int, float) else str
            group.add_argument(flag, type=kind, default=field.default, help=_HELP[field.name])


def settings_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the settings that add_flags put into a parsed namespace."""
    names = [field.name for field in msgspec.structs.fields(BlendConfig)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}

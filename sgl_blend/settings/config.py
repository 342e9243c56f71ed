"""All settings: server flags, Engine keyword arguments, and the only reader of the environment."""

import argparse
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from sgl_blend.errors import ConfigError
from sgl_blend.policies import NAMED, POLICIES
from sgl_blend.settings.preset import PRESETS, preset_settings
from sgl_blend.storage.level_names import LEVEL_NAMES, LOSSLESS

ENV_VAR = "SGLANG_BLEND_CONFIG"
ATTRIBUTE = "_sgl_blend"
"""Attribute of SGLang's ServerArgs that carries the settings to every process."""

ON_MISS = ("compute", "build")
WHEN = ("faster", "always")
CUDA_GRAPH = ("on", "off")
ATTENTION = ("auto", "flashinfer", "triton", "torch")
BUILD_PREFIXES = ("first", "bos", "none", "sinks")
FIND = ("marks", "known", "learned")
"""Where chunks are looked for; each is a part of what the next one does."""

FORMER_NAMES = {"blend_profile": "blend_preset"}
"""Settings that are still known by an earlier name."""

_HELP = {
    "enable_blend": "Turn blending on: reuse the stored KV of a text chunk wherever it stands "
    "in a prompt (CacheBlend). Every other blend flag needs this one.",
    "blend_recompute_ratio": "Share of the reused tokens that is computed again, from 0 to 1. A "
    "larger share is slower and nearer to a full prefill.",
    "blend_policy": f"Which reused tokens are computed again: {', '.join(NAMED)}.",
    "blend_check_layer": "Layer in which those tokens are chosen. All tokens that may be chosen go "
    "through the layers up to this one, so a later layer is slower and sees more. Layers count from 0.",
    "blend_separator": "Special token that marks chunks in a prompt. By default the server "
    "picks one that the model does not use, logs it at start and shows it in /server_info.",
    "blend_min_chunk_tokens": "Chunks of fewer tokens are computed like other text, never reused. "
    "So are chunks that fill no page of --page-size tokens.",
    "blend_on_miss": "What happens to a chunk that is not stored yet. compute: it is computed "
    "as a part of this prompt, and stored afterwards in the background. build: it is stored "
    "first, so an answer never depends on what the cache held.",
    "blend_build_prefix": "What stands before a chunk while its KV is computed for the cache. "
    "first: the prompt's text before its first chunk. bos: the BOS token. none: nothing. sinks: "
    "four BOS tokens that are thrown away (EPIC's LegoLink-0).",
    "blend_max_build_prefix": "With --blend-build-prefix first: a text of more tokens than this "
    "is replaced by BOS.",
    "blend_find": "Where chunks are looked for. marks: only where the client marked them. known: "
    "stored chunks are found in unmarked text, too. learned: text that comes again becomes a chunk "
    "besides. With --blend-on-miss build only marks is allowed.",
    "blend_learn_share": "With --blend-find learned: at most so many tokens are built in the "
    "background per token of a tenant's prompts, from 0 to 1.",
    "blend_preset": "Settings that belong to the model: a file that sgl-blend verify wrote for it, or "
    f"{', '.join(PRESETS)}, for models that were trained with Block-Attention. Flags that are not "
    "given are taken from it. A file of another model is refused.",
    "blend_eval": "For evaluations only. Allow policies that prefill in full before they "
    "choose, such as oracle, and start even if the rotation of keys is not exact enough.",
    "blend_canary_rate": "Share of the blended requests, from 0 to 1, that is prefilled in full "
    "as well when nobody waits. The two distributions of the first token are compared. 0 compares "
    "none.",
    "blend_when": "faster: blend only where this machine's own times, measured at start, say "
    "that it wins. always: blend whenever a chunk is stored. With --blend-on-miss build, always "
    "is what holds.",
    "blend_attention": "Code that computes attention for the tokens that are computed again. "
    "triton and flashinfer need CUDA, torch runs everywhere. auto: the one that a trial at start "
    "finds fastest.",
    "blend_cuda_graph": "on: capture CUDA graphs of the layers above the check layer at start, so "
    "that a slow host does not hold the device up. off: capture none, if the capture fails or its "
    "memory is needed. Without CUDA, and with FlashInfer's attention, there are none.",
    "blend_allow_untested": "Start with a version of SGLang that sgl-blend was not tested with.",
    "blend_store_key_file": "File with a key of 32 bytes, or of 64 hexadecimal characters. KV in a "
    "storage backend of HiCache is encrypted with it (AES-256-GCM), and object names are keyed. "
    "Servers share KV only if they have the same key. Nobody but the owner of the file may have "
    "access to it.",
    "blend_store_unchecked": "Let storage backends of HiCache whose objects are not checked run as "
    "they are. file and mooncake are always checked.",
    "blend_store_profile": "File that sgl-blend codec profile wrote for this model. Chunks in a "
    "storage backend are coded as it says, in a few bits per value. Exact prefixes are not, and with "
    "--blend-on-miss build nothing is. A profile of other weights is refused.",
    "blend_store_levels": "Levels at which chunks are stored, separated by commas: "
    f"{', '.join(LEVEL_NAMES)}. Several let each request take the finest that is there in time. By "
    "default the coarsest of the profile.",
    "blend_ttft_slo_ms": "Milliseconds in which the first token is wanted. Chunks come from storage at "
    "the finest level that is there in time. By default the smallest comes.",
    "blend_canary_max_kl": "Blending switches itself off above this mean KL of the last "
    "comparisons, in nats. By Pinsker's inequality 0.5 lets at most half of the first token's "
    "probability move.",
}


class BlendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, checked once at start and never changed.

    Field names are Engine keyword arguments; with dashes they are server flags. Ratios are
    fractions in [0, 1], lengths are tokens.
    """

    enable_blend: bool = False
    blend_recompute_ratio: float = 0.15
    blend_policy: str = "funnel"
    blend_check_layer: int = 2
    blend_separator: str | None = None
    blend_min_chunk_tokens: int = 32
    blend_on_miss: str = "compute"
    blend_build_prefix: str = "first"
    blend_max_build_prefix: int = 1024
    blend_find: str = "marks"
    blend_learn_share: float = 0.15
    blend_preset: str | None = None
    blend_eval: bool = False
    blend_canary_rate: float = 0.0
    blend_canary_max_kl: float = 0.5
    blend_when: str = "faster"
    blend_attention: str = "auto"
    blend_cuda_graph: str = "on"
    blend_allow_untested: bool = False
    blend_store_key_file: str | None = None
    blend_store_unchecked: bool = False
    blend_store_profile: str | None = None
    blend_store_levels: str | None = None
    blend_ttft_slo_ms: float | None = None

    def __post_init__(self) -> None:
        check_ratio("blend_recompute_ratio", self.blend_recompute_ratio, ConfigError)
        check_policy("blend_policy", self.blend_policy, ConfigError, evaluation=self.blend_eval)
        _require(
            self.blend_check_layer >= 1,
            "blend_check_layer must be at least 1 because KV of layer 0 never deviates, "
            f"got {self.blend_check_layer}",
        )
        _require(self.blend_separator != "", "blend_separator must not be empty")
        _require(
            self.blend_min_chunk_tokens >= 1,
            f"blend_min_chunk_tokens must be at least 1, got {self.blend_min_chunk_tokens}",
        )
        _require_choice("blend_on_miss", self.blend_on_miss, ON_MISS)
        _require_choice("blend_when", self.blend_when, WHEN)
        _require_choice("blend_attention", self.blend_attention, ATTENTION)
        _require_choice("blend_cuda_graph", self.blend_cuda_graph, CUDA_GRAPH)
        _require_choice("blend_build_prefix", self.blend_build_prefix, BUILD_PREFIXES)
        _require(
            self.blend_max_build_prefix >= 0,
            f"blend_max_build_prefix must not be negative, got {self.blend_max_build_prefix}",
        )
        self._check_finding()
        _require(self.blend_store_key_file != "", "blend_store_key_file must not be empty")
        _require(self.blend_store_profile != "", "blend_store_profile must not be empty")
        self._check_levels()
        if self.blend_ttft_slo_ms is not None:
            check_milliseconds("blend_ttft_slo_ms", self.blend_ttft_slo_ms, ConfigError)
            _require(
                self.blend_store_profile is not None,
                "blend_ttft_slo_ms has no effect without blend_store_profile",
            )
        check_ratio("blend_canary_rate", self.blend_canary_rate, ConfigError)
        _require(
            0 < self.blend_canary_max_kl < math.inf,
            f"blend_canary_max_kl must be a positive number, got {self.blend_canary_max_kl}",
        )
        _require(
            self.blend_canary_rate > 0 or "blend_canary_max_kl" not in self._changed(),
            "blend_canary_max_kl has no effect without blend_canary_rate",
        )
        _require(
            self.blend_canary_rate == 0 or self.blend_policy != "block",
            "blend_canary_rate compares with a full prefill, which a model for blend_policy block does "
            "not promise to agree with",
        )
        idle = [] if self.enable_blend else self._changed()
        _require(not idle, f"{', '.join(idle)} has no effect without enable_blend")

    def _check_finding(self) -> None:
        _require_choice("blend_find", self.blend_find, FIND)
        check_ratio("blend_learn_share", self.blend_learn_share, ConfigError)
        _require(
            self.blend_find == "marks" or self.blend_on_miss != "build",
            f"blend_find {self.blend_find} is not allowed with blend_on_miss build: what is found "
            "depends on what the cache holds, and answers would, too",
        )
        _require(
            self.blend_find == "learned" or "blend_learn_share" not in self._changed(),
            "blend_learn_share has no effect without blend_find learned",
        )

    def _check_levels(self) -> None:
        if self.blend_store_levels is None:
            return
        for name in self.store_levels:
            _require_choice("blend_store_levels", name, LEVEL_NAMES)
            _require(
                name == LOSSLESS or self.blend_store_profile is not None,
                f"blend_store_levels {name} needs blend_store_profile",
            )

    @property
    def store_levels(self) -> tuple[str, ...]:
        """The levels that were asked for, as they were written; empty if none were."""
        if self.blend_store_levels is None:
            return ()
        return tuple(name.strip() for name in self.blend_store_levels.split(","))

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
        twice = [old for old, name in FORMER_NAMES.items() if {old, name} <= settings.keys()]
        _require(not twice, f"{', '.join(twice)} is the former name of a setting that is given too")
        named = {FORMER_NAMES.get(name, name): value for name, value in settings.items()}
        try:
            return msgspec.convert(named, type=cls)
        except msgspec.ValidationError as err:
            # msgspec wraps what __post_init__ raises; show the sentence without the wrapping.
            if isinstance(err.__cause__, ConfigError):
                raise err.__cause__ from None
            raise ConfigError(f"blend settings: {err}") from None

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> "BlendConfig":
        """Check the settings that somebody gave, and take the others from the preset, if one is given.

        A setting that is given wins over the preset, also where it is given at its default.

        Raises:
            ConfigError: As from_settings, or the preset cannot be read.
        """
        if given.get("enable_blend") is not True:
            config = cls.from_settings(given)
            idle = sorted(given.keys() - {"enable_blend"})
            _require(not idle, f"{', '.join(idle)} has no effect without enable_blend")
            return config
        named = {FORMER_NAMES.get(name, name): value for name, value in given.items()}
        preset = named.get("blend_preset")
        if not isinstance(preset, str) or len(named) < len(given):
            return cls.from_settings(given)
        filled = preset_settings(preset)
        try:
            return cls.from_settings({**filled, **named})
        except ConfigError as err:
            meant = [name for name in filled if name not in named and name in str(err)]
            if not meant:
                raise
            raise ConfigError(f"{err} (blend_preset {preset} sets {', '.join(meant)})") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "BlendConfig":
        """Read the JSON object in SGLANG_BLEND_CONFIG; an unset variable means the defaults.

        For programs that build SGLang's arguments themselves (``sgl.Runtime``, ``bench_*``).

        Raises:
            ConfigError: The JSON is malformed, a name is unknown or a value is out of range.
        """
        try:
            settings = msgspec.json.decode(environ.get(ENV_VAR, "{}"), type=dict[str, Any])
        except msgspec.DecodeError as err:
            raise ConfigError(f"{ENV_VAR}: {err}") from err
        return cls.resolve(settings)

    @classmethod
    def of(cls, server_args: object) -> "BlendConfig":
        """Return the settings that travel with SGLang's server arguments, else the environment's."""
        settings = getattr(server_args, ATTRIBUTE, None)
        return cls.from_env() if settings is None else cls.from_settings(settings)

    def attach(self, server_args: object) -> None:
        """Let the settings travel with SGLang's server arguments into every process."""
        setattr(server_args, ATTRIBUTE, msgspec.to_builtins(self))


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_ratio(name: str, value: Any, error: type[Exception]) -> None:
    """Raise error unless value is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise error(f"{name} must be a number in [0, 1], got {value!r:.80}")


def check_milliseconds(name: str, value: Any, error: type[Exception]) -> None:
    """Raise error unless value is a positive, finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise error(f"{name} must be a positive number of milliseconds, got {value!r:.80}")


def check_policy(name: str, value: Any, error: type[Exception], *, evaluation: bool) -> None:
    """Raise error unless value names a policy that this server offers."""
    if not isinstance(value, str) or value not in POLICIES:
        raise error(f"{name} must be one of {', '.join(NAMED)}, got {value!r:.80}")
    if POLICIES[value].evaluation_only and not evaluation:
        raise error(f"{name} {value} needs a server that was started with --blend-eval")


_KINDS = {int: int, float: float, float | None: float}
"""What the text of a flag becomes; by default it stays text."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the server flags; only ``store`` actions, the ones SGLang's YAML ``--config`` knows.

    A flag that is not given leaves nothing in the namespace, so that a preset fills in only those.
    """
    group = parser.add_argument_group("sgl-blend")
    for field in msgspec.structs.fields(BlendConfig):
        names = [field.name, *(old for old, name in FORMER_NAMES.items() if name == field.name)]
        flags = ["--" + name.replace("_", "-") for name in names]
        if field.type is bool:
            told: dict[str, Any] = {"action": "store_true"}
        else:
            told = {"type": _KINDS.get(field.type, str)}
        group.add_argument(*flags, **told, default=argparse.SUPPRESS, help=_HELP[field.name])


def settings_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the settings that were given by the flags of add_flags."""
    names = [field.name for field in msgspec.structs.fields(BlendConfig)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


@contextmanager
def child_variable(name: str, value: str) -> Iterator[None]:
    """Let processes that are started in the block see a variable of the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

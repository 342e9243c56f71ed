"""Presets: settings that belong to a model, by name or from a profile of ``sgl-blend verify``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgl_blend.errors import ConfigError

FORMAT = 2
PACKAGE = "package"
"""Name of the prompts that come with the package, where a file's would stand."""
PRESETS: dict[str, dict[str, Any]] = {
    "block": {
        "blend_policy": "block",
        "blend_recompute_ratio": 0.0,
        "blend_build_prefix": "none",
        "blend_on_miss": "build",
        "blend_min_chunk_tokens": 1,
    },
}
"""Settings by the name of a preset. ``block`` is for models that were trained with chunks that see only
themselves (D. Ma et al., "Block-Attention for Efficient Prefilling", ICLR 2025): each chunk is computed
alone, before it is used, and nothing is computed again. A file of such a name is meant by ./NAME."""
NOT_JUDGED = "not judged for this model, run sgl-blend verify --data"


class Quality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what answers were judged.

    Attributes:
        judged: Whether the prompts could tell, and the settings passed.
        data: Name of the file of prompts, or PACKAGE.
        digest: SHA-256 of the file, as hexadecimal digits.
        prompts: How many of its prompts were asked.
        reason: Why nothing was judged, or None.
    """

    judged: bool
    data: str
    digest: str
    prompts: int
    reason: str | None = None

    def __str__(self) -> str:
        """Say it in words, for a log."""
        data = "the package's own prompts" if self.data == PACKAGE else self.data
        return f"judged by {data} ({self.prompts} prompts)" if self.judged else NOT_JUDGED


class _Head(msgspec.Struct, frozen=True):
    """What profiles of all formats have."""

    format: int


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that were measured on one model.

    Attributes:
        format: Version of this file's layout.
        architecture: Digest of the model's configuration (namespaces.architecture); a server with
            another model refuses the profile.
        settings: Blend settings by name, such as blend_policy.
        measured: What the settings were chosen by, for people to read.
        quality: By which prompts they were judged.
    """

    format: int
    architecture: str
    settings: dict[str, Any]
    measured: dict[str, Any]
    quality: Quality

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def preset_settings(preset: str) -> dict[str, Any]:
    """Return the settings of a preset, by name or from a profile.

    Raises:
        ConfigError: It is no name of a preset, and there is no such profile.
    """
    if preset in PRESETS:
        return PRESETS[preset]
    if not preset:
        raise ConfigError("blend_preset must not be empty")
    if "\0" not in preset and not Path(preset).exists():
        raise ConfigError(
            f"blend_preset {preset}: there is no such file, and no preset of that name but "
            f"{', '.join(PRESETS)}"
        )
    return load_profile(preset).settings


def load_profile(path: str) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: There is no such file, or it is no profile of this version.
    """
    try:
        content = Path(path).read_bytes()
        found = msgspec.json.decode(content, type=_Head).format
        if found != FORMAT:
            raise ConfigError(
                f"blend_preset {path} has format {found}, expected {FORMAT}; "
                "run sgl-blend verify again"
            )
        return msgspec.json.decode(content, type=Profile)
    except OSError as err:
        raise ConfigError(f"blend_preset {path}: {err.strerror}") from err
    except ValueError as err:  # no path of a file, or not what stands in a profile
        raise ConfigError(f"blend_preset {path}: {err}") from err


def check_architecture(profile: Profile, path: str, architecture: str) -> None:
    """Refuse a profile of another model.

    Raises:
        ConfigError: The model's configuration is not the one that was measured.
    """
    if profile.architecture != architecture:
        raise ConfigError(
            f"blend_preset {path} was made for another model (configuration "
            f"{profile.architecture}, this one is {architecture}); run sgl-blend verify on this one"
        )


def quality_of(profile: Profile | None, settings: Mapping[str, Any]) -> str:
    """Say by what the answers of a server were judged.

    Args:
        profile: The profile it was started with; None also for a preset with a name.
        settings: Its blend settings by name; some may have been given instead of the profile's.
    """
    if profile is None:
        return NOT_JUDGED
    changed = [name for name, value in profile.settings.items() if settings[name] != value]
    if profile.quality.judged and changed:
        return f"{NOT_JUDGED} (the profile was made with another {', '.join(changed)})"
    return str(profile.quality)

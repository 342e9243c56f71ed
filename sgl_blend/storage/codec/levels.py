"""Levels of coding, and the profile that says how one model's KV is coded at each of them.

CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240) rounds KV to bins that are multiples of each
channel's standard deviation, coarser in deeper layers, and codes the numbers of the bins by their
distribution. A profile holds what that takes for one model: scales of each (layer, K/V, channel), and
for each level which transform is smaller there and what was lost by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_blend.errors import ConfigError
from sgl_blend.storage.level_names import CODED, LEVEL_NAMES, LOSSLESS

PROFILE_VERSION = 1
ANCHOR_TOKENS = 10
"""CacheGen §5.1: of so many tokens the first is the anchor of the others."""
ANCHOR_BITS = 8
THIRDS = (2 / 3, 1.0, 3 / 2)
"""Bins of the first, second and last third of the layers, as multiples of the level's bin."""
MAX_PROFILE_BYTES = 1 << 30
_MOST_BITS = 64
"""No coded element takes more, headers included."""

Floats = NDArray[np.float32]


class Transform(IntEnum):
    """What is rounded."""

    DIRECT = 0
    """Each value less the mean of its channel."""
    ANCHORS = 1
    """Every tenth token in 8 bits, the others as differences from it."""


class Entropy(IntEnum):
    """How bins are written down."""

    ZSTD = 0
    """Two to a byte, compressed by zstd."""
    ARITHMETIC = 1
    """CacheGen's own: arithmetic coding, with a distribution for each channel."""


@dataclass(frozen=True, slots=True)
class Level:
    """How coarsely KV is rounded.

    Attributes:
        name: In flags, reports and object names.
        bits: Of a bin's number before entropy coding: 4 or 8.
        bin_sigmas: Width of a bin in standard deviations, in the middle third of the layers.
    """

    name: str
    bits: int
    bin_sigmas: float

    @property
    def most(self) -> int:
        """The largest bin's number: bins are -most to most."""
        return (1 << (self.bits - 1)) - 1

    def bin_of(self, layer: int, num_layers: int) -> float:
        """Return the width of a layer's bins, in standard deviations."""
        return self.bin_sigmas * THIRDS[min(2, 3 * layer // num_layers)]


LEVELS = {
    level.name: level
    for level in (
        Level("q8", 8, 1 / 12),
        Level("q4", 4, 1.0),
        Level("q4-1.5", 4, 1.5),
        Level("q4-2.0", 4, 2.0),
    )
}
"""By name, from the finest to the coarsest."""
assert tuple(LEVELS) == CODED, "levels and their names"


class UnitScales(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Statistics of K or V of one layer; each little-endian float32 [heads * dim].

    Attributes:
        mean: Of a channel; K before its rotation.
        sigma: Standard deviation of a channel.
        low: Its least value.
        high: Its largest value.
    """

    mean: bytes
    sigma: bytes
    low: bytes
    high: bytes


class LevelFigures(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One level of a profile.

    Attributes:
        transforms: A Transform for each (layer, K/V), by layer, K first.
        bits_per_element: What a coded element took, headers included.
        clipped: Share of elements beyond the outermost bin.
        accuracy_lost: Against lossless KV, on the profile's prompts.
        kl: Mean KL of the first token against lossless KV, in nats.
        probabilities: For arithmetic coding: uint16 [units, heads * dim, 2 * most + 1], of each
            channel summing to 65,535 at most; empty otherwise.
    """

    transforms: list[int]
    bits_per_element: float
    clipped: float
    accuracy_lost: float
    kl: float
    probabilities: bytes = b""


class CodecProfile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How the KV of one model is coded.

    Attributes:
        v: PROFILE_VERSION.
        weights: Digest of the weights that it was measured on.
        layers: Of the model.
        heads: KV heads of all ranks.
        dim: Channels of a head.
        data: Name of the prompts it was measured on.
        prompts: How many there were.
        max_loss: The budget of accuracy that was asked for.
        entropy: How bins are written down.
        units: Scales, by layer, K first.
        levels: What is within the budget, by name.
    """

    v: int
    weights: str
    layers: int
    heads: int
    dim: int
    data: str
    prompts: int
    max_loss: float
    entropy: int
    units: list[UnitScales]
    levels: dict[str, LevelFigures]

    @property
    def is_blank(self) -> bool:
        """Whether nothing was measured yet: pages are collected by it."""
        return self.layers == 0

    @property
    def channels(self) -> int:
        """Channels of K or V of one token in one layer."""
        return self.heads * self.dim

    def digest(self) -> str:
        """Digest what coded pages depend on: 32 hexadecimal characters."""
        levels = {name: (f.transforms, f.probabilities) for name, f in self.levels.items()}
        told = (self.v, self.weights, self.layers, self.heads, self.dim, self.entropy, self.units)
        return sha256(msgspec.msgpack.encode((told, levels))).hexdigest()[:32]


def floats(data: bytes) -> Floats:
    """Return a row of a profile: float32 [heads * dim]."""
    return np.frombuffer(data, "<f4").astype(np.float32)


def write_profile(profile: CodecProfile, path: Path) -> None:
    """Write a profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.msgpack.encode(profile))


def read_profile(path: Path) -> CodecProfile:
    """Read a profile.

    Raises:
        ConfigError: The file cannot be read, or is no profile of this version.
    """
    flag = "--blend-store-profile"
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise ConfigError(f"{flag} {path} is no codec profile: it is no file")
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise ConfigError(f"{flag} {path} is no codec profile: it is too large")
        profile = msgspec.msgpack.decode(path.read_bytes(), type=CodecProfile)
    except OSError as err:
        raise ConfigError(f"{flag} {path}: {err.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"{flag} {path} is no codec profile: {err}") from None
    if (why := _fault_of(profile)) is not None:
        raise ConfigError(f"{flag} {path} cannot be used: {why}")
    return profile


def read_levels(
    path: str, names: Sequence[str], *, may_be_blank: bool
) -> tuple[CodecProfile, tuple[str, ...]]:
    """Read what --blend-store-profile and --blend-store-levels ask for.

    Args:
        path: Of the profile.
        names: Of levels; none for the coarsest of the profile.
        may_be_blank: Whether the profile may be one that is to be made.

    Returns:
        The profile, and the levels from the finest to the coarsest; none of a blank profile.

    Raises:
        ConfigError: The profile cannot be used, or it has no such level.
    """
    profile = read_profile(Path(path))
    if profile.is_blank:
        if not may_be_blank:
            raise ConfigError(
                f"--blend-store-profile {path} is empty: sgl-blend codec profile did not finish"
            )
        return profile, ()
    chosen = check_levels(names or tuple(profile.levels)[-1:], profile)
    if not chosen:
        raise ConfigError(
            f"--blend-store-profile {path} has no level: none was within {profile.max_loss}"
        )
    return profile, chosen


def blank_profile() -> CodecProfile:
    """Return a profile by which a server collects pages, for one that is to be made."""
    return CodecProfile(PROFILE_VERSION, "", 0, 0, 0, "", 0, 0.0, int(Entropy.ZSTD), [], {})


def _fault_of(profile: CodecProfile) -> str | None:
    if profile.v != PROFILE_VERSION:
        return f"it is of version {profile.v}, expected {PROFILE_VERSION}"
    if profile == blank_profile():
        return None
    num_units, row = 2 * profile.layers, 4 * profile.channels
    if min(profile.layers, profile.heads, profile.dim) < 1 or profile.dim % 2:
        return "its shape is not that of a model"
    if profile.entropy not in set(Entropy):
        return f"it names an unknown coder {profile.entropy}"
    if len(profile.units) != num_units or any(
        len(part) != row for unit in profile.units for part in _rows_of(unit)
    ):
        return "its scales do not fit its shape"
    for unit in profile.units:
        mean, sigma, low, high = map(floats, _rows_of(unit))
        if not all(np.isfinite(part).all() for part in (mean, sigma, low, high)):
            return "a scale is not a number"
        if (sigma <= 0).any() or (high < low).any():
            return "a scale is not positive, or a channel has no range"
    return next(filter(None, (_level_fault(profile, name) for name in profile.levels)), None)


def _rows_of(unit: UnitScales) -> tuple[bytes, ...]:
    return unit.mean, unit.sigma, unit.low, unit.high


def _level_fault(profile: CodecProfile, name: str) -> str | None:
    level, figures = LEVELS.get(name), profile.levels[name]
    if level is None:
        return f"it has an unknown level {name!r}"
    known = set(Transform)
    if len(figures.transforms) != len(profile.units) or not known.issuperset(figures.transforms):
        return f"its level {name} has unknown transforms"
    measured = figures.bits_per_element, figures.clipped, figures.accuracy_lost, figures.kl
    if not all(map(math.isfinite, measured)) or not 0 < figures.bits_per_element <= _MOST_BITS:
        return f"its level {name} has figures that nobody can have measured"
    size = 2 * len(profile.units) * profile.channels * (2 * level.most + 1)
    if profile.entropy == Entropy.ARITHMETIC and len(figures.probabilities) != size:
        return f"its level {name} has no distributions"
    return None


def check_levels(names: Sequence[str], profile: CodecProfile | None) -> tuple[str, ...]:
    """Return the levels that an operator asked for, from the finest to the coarsest.

    Raises:
        ConfigError: A name is unknown, or a level is not in the profile.
    """
    flag = "--blend-store-levels"
    unknown = [name for name in names if name not in LEVEL_NAMES]
    if unknown:
        raise ConfigError(
            f"{flag}: unknown level {unknown[0]!r}, expected {', '.join(LEVEL_NAMES)}"
        )
    for name in names:
        if name == LOSSLESS:
            continue
        if profile is None:
            raise ConfigError(f"{flag} {name} needs --blend-store-profile")
        if name not in profile.levels:
            within = ", ".join((LOSSLESS, *profile.levels))
            raise ConfigError(f"{flag}: level {name} is not in the profile, which has {within}")
    return tuple(name for name in LEVEL_NAMES if name in names)

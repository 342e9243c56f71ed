"""The levels at which the chunks of a server are stored."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch

from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.coder import Coder, PageCoder, Rotation
from sgl_blend.storage.codec.collector import Collector
from sgl_blend.storage.codec.levels import LEVELS, CodecProfile, Transform
from sgl_blend.storage.codec.quantiser import make_unit_code
from sgl_blend.storage.codec.streams import StoreSpeed
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.frames import ITEM_BYTES
from sgl_blend.storage.level_names import LOSSLESS

_LOSSLESS_SHARE = 0.75
"""What a lossless page takes of its KV until one is seen."""
_STEP = 0.25
"""Weight of a new page in the mean size of its level."""


class StoredLevels:
    """How the chunks of one server are stored. Safe to use from many threads.

    Args:
        names: Levels that are written, from the finest to the coarsest.
        profile: Holds those that are not lossless; None if there is no other.
        rotation: Of the model's keys.

    Attributes:
        names: Levels that are written, from the finest to the coarsest.
        readable: Levels that are looked for: KV that was stored losslessly serves too.
        profile: Digest of the profile; empty without one.
        speed: How fast pages come at each level.
    """

    def __init__(
        self, names: Sequence[str], profile: CodecProfile | None, rotation: Rotation | None
    ) -> None:
        self.names = tuple(names)
        coded = () if profile is not None and profile.is_blank else names
        self.readable = tuple(dict.fromkeys((LOSSLESS, *coded)))
        self.profile = "" if profile is None else profile.digest()
        self._profile = profile
        self._rotation = rotation
        self._lock = Lock()
        self._coders: dict[tuple[str, PageFormat], PageCoder] = {}
        self._shares: dict[str, float] = {}
        self.speed = StoreSpeed()
        if self.names != (LOSSLESS,):
            fast.warm_up()

    def are_of(self, weights: str) -> bool:
        """Tell whether the profile was measured on these weights."""
        profile = self._profile
        return profile is not None and (profile.is_blank or profile.weights == weights)

    def prepare(self, form: PageFormat) -> None:
        """Make everything that pages are coded with; no thread that serves has to.

        Raises:
            ConfigError: The profile is of a model of another shape, or a package is missing.
        """
        for level in self.names:
            if level != LOSSLESS:
                self.coder(level, form)

    def coder(self, level: str, form: PageFormat) -> PageCoder:
        """Return what codes pages at a level that is not lossless."""
        assert self._profile is not None, f"no profile for {level}"
        assert self._rotation is not None, f"no rotation for {level}"
        with self._lock:
            coder = self._coders.get((level, form))
            if coder is None:
                if self._profile.is_blank:
                    coder = Collector(form, self._rotation)
                else:
                    coder = Coder(self._profile, level, form, self._rotation)
                self._coders[level, form] = coder
        return coder

    def half_bins(self) -> torch.Tensor | None:
        """Return how far rounding moves V at least, at whatever level it came.

        Returns:
            float32 [layers, KV heads, head_dim], half a bin of the finest level; None if that is
            lossless.
        """
        profile, finest = self._profile, self.names[0]
        if profile is None or profile.is_blank or finest == LOSSLESS:
            return None
        level = LEVELS[finest]
        codes = [
            make_unit_code(profile, level, 2 * layer + 1, Transform.DIRECT, slice(None))
            for layer in range(profile.layers)
        ]
        return torch.stack([code.step / 2 for code in codes])

    def share_of(self, level: str, dtype: str) -> float:
        """Return what a level takes of the bytes of KV, by the pages that were seen."""
        with self._lock:
            if (seen := self._shares.get(level)) is not None:
                return seen
        if self._profile is None or level not in self._profile.levels:
            return _LOSSLESS_SHARE
        return self._profile.levels[level].bits_per_element / 8 / ITEM_BYTES[dtype]

    @property
    def lossless_share(self) -> float:
        """What exact KV takes of its bytes, by the pages that were seen."""
        with self._lock:
            return self._shares.get(LOSSLESS, _LOSSLESS_SHARE)

    def saw(self, level: str, stored_bytes: int, kv_bytes: int) -> None:
        """Learn from a page how much a level takes."""
        share = stored_bytes / kv_bytes
        with self._lock:
            before = self._shares.get(level, share)
            self._shares[level] = before + _STEP * (share - before)

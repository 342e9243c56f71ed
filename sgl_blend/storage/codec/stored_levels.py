"""The levels at which chunks are stored, and which of them the next chunk of a request comes at.

CacheGen §5.3: for each chunk the finest level that is there in time, by the throughput of the last
chunk. If none is, the chunk's text is computed where that is faster, else the coarsest level comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.coder import Coder, PageCoder, Rotation
from sgl_blend.storage.codec.collector import Collector
from sgl_blend.storage.codec.levels import CodecProfile
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.frames import ITEM_BYTES
from sgl_blend.storage.level_names import LOSSLESS

_LOSSLESS_SHARE = 0.75
"""What a lossless page takes of its KV until one is seen."""
_UNKNOWN_BYTES_PER_S = 1e9
"""What a store gives until something was read."""
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
        self._bytes_per_s = _UNKNOWN_BYTES_PER_S
        if self.names != (LOSSLESS,):
            fast.warm_up()

    @property
    def bytes_per_s(self) -> float:
        """What the store gave at last, in stored bytes a second."""
        return self._bytes_per_s

    def heard(self, stored_bytes: int, seconds: float) -> None:
        """Learn from pages that were read how fast the store is."""
        if stored_bytes > 0 and seconds > 0:
            self._bytes_per_s = stored_bytes / seconds

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

    def share_of(self, level: str, dtype: str) -> float:
        """Return what a level takes of the bytes of KV, by the pages that were seen."""
        with self._lock:
            if (seen := self._shares.get(level)) is not None:
                return seen
        if self._profile is None or level not in self._profile.levels:
            return _LOSSLESS_SHARE
        return self._profile.levels[level].bits_per_element / 8 / ITEM_BYTES[dtype]

    def saw(self, level: str, stored_bytes: int, kv_bytes: int) -> None:
        """Learn from a page how much a level takes."""
        share = stored_bytes / kv_bytes
        with self._lock:
            before = self._shares.get(level, share)
            self._shares[level] = before + _STEP * (share - before)


class RequestStream:
    """What remains to be read for one request, and until when.

    Made by the scheduler's thread; asked by the thread that reads.

    Args:
        deadline_s: When all of it must be in host memory, by ``clock``; None: as soon as it can.
        kv_bytes: KV of all chunks that are asked for, in bytes.
        bytes_per_s: What the store gives, in stored bytes, until a chunk has been read.
        text_s: Seconds that computing takes by the bytes of KV; None if nobody knows.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        deadline_s: float | None,
        kv_bytes: int,
        bytes_per_s: float,
        text_s: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_s = deadline_s
        self._left = kv_bytes
        self._bytes_per_s = bytes_per_s
        self._text_s = text_s
        self._clock = clock
        self._lock = Lock()

    def choose(self, kv_bytes: int, shares: Sequence[tuple[str, float]]) -> str | None:
        """Return at which level the next chunk comes.

        Args:
            kv_bytes: Its KV, in bytes.
            shares: Levels at which it is stored, from the finest on, each with what it takes of the
                bytes of KV; at least one.

        Returns:
            A level; None if computing its text is faster.
        """
        with self._lock:
            left, rate = max(self._left, kv_bytes), self._bytes_per_s
        if self._deadline_s is None:
            return shares[-1][0]
        remaining_s = self._deadline_s - self._clock()
        for level, share in shares:
            if share * left / rate <= remaining_s:
                return level
        level, share = shares[-1]
        text_s = math.inf if self._text_s is None else self._text_s(kv_bytes)
        return level if share * kv_bytes / rate <= text_s else None

    def came(self, kv_bytes: int, stored_bytes: int, seconds: float) -> None:
        """Note a chunk that was read, or of which nothing was."""
        with self._lock:
            self._left = max(0, self._left - kv_bytes)
            if stored_bytes > 0 and seconds > 0:
                self._bytes_per_s = stored_bytes / seconds


class ChunkStream:
    """One chunk on its way from the store; used by the threads that read.

    Args:
        request: The request that it is read for.
        kv_bytes: KV of the chunk, in bytes.
    """

    def __init__(self, request: RequestStream, kv_bytes: int) -> None:
        self._request = request
        self._kv_bytes = kv_bytes
        self._stored: dict[str, tuple[str, ...]] = {}
        self._begun = False
        self._level: str | None = None
        self._came: dict[str, int] = {}

    def found(self, key: str, levels: Iterable[str]) -> None:
        """Note at which levels a page is stored, from the finest on."""
        self._stored[key] = tuple(levels)

    def levels_of(self, key: str) -> tuple[str, ...]:
        """Return at which levels a page is stored, from the finest on."""
        return self._stored.get(key, ())

    def level_of(self, key: str, share_of: Callable[[str], float]) -> str | None:
        """Return at which level to read a page; None to leave it."""
        stored = self.levels_of(key)
        if not stored:
            return None
        if not self._begun:
            self._begun = True
            shares = [(level, share_of(level)) for level in stored]
            self._level = self._request.choose(self._kv_bytes, shares)
        if self._level is None:
            return None
        # A page that was not written at this level, on a full disk, comes at a coarser one.
        return self._level if self._level in stored else stored[-1]

    def read(self, level: str) -> None:
        """Note a page that came."""
        self._came[level] = self._came.get(level, 0) + 1

    def ended(self, stored_bytes: int, seconds: float) -> None:
        """Note that no more of it is read."""
        self._request.came(self._kv_bytes, stored_bytes, seconds)

    @property
    def level(self) -> str | None:
        """The level of most of its pages; None if none came."""
        return max(self._came, key=lambda level: self._came[level], default=None)

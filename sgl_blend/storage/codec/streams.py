"""At which level the next chunk of a request comes from the store.

CacheGen §5.3: for each chunk the finest level that is there in time, at the throughput of the last
chunk. If none is, the chunk's text is computed where that is faster, else the coarsest level comes.

A chunk that has been begun cannot change its level any more. So a level above the coarsest must also be
in time if everything takes a quarter longer than expected. And it must be in time if the store becomes
as slow, from now on, as it was in any second of the last minute, and all that comes after this chunk is
the coarsest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock

_STEP = 0.25
"""Weight of a new page in the mean time to decode its level."""
_FORGOTTEN_S = 10.0
"""After so long without a page nobody knows how fast the link is."""
_WORST_OF_S = 60.0
"""How far back the slowest second counts."""
_LEAST_BUSY_S = 0.05
"""A link that was busy for less in a second tells about its jitter."""
_MARGIN = 1.25
"""How much longer than expected a load at a level above the coarsest may take, and still be in time."""
_DECODE_S_PER_BYTE = 1 / 600e6
"""Of KV, until a page of the level is decoded: what one core does at least (benchmarks/codec.py)."""


class StoreSpeed:
    """How fast pages come at each level. Safe to use from many threads.

    The link and the decoder are told apart. A page that takes long to decode says nothing about the
    link, and a link that is slow is slow for all levels. What was heard of the link is forgotten after
    a while: a store that was too slow for every chunk would never be asked again.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s = -math.inf
        self._lock = Lock()
        self._bytes_per_s: float | None = None
        self._by_second: dict[int, tuple[int, float]] = {}
        self._decode_s: dict[str, float] = {}

    def heard(self, stored_bytes: int, seconds: float) -> None:
        """Note stored bytes that came over the link, and the seconds it was busy with them."""
        if stored_bytes > 0 and seconds > 0:
            with self._lock:
                self._bytes_per_s = stored_bytes / seconds
                self._note(stored_bytes, seconds)

    def gave_up(self, stored_bytes: int, seconds: float) -> None:
        """Note that so many stored bytes did not come in so many seconds."""
        if stored_bytes > 0 and seconds > 0:
            with self._lock:
                most, known = stored_bytes / seconds, self._known()
                self._bytes_per_s = most if known is None else min(most, known)
                self._heard_s = self._clock()
                if most <= self._bytes_per_s:
                    self._note(stored_bytes, seconds)

    def _note(self, stored_bytes: int, seconds: float) -> None:
        self._heard_s = now_s = self._clock()
        moved, busy_s = self._by_second.get(int(now_s), (0, 0.0))
        self._by_second[int(now_s)] = moved + stored_bytes, busy_s + seconds
        for second in [one for one in self._by_second if one < now_s - _WORST_OF_S]:
            del self._by_second[second]

    def decoded(self, level: str, kv_bytes: int, seconds: float) -> None:
        """Note that KV of a level was decoded and checked."""
        each = seconds / kv_bytes
        with self._lock:
            before = self._decode_s.get(level, each)
            self._decode_s[level] = before + _STEP * (each - before)

    def seconds(self, level: str, share: float, kv_bytes: int, *, at_worst: bool = False) -> float:
        """Return how long KV takes to come at a level; endless while nothing is known of the link.

        Args:
            level: Its name.
            share: What it takes of the bytes of KV.
            kv_bytes: The KV.
            at_worst: Go by the slowest second of the last minute, not by the last pages.
        """
        with self._lock:
            rate, decode_s = self._known(), self._decode_s.get(level, _DECODE_S_PER_BYTE)
            if at_worst and rate is not None:
                rate = min(rate, self._slowest())
        if rate is None:
            return math.inf
        return kv_bytes * max(share / rate, decode_s)

    def _slowest(self) -> float:
        oldest_s = self._clock() - _WORST_OF_S
        rates = [
            moved / busy_s
            for second, (moved, busy_s) in self._by_second.items()
            if busy_s >= _LEAST_BUSY_S and second >= oldest_s
        ]
        return min(rates, default=math.inf)

    def _known(self) -> float | None:
        return self._bytes_per_s if self._clock() - self._heard_s < _FORGOTTEN_S else None


class RequestStream:
    """What remains to be read for one request, and until when.

    Made by the scheduler's thread; asked by the threads that read.

    Args:
        deadline_s: When all of it must be in host memory, by ``clock``; None: as soon as it can.
        kv_bytes: KV of everything that is to be asked for, in bytes.
        speed: Of the store.
        text_s: Seconds that computing takes by the bytes of KV; None if nobody knows.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        deadline_s: float | None,
        kv_bytes: int,
        speed: StoreSpeed,
        text_s: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_s = deadline_s
        self._left = kv_bytes
        self._speed = speed
        self._text_s = text_s
        self._clock = clock
        self._lock = Lock()

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 beyond it, and without one."""
        return 0.0 if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def affords(self, level: str, share: float, kv_bytes: int) -> bool:
        """Tell whether KV may come at a level before everything else that is asked for.

        With a deadline it must be there by then, as far as is known. Without one it must not take
        longer than to compute it, unless nothing is known.

        Args:
            level: Its name.
            share: What it takes of the bytes of KV.
            kv_bytes: The KV.
        """
        load_s = self._speed.seconds(level, share, kv_bytes, at_worst=True)
        if self._deadline_s is not None:
            return load_s <= self.remaining_s
        return math.isinf(load_s) or self._text_s is None or load_s <= self._text_s(kv_bytes)

    @property
    def left(self) -> int:
        """Bytes of KV that are still to come."""
        with self._lock:
            return max(0, self._left)

    def choose(self, kv_bytes: int, shares: Sequence[tuple[str, float]]) -> str | None:
        """Return at which level the next chunk comes.

        Args:
            kv_bytes: Its KV, in bytes.
            shares: Levels at which it is stored, from the finest on, each with what it takes of the
                bytes of KV; at least one.

        Returns:
            A level; None if computing its text is faster. While nothing has been read the coarsest.
        """
        if self._deadline_s is None:
            return shares[-1][0]
        left, remaining_s = max(self.left, kv_bytes), self._deadline_s - self._clock()
        coarsest, least = shares[-1]
        rest_s = self._speed.seconds(coarsest, least, left - kv_bytes, at_worst=True)
        for level, share in shares:
            load_s = self._speed.seconds(level, share, left)
            if level != coarsest:
                worst_s = self._speed.seconds(level, share, kv_bytes, at_worst=True) + rest_s
                load_s = max(_MARGIN * load_s, worst_s)
            if load_s <= remaining_s:
                return level
        level, share = coarsest, least
        load_s = self._speed.seconds(level, share, kv_bytes)
        text_s = math.inf if self._text_s is None else self._text_s(kv_bytes)
        return level if math.isinf(load_s) or load_s <= text_s else None

    def add(self, kv_bytes: int) -> None:
        """Note that more is to come, or less: what was read, or will not be."""
        with self._lock:
            self._left += kv_bytes


class ChunkStream:
    """One chunk on its way from the store; used by the threads that read.

    Args:
        request: The request that it is read for.
        num_pages: That are asked for.
        page_bytes: KV of each.
        names: SGLang's hash of each page in the namespace that it comes into, and the one by which its
            objects are named.
        coarsest: Whether it comes at the coarsest level, however much time there is.
    """

    def __init__(
        self,
        request: RequestStream,
        num_pages: int,
        page_bytes: int,
        names: Mapping[str, str],
        *,
        coarsest: bool = False,
    ) -> None:
        self._request = request
        self._coarsest = coarsest
        self._pending = num_pages
        self._page_bytes = page_bytes
        self._names = names
        self._stored: dict[str, tuple[str, ...]] = {}
        self._asked: set[str] = set()
        self._begun = self._over = False
        self._level: str | None = None
        self._came: dict[str, int] = {}
        self._lock = Lock()

    def stored_name(self, key: str) -> str:
        """Return the hash by which the objects of a page are named."""
        return self._names.get(key, key)

    def found(self, key: str, levels: Iterable[str]) -> None:
        """Note at which levels a page is stored, from the finest on."""
        self._stored[key] = tuple(levels)

    def found_all(self) -> None:
        """Note that no more pages are stored than were found."""
        with self._lock:
            self._settle(len(self._stored) - sum(self._came.values()))

    def waits_for(self, key: str) -> bool:
        """Tell whether a page that was found is still to be read for this chunk."""
        return not self._over and key in self._stored and key not in self._asked

    def take(self, keys: Iterable[str]) -> None:
        """Note that pages are about to be read for this chunk."""
        self._asked.update(keys)

    def level_of(self, key: str, share_of: Callable[[str], float]) -> str | None:
        """Return at which level to read a page; None to leave it."""
        stored = self._stored.get(key, ())
        if not stored:
            return None
        if not self._begun:
            self._begun = True
            everywhere = [each for each in stored if self._is_everywhere(each)]
            shares = [(level, share_of(level)) for level in everywhere or stored]
            self._level = self._request.choose(len(self._stored) * self._page_bytes, shares)
        if self._level is None:
            return None
        # A page that was not written at this level, on a full disk, comes at a coarser one. KV that
        # nobody reads is only in the way of what comes after it.
        if self._coarsest:
            return stored[-1]
        return self._level if self._level in stored else stored[-1]

    def _is_everywhere(self, level: str) -> bool:
        return all(level in levels for levels in self._stored.values())

    def read(self, level: str) -> None:
        """Note a page that came."""
        with self._lock:
            self._came[level] = self._came.get(level, 0) + 1
            self._settle(max(0, self._pending - 1))

    def stop(self) -> None:
        """Note that no more of it is read."""
        with self._lock:
            self._settle(0)
            self._over = True

    def _settle(self, pending: int) -> None:
        if not self._over:
            self._request.add((pending - self._pending) * self._page_bytes)
            self._pending = pending

    @property
    def level(self) -> str | None:
        """The level of most of its pages; None if none came."""
        return max(self._came, key=lambda level: self._came[level], default=None)

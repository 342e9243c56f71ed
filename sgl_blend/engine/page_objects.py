"""Pages of KV as objects of a store: found, read, written and removed, and all of it counted."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock

from sgl_blend.engine.read_ahead import Fetched, ReadAhead
from sgl_blend.engine.storage_backends import LateStore
from sgl_blend.storage.breaker import CallFault, GuardedCalls
from sgl_blend.storage.codec.coded_pages import pack_coded, unpack_coded
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.storage.codec.streams import ChunkStream
from sgl_blend.storage.container import LEVEL, PageFormat, PageLabel, pack, unpack
from sgl_blend.storage.counters import StorageCounters
from sgl_blend.storage.envelope import Fault
from sgl_blend.storage.names import ObjectNames

logger = logging.getLogger(__name__)

Observer = Callable[[int, float], None]
_LOSSLESS_SHARE = 0.75  # until a page is seen
_STEP = 0.25
_MOST_SUSPECTS = 10_000
_SPARE_PAGES = 2  # SGLang reads in one thread and writes in another


@dataclass(frozen=True, slots=True)
class Page:
    """A page that came.

    Attributes:
        level: It was coded at.
        stored_bytes: Of its object.
        fetch: When its object was asked for and when it was there, by time.perf_counter.
        decode_s: Seconds to check and decode it.
    """

    level: str
    stored_bytes: int
    fetch: tuple[float, float]
    decode_s: float


class PageObjects:
    """The objects of one rank's pages.

    Args:
        store: The store of objects.
        form: Of a page.
        names: Of the objects.
        calls: Makes all calls of the store.
        key: 32 bytes that encrypt them, or None.

    Attributes:
        names: Of the objects.
        counters: What happened.
        observe: Called after each batch that was read, with its stored bytes and the seconds that
            took, in SGLang's thread.
        lossless_share: What a page that lost nothing takes of the bytes of its KV.
    """

    def __init__(
        self,
        store: LateStore,
        form: PageFormat,
        names: ObjectNames,
        calls: GuardedCalls,
        key: bytes | None,
    ) -> None:
        self.counters = StorageCounters()
        self.observe: Observer | None = None
        self.lossless_share = _LOSSLESS_SHARE
        self.names = names
        self._store = store
        self._form = form
        self._calls = calls
        self._key = key
        self._suspects: dict[str, None] = {}
        self._ahead = ReadAhead(self._fetch, calls, form.page_bytes, self.counters.fault)
        self._spare: deque[bytearray] = deque(maxlen=_SPARE_PAGES)
        self._lock = Lock()

    @property
    def levels(self) -> StoredLevels | None:
        """At which chunks are stored; None: nothing is lost."""
        return self.names.levels

    def labels(self, keys: Sequence[str], level: str) -> list[PageLabel]:
        """Return what the objects of pages say about themselves; nothing if that is not known."""
        found = [self.names.label(key, level) for key in keys]
        return [label for label in found if label is not None] if None not in found else []

    def count(self, keys: Sequence[str], level: str) -> int:
        """Return how many of the pages, from the first on, are stored at a level."""
        labels = self.labels(keys, level)
        if not labels:
            return 0
        names = [label.name for label in labels]
        found = self._calls.call(lambda: self._store.get().count(names))
        if isinstance(found, CallFault):
            self.counters.fault(found)
            return 0
        return found

    def read(
        self,
        labels: Sequence[PageLabel],
        stream: ChunkStream | None,
        is_wanted: Callable[[], bool],
    ) -> Iterator[bytearray]:
        """Yield pages until one is missing, as SGLang uses none after it, or nobody wants them.

        A page is good until the next one is asked for: its memory is used again. New memory for each
        would cost as much as decoding.

        Args:
            labels: Of the pages.
            stream: The chunk that they are read for; None if that is not known.
            is_wanted: Tells whether they are still needed. SGLang stops its threads for a flush, and
                ends the server if they do not stop within ten seconds.
        """
        came: list[Page] = []
        late: PageLabel | None = None
        began, into = time.perf_counter(), self._memory()
        with closing(self._ahead.objects(labels, is_wanted)) as objects:
            for index, found in enumerate(objects):
                page = self._decode(found, labels[index], into)
                if not isinstance(page, Page):
                    late = labels[index] if page is CallFault.TIMEOUT else None
                    self._note_end(labels[index:], page, stream)
                    break
                came.append(page)
                yield into
        self._spare.append(into)
        self._note_read(came, stream, time.perf_counter() - began)
        self._note_speed(came, late, time.perf_counter() - began)

    def _note_end(
        self,
        labels: Sequence[PageLabel],
        why: Fault | CallFault | None,
        stream: ChunkStream | None,
    ) -> None:
        """Take note of the first page that did not come, of those that were left."""
        is_free = self._note_missing(labels[0].name, why)
        if isinstance(why, Fault):
            self._suspect(labels[is_free:])
        if stream is not None:
            stream.stop()

    def _fetch(self, label: PageLabel) -> Fetched | None:
        began = time.perf_counter()
        data = self._store.get().read(label.name)
        return None if data is None else Fetched(data, (began, time.perf_counter()))

    def _decode(
        self, found: Fetched | CallFault | None, label: PageLabel, into: bytearray
    ) -> Page | Fault | CallFault | None:
        """Put the page of an object into memory; return why there is none.

        It runs in SGLang's thread, where one page after the other has this memory. So it stays in the
        core's cache until it is copied.
        """
        if not isinstance(found, Fetched):
            return found
        began, levels = time.perf_counter(), self.levels
        if label.level != LEVEL and levels is None:  # the weights are others now
            return None
        try:
            if label.level == LEVEL or levels is None:
                made = unpack(found.data, label, self._key, into)
            else:
                coder = levels.coder(label.level, label.format)
                made = unpack_coded(found.data, label, coder, self._key, into)
        except Exception:  # SGLang's reading thread would die of it, and load nothing again
            logger.exception("sgl-blend: a page could not be decoded")
            return CallFault.ERROR
        if isinstance(made, Fault):
            return made
        return Page(label.level, len(found.data), found.span, time.perf_counter() - began)

    def _memory(self) -> bytearray:
        """Return memory for a page that nobody else has."""
        try:
            return self._spare.pop()
        except IndexError:
            return bytearray(self._form.page_bytes)

    def _note_missing(self, name: str, why: Fault | CallFault | None) -> bool:
        """Count a page that did not come, and remove what is wrong; return whether its name is free."""
        if why is None:
            self.counters.add("misses")
            return True
        self.counters.fault(why)
        if why in (Fault.CORRUPT, Fault.MISMATCH, Fault.VERSION):
            # Or it would stay there: no backend writes over what it has.
            gone = self._calls.call(lambda: self._store.get().remove(name))
            stays = isinstance(gone, CallFault)
            logger.warning(
                "sgl-blend: stored object %s %s: %s",
                name,
                "could not be removed" if stays else "was removed",
                why,
            )
            self.counters.add("removed", int(not stays))
            return not stays
        return False

    def _suspect(self, labels: Sequence[PageLabel]) -> None:
        """Look at pages once more before they are taken for stored: one near them is faulty."""
        with self._lock:  # SGLang reads in one thread and writes in another
            self._suspects.update(dict.fromkeys(label.name for label in labels))
            while len(self._suspects) > _MOST_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]

    def _is_stored(self, label: PageLabel) -> bool | Fault | CallFault:
        """Tell whether a page is stored; one that is under suspicion is read, and removed if faulty.

        A Fault is that of an object which stays and keeps the page from being stored.
        """
        stored = self._calls.call(lambda: self._store.get().count([label.name]) == 1)
        with self._lock:
            is_suspect = label.name in self._suspects
            self._suspects.pop(label.name, None)
        if stored is not True or not is_suspect:
            return stored
        into = self._memory()
        page = self._decode(self._calls.call(lambda: self._fetch(label)), label, into)
        self._spare.append(into)
        if isinstance(page, Page | CallFault):
            return True
        if self._note_missing(label.name, page) or page is None:
            return False
        self._suspect([label])
        return page

    def _note_read(self, came: Sequence[Page], stream: ChunkStream | None, seconds: float) -> None:
        stored_bytes = sum(page.stored_bytes for page in came)
        if stream is not None:
            for page in came:
                stream.read(page.level)
        if not came:
            return
        each = self._form.page_bytes
        for page in came:
            self.counters.add_level(page.level)
            if (levels := self.levels) is not None:
                levels.saw(page.level, page.stored_bytes, each)
        self.counters.add("hits", len(came))
        self.counters.add_moved("read", len(came) * each, seconds)
        if came[0].level == LEVEL:
            self.lossless_share += _STEP * (came[0].stored_bytes / each - self.lossless_share)
        if self.observe is not None:
            self.observe(stored_bytes, seconds)

    def _note_speed(self, came: Sequence[Page], late: PageLabel | None, seconds: float) -> None:
        """Learn from what was read, and from what was not, how fast pages come at each level."""
        if (levels := self.levels) is None:
            return
        stored_bytes = sum(page.stored_bytes for page in came)
        levels.speed.heard(stored_bytes, _covered_s([page.fetch for page in came]))
        for page in came:
            levels.speed.decoded(page.level, self._form.page_bytes, page.decode_s)
        if late is not None:
            missing = levels.share_of(late.level, self._form.dtype) * self._form.page_bytes
            levels.speed.gave_up(stored_bytes + round(missing), seconds)

    def write(self, key: str, level: str, read: Callable[[], memoryview], position: int) -> bool:
        """Store a page at a level, unless it is; return whether it is stored.

        Args:
            key: SGLang's hash of the page.
            level: At which it is coded.
            read: Returns the bytes of the page.
            position: Of its first token; of no account if nothing is lost.
        """
        label = self.names.label(key, level)
        if label is None:
            self.counters.add("not_stored")
            return False
        began = time.perf_counter()
        stored = self._is_stored(label)
        if stored is True:
            return True
        if stored is False:
            # The page is copied here: after a call that is given up, it may be another's.
            data = self._pack(read(), label, position)
            if data is not None:
                stored = self._calls.call(lambda: self._store.get().write(label.name, data))
        if isinstance(stored, CallFault):
            self.counters.fault(stored)
        if stored is not True:
            self.counters.add("not_stored")
            return False
        self.counters.add("writes")
        self.counters.add_moved("write", label.format.page_bytes, time.perf_counter() - began)
        return True

    def _pack(self, page: memoryview, label: PageLabel, position: int) -> bytearray | None:
        """Return the object of a page; None if it cannot be made.

        It runs in SGLang's thread, which would die of an exception and never write again.
        """
        levels = self.levels
        if label.level == LEVEL:
            return pack(page, label, self._key)
        if levels is None:  # the weights are others now
            return None
        try:
            coder = levels.coder(label.level, label.format)
            data, clipped = pack_coded(page, label, coder, position, self._key)
        except Exception:  # SGLang's writing thread would die of it, and nothing be stored again
            logger.exception("sgl-blend: a page could not be coded")
            self.counters.fault("not_coded")
            return None
        levels.saw(label.level, len(data), label.format.page_bytes)
        self.counters.add("clipped", clipped)
        return data


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of some spans of time lasted."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered

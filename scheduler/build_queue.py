"""Chunks that wait to be built: what was missed last comes first, tenants in turns.

While there is time for all of them, the order hardly matters. While there is not, what was missed last
is the likeliest to be asked for again, and what waits longest would push it out of the cache. But a
build prefix that was missed first is built first: it may be the beginning of another one, whose build
would store it too, and then its KV would not come from a build of its own length.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_blend.engine.adapters import FitsClass
from sgl_blend.radix_ext.chunk_store import ChunkKey


@dataclass(slots=True)
class _Line:
    """The keys of one namespace.

    Attributes:
        keys: Steps spent on each so far; what was missed last stands at the end.
        groups: The same keys by build prefix, in the order of the groups' turns.
        begun: The key on which a step was spent last, until it is removed.
        since_s: When a key was first asked for since the last one that was removed, in seconds; None
            if none was.
        num_bytes: Bytes of the keys together.
    """

    keys: OrderedDict[ChunkKey, int] = field(default_factory=OrderedDict)
    groups: OrderedDict[bytes, OrderedDict[ChunkKey, None]] = field(default_factory=OrderedDict)
    begun: ChunkKey | None = None
    since_s: float | None = None
    num_bytes: int = 0

    @property
    def first(self) -> ChunkKey:
        """Return the key to be built next: one that was begun is finished first."""
        if self.begun is not None:
            return self.begun
        return next(reversed(next(iter(self.groups.values()))))

    def first_of(self, fits: FitsClass) -> ChunkKey | None:
        """Return the first key whose class fits, or None."""
        waiting = (key for group in self.groups.values() for key in reversed(group))
        return next((key for key in (self.first, *waiting) if fits(key.extra_key)), None)

    def put(self, key: ChunkKey) -> None:
        """Make a key the one that was missed last."""
        self.keys.setdefault(key, 0)
        self.keys.move_to_end(key)
        group = self.groups.setdefault(key.prefix, OrderedDict())
        group[key] = None
        group.move_to_end(key)

    def drop(self, key: ChunkKey) -> None:
        """Take a key out; with the first one the turn of its group ends."""
        if key == self.first:
            self.begun = self.since_s = None
            self.groups.move_to_end(key.prefix)
        del self.keys[key], self.groups[key.prefix][key]
        if not self.groups[key.prefix]:
            del self.groups[key.prefix]


class BuildQueue:
    """A bounded queue of chunk keys, one line per namespace; owned by the scheduler thread.

    In the line whose turn it is, build prefixes take turns, in the order in which they were missed. Of
    the one whose turn it is, the key that was missed last stands first. It is finished before another
    is begun. Each step passes the turn on. So a tenant that misses thousands of chunks delays
    another's by one step each.

    Args:
        max_keys: Most keys held; beyond it the line with the most bytes loses its oldest.
        max_bytes: Most bytes of tokens held, likewise; a single key may be larger.

    Attributes:
        num_forgotten: Keys given up, by overflow or by forget().
    """

    def __init__(self, max_keys: int, max_bytes: int) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        # Bytes, negative, and salt of each line. Old entries go when they are looked at.
        self._by_size: list[tuple[int, str]] = []
        self._size = 0
        self._num_bytes = 0
        self.num_forgotten = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: ChunkKey) -> bool:
        line = self._lines.get(key.salt)
        return line is not None and key in line.keys

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys' tokens."""
        return self._num_bytes

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Put keys before those that wait after their build prefix, the last one first.

        They may wait already.
        """
        for key in keys:
            line = self._lines.setdefault(key.salt, _Line())
            waits = key in line.keys
            line.put(key)
            if waits:
                continue
            self._count(line, 1, key)
            self._note_size(key.salt, line)
            while self._size > 1 and self._is_over():
                self.forget(next(iter(self._largest().keys)))

    def first(self, fits: FitsClass | None = None) -> ChunkKey | None:
        """Return the key whose turn it is, or None.

        Args:
            fits: Tells which classes may be built now; by default all of them.
        """
        for line in self._lines.values():
            if fits is None:
                return line.first
            if (key := line.first_of(fits)) is not None:
                return key
        return None

    def since_s(self, key: ChunkKey, now_s: float) -> float:
        """Return since when a first key could have been built: since it or one before it was asked for.

        Args:
            key: The key that first() returned.
            now_s: The clock.

        Returns:
            Seconds of the clock. It counts anew when the first key is removed.
        """
        line = self._lines[key.salt]
        if line.since_s is None:
            line.since_s = now_s
        return line.since_s

    def spend(self, key: ChunkKey) -> int:
        """Count a step spent on a key and pass the turn on; return how many it has had."""
        line = self._lines[key.salt]
        line.keys[key] += 1
        line.begun = key
        self._lines.move_to_end(key.salt)
        return line.keys[key]

    def remove(self, key: ChunkKey) -> None:
        """Take a key out; harmless if it does not wait."""
        if key not in self:
            return
        line = self._lines[key.salt]
        line.drop(key)
        self._count(line, -1, key)
        if not line.keys:
            del self._lines[key.salt]

    def forget(self, key: ChunkKey) -> None:
        """Give a key up."""
        self.num_forgotten += key in self
        self.remove(key)

    def clear(self) -> None:
        """Drop all keys."""
        self._lines.clear()
        self._by_size.clear()
        self._size = self._num_bytes = 0

    def _largest(self) -> _Line:
        """Return the line with the most bytes, without a look at all of them."""
        while True:
            known, salt = self._by_size[0]
            line = self._lines.get(salt)
            if line is not None and line.num_bytes == -known:
                return line
            heapq.heappop(self._by_size)  # it has lost keys since
            if line is not None:
                heapq.heappush(self._by_size, (-line.num_bytes, salt))

    def _note_size(self, salt: str, line: _Line) -> None:
        heapq.heappush(self._by_size, (-line.num_bytes, salt))
        if len(self._by_size) > 4 * len(self._lines) + 64:
            self._by_size = [(-line.num_bytes, salt) for salt, line in self._lines.items()]
            heapq.heapify(self._by_size)

    def _is_over(self) -> bool:
        return self._size > self._max_keys or self._num_bytes > self._max_bytes

    def _count(self, line: _Line, sign: int, key: ChunkKey) -> None:
        num_bytes = sign * (len(key.prefix) + len(key.tokens))
        self._size += sign
        self._num_bytes += num_bytes
        line.num_bytes += num_bytes

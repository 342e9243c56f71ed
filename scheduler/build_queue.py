"""Chunks that wait to be built: in the order in which they were missed, tenants in turns."""

from collections import OrderedDict
from collections.abc import Iterable

from sgl_blend.radix_ext.chunk_store import ChunkKey


class BuildQueue:
    """A bounded queue of chunk keys, one line per namespace; owned by the scheduler thread.

    The head of the line whose turn it is stands first, and taking it out passes the turn on. So a
    tenant that misses thousands of chunks delays another's by one build each.

    Args:
        limit: Most keys held; beyond it the longest line loses its oldest.

    Attributes:
        num_forgotten: Keys given up, by overflow or by forget().
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, OrderedDict[ChunkKey, float]] = OrderedDict()
        self._size = 0
        self.num_forgotten = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._lines.get(key.salt, ())

    def add(self, keys: Iterable[ChunkKey], since_s: float) -> None:
        """Put keys at the end of their lines; one that waits already keeps its place."""
        for key in keys:
            if key not in self:
                self._lines.setdefault(key.salt, OrderedDict())[key] = since_s
                self._size += 1
            if self._size > self._limit:
                longest = max(self._lines.values(), key=len)
                self.forget(next(iter(longest)))

    def first(self) -> ChunkKey | None:
        """Return the key whose turn it is, or None."""
        for line in self._lines.values():
            return next(iter(line))
        return None

    def since_s(self, key: ChunkKey) -> float:
        """Return when a key was added, in seconds."""
        return self._lines[key.salt][key]

    def remove(self, key: ChunkKey) -> None:
        """Take a key out and pass the turn on; harmless if it does not wait."""
        line = self._lines.get(key.salt)
        if line is None or line.pop(key, None) is None:
            return
        self._size -= 1
        if line:
            self._lines.move_to_end(key.salt)
        else:
            del self._lines[key.salt]

    def forget(self, key: ChunkKey) -> None:
        """Give a key up."""
        self.num_forgotten += key in self
        self.remove(key)

    def clear(self) -> None:
        """Drop all keys."""
        self._lines.clear()
        self._size = 0

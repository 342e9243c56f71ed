"""Chunks that wait to be built: in the order in which they were missed, tenants in turns."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_blend.radix_ext.chunk_store import ChunkKey


@dataclass(slots=True)
class _Waiting:
    """What is known of one key.

    Attributes:
        since_s: When it was first asked for, in seconds; None if it never was.
        steps: Steps spent on it so far.
    """

    since_s: float | None = None
    steps: int = 0


@dataclass(slots=True)
class _Line:
    """The keys of one namespace, oldest first, and their bytes together."""

    keys: OrderedDict[ChunkKey, _Waiting] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class BuildQueue:
    """A bounded queue of chunk keys, one line per namespace; owned by the scheduler thread.

    The head of the line whose turn it is stands first, and each step spent on it passes the turn on.
    So a tenant that misses thousands of chunks delays another's by one step each.

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
        """Put keys at the end of their lines; one that waits already keeps its place."""
        for key in keys:
            if key in self:
                continue
            line = self._lines.setdefault(key.salt, _Line())
            line.keys[key] = _Waiting()
            self._count(line, 1, key)
            while self._size > 1 and self._is_over():
                largest = max(self._lines.values(), key=lambda line: line.num_bytes)
                self.forget(next(iter(largest.keys)))

    def first(self) -> ChunkKey | None:
        """Return the key whose turn it is, or None."""
        for line in self._lines.values():
            return next(iter(line.keys))
        return None

    def since_s(self, key: ChunkKey, now_s: float) -> float:
        """Return since when a key could have been built: since this was first asked, in seconds."""
        waiting = self._lines[key.salt].keys[key]
        if waiting.since_s is None:
            waiting.since_s = now_s
        return waiting.since_s

    def spend(self, key: ChunkKey) -> int:
        """Count a step spent on a key and pass the turn on; return how many it has had."""
        waiting = self._lines[key.salt].keys[key]
        waiting.steps += 1
        self._lines.move_to_end(key.salt)
        return waiting.steps

    def remove(self, key: ChunkKey) -> None:
        """Take a key out; harmless if it does not wait."""
        if key not in self:
            return
        line = self._lines[key.salt]
        del line.keys[key]
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
        self._size = self._num_bytes = 0

    def _is_over(self) -> bool:
        return self._size > self._max_keys or self._num_bytes > self._max_bytes

    def _count(self, line: _Line, sign: int, key: ChunkKey) -> None:
        num_bytes = sign * (len(key.prefix) + len(key.tokens))
        self._size += sign
        self._num_bytes += num_bytes
        line.num_bytes += num_bytes

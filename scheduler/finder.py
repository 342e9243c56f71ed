"""Finding: stored chunks in text that nobody marked.

When a request arrives, all windows of 16 tokens of its prompt are looked for in the index of starts.
Where one is known a chunk may begin, and the tree says how much of it stands there. Attention is
causal: the first tokens of a stored chunk are what a build of them alone would give, its last ones are
not. So a piece begins where a chunk begins, and may end anywhere.

    intake      head or BOS -> windows -> starts -> pieces        find
    build       a chunk is stored                                 built
    eviction    starts that nobody used are forgotten             evicted
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_blend.engine.tree import TOKEN_BYTES
from sgl_blend.finding.cover import Candidates, cover, most_walks
from sgl_blend.finding.fingerprints import WINDOW, Fingerprints, WindowHash
from sgl_blend.finding.heads import Heads
from sgl_blend.finding.spans import Span as Piece
from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.start_index import StartIndex

Ids = NDArray[np.int64]

_LEAST_PART = 64
"""Tokens of the shortest part of a chunk that is used. A shorter chunk is used as a whole."""


@dataclass(frozen=True, slots=True)
class Search:
    """What was looked for in a prompt when it arrived.

    Attributes:
        tenant: Whose prompt it is.
        home: Namespace and build prefix of its chunks, as a chunk of no tokens.
        num_tokens: Of the prompt. In a session that is the last turn.
        learns: Whether chunks are made of it.
    """

    tenant: str
    home: ChunkKey
    num_tokens: int
    learns: bool


def ids_of(tokens: array[int]) -> Ids:
    """Return a view of a prompt: int64 [n]."""
    return np.frombuffer(tokens, np.int64) if tokens else np.empty(0, np.int64)


def beginning(home: ChunkKey, tokens: array[int]) -> int:
    """Return how many tokens of a prompt are the build prefix of its chunks, if it begins so."""
    length = home.prefix_length
    return length if tokens[:length].tobytes() == home.prefix else 0


class Finder:
    """Finds stored chunks in prompts; owned by the scheduler thread.

    Args:
        store: Where chunks are.
        windows: Makes fingerprints.
        index: Of how chunks begin.
        heads: Of how prompts begin.
        least: Tokens of the shortest chunk.
        asks_storage: Whether a chunk that is neither on the device nor on the host may be in storage.

    Attributes:
        num_failures: Errors while something was looked for. After the first nothing is.
    """

    def __init__(
        self,
        store: ChunkStore,
        windows: WindowHash,
        index: StartIndex,
        heads: Heads,
        *,
        least: int,
        asks_storage: bool,
    ) -> None:
        self._store = store
        self._windows = windows
        self._index = index
        self._heads = heads
        self._least = max(least, WINDOW)
        self._asks_storage = asks_storage
        self.num_failures = 0

    @property
    def is_on(self) -> bool:
        """Whether nothing went wrong so far."""
        return self.num_failures == 0

    def describe(self) -> dict[str, int]:
        """Return sizes for /server_info."""
        return {
            "starts": len(self._index),
            "start_bytes": self._index.num_bytes,
            "starts_forgotten": self._index.num_forgotten,
            "heads_forgotten": self._heads.num_forgotten,
            "find_failures": self.num_failures,
        }

    def head(self, tenant: str, tokens: array[int]) -> array[int]:
        """Return the fixed beginning of a prompt without marks, and learn from the prompt.

        Returns:
            No token where none is known.
        """
        return tokens[: self._heads.of(tenant, ids_of(tokens))]

    def missing_prefix(self, home: ChunkKey) -> int:
        """Return how many tokens of a build prefix would be built before its first chunk."""
        return 0 if self._store.is_complete(home) else home.prefix_length

    def name_head(self, tenant: str, tokens: array[int]) -> None:
        """Take what stands before a client's first mark for the beginning of its other prompts."""
        self._heads.name(tenant, ids_of(tokens))

    def is_stored(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is stored; counts it as used now."""
        return self._store.is_complete(key)

    def find(self, home: ChunkKey, tokens: array[int], marked: Sequence[Span]) -> list[Span]:
        """Find the pieces that stored chunks serve beside the marked ones.

        Args:
            home: Namespace and build prefix, as a chunk of no tokens.
            tokens: The prompt.
            marked: Chunks that the client named, ascending and disjoint. They count as used.

        Returns:
            Ascending, disjoint, none of them in a marked chunk.
        """
        ids = ids_of(tokens)
        fingerprints = self._windows.salted(self._windows.windows(ids), self._salt(home))
        self._use(fingerprints, (span.start for span in marked))
        starts, lengths = self._index.probe(fingerprints)
        if not len(starts):
            return []
        walks = _Walks(self._store, home, tokens, starts, lengths, self._asks_storage)
        pieces = cover(
            Candidates(starts, lengths),
            _holes(len(tokens), beginning(home, tokens), marked),
            walks.stored_from,
            num_tokens=len(tokens),
            least=max(self._least, _LEAST_PART),
        )
        self._use(fingerprints, (piece.start for piece in pieces))
        if walks.vain:
            self._index.discard(fingerprints[walks.vain])
        return [Span(piece.start, piece.stop) for piece in pieces]

    def stored_prefix(self, tokens: array[int], salt: str | None, extra_key: str | None) -> int:
        """Return how many tokens of a prompt, from the first on, a namespace holds."""
        return len(self._store.find_prefix(tokens, salt=salt, extra_key=extra_key))

    def built(self, key: ChunkKey, *, learned: bool = False) -> None:
        """Note how a chunk begins that is stored now, and whether it was learned."""
        if key.length >= self._least:
            length = np.array([key.length], np.uint32)
            self._index.register(self._beginnings([key]), length, learned=learned)

    def are_learned(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Tell which pieces of one prompt begin as a chunk does that was learned."""
        known: list[bool] = self._index.are_learned(self._beginnings(keys)).tolist()
        return known

    def evicted(self, num_tokens: int) -> None:
        """Note that so many tokens are asked of the tree; where there is storage they are kept."""
        if not self._asks_storage:
            self._index.evicted(min(num_tokens, self._store.evictable_tokens))

    def clear(self) -> None:
        """Forget how chunks begin: the tree is empty, or their weights are not loaded any more."""
        self._index.clear()

    def forget_heads(self) -> None:
        """Forget how prompts begin."""
        self._heads.clear()

    def _beginnings(self, keys: Sequence[ChunkKey]) -> Fingerprints:
        """Return a fingerprint of each chunk's first tokens; all of one namespace and prefix."""
        ids = np.concatenate([np.frombuffer(key.tokens, np.int64, WINDOW) for key in keys])
        return self._windows.salted(self._windows.windows(ids)[::WINDOW], self._salt(keys[0]))

    def _salt(self, key: ChunkKey) -> int:
        # An absent class is not the empty one.
        extra = b"-" if key.extra_key is None else b"+" + key.extra_key.encode()
        return self._windows.salt(key.salt.encode(), extra, key.prefix)

    def _use(self, fingerprints: Fingerprints, starts: Iterable[int]) -> None:
        known = [start for start in starts if start < len(fingerprints)]
        if known:
            self._index.use(fingerprints[known])


def _holes(num_tokens: int, begin: int, marked: Sequence[Span]) -> list[Piece]:
    """Return what marked chunks leave of a prompt, from an offset on."""
    holes = []
    for span in marked:
        if begin < span.start:
            holes.append(Piece(begin, span.start))
        begin = max(begin, span.stop)
    if begin < num_tokens:
        holes.append(Piece(begin, num_tokens))
    return holes


class _Walks:
    """Looks in the tree how much of a chunk stands at an offset.

    As many as a prompt usually has are looked for at once, which shares the way to their prefix.

    Attributes:
        vain: Offsets at which nothing was found that nobody else may have.
    """

    def __init__(
        self,
        store: ChunkStore,
        home: ChunkKey,
        tokens: array[int],
        starts: NDArray[np.intp],
        lengths: NDArray[np.uint32],
        asks_storage: bool,
    ) -> None:
        self._store = store
        self._home = home
        self._bytes = tokens.tobytes()
        self._starts: list[int] = starts.tolist()  # lists, because each is asked for alone
        self._stops: list[int] = np.minimum(starts + lengths, len(tokens)).tolist()
        self._asks_storage = asks_storage
        self._texts: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self.vain: list[int] = []

    def stored_from(self, start: int) -> int:
        """Return how many tokens from an offset on are stored as a chunk that begins there."""
        at = bisect_left(self._starts, start)
        wanted = self._text(at)
        if wanted not in self._known:
            few = len(self._starts) <= most_walks(0)
            numbers = range(len(self._starts)) if few else [at]
            # The same text stands in one place of the tree, however often a prompt holds it.
            self._look(dict.fromkeys(map(self._text, numbers)))
        length = self._known[wanted]
        if not length:
            self.vain.append(start)
        return length

    def _text(self, number: int) -> bytes:
        text = self._texts.get(number)
        if text is None:
            text = self._bytes[
                TOKEN_BYTES * self._starts[number] : TOKEN_BYTES * self._stops[number]
            ]
            self._texts[number] = text
        return text

    def _look(self, texts: Iterable[bytes]) -> None:
        keys = [msgspec.structs.replace(self._home, tokens=text) for text in texts]
        hits = self._store.find_all(keys, [Span(0, key.length) for key in keys])
        for key, hit in zip(keys, hits, strict=True):
            length = 0 if hit is None else hit.num_tokens
            if self._store.has_host_tier and (hit is None or not hit.complete):
                stored = sum(self._store.stored_in_tiers(key))
                length = max(length, stored - key.prefix_length)
            if not length and self._asks_storage:
                length = key.length
            self._known[key.tokens] = length

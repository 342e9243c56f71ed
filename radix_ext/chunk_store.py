"""Chunks in SGLang's own radix tree: [build prefix][chunk] paths in a namespace of their own.

The store keeps nothing itself. A chunk is found by matching its path, kept by locking its node, and
lost by eviction, like any prefix; the tree's accounting holds for it unchanged.

    chunk namespace        exact namespace       blended namespace
      [system prompt]        [system prompt]       [system prompt][chunk b][chunk a][question]
        ├ [chunk a]            └ [history ...]
        └ [chunk b]
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from sgl_blend import sglang_adapter as sglang
from sgl_blend.request import Span


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Identity of stored chunk KV: equal keys mean interchangeable KV.

    Attributes:
        salt: Chunk namespace (model and tenant).
        extra_key: SGLang's request class, which may hold the LoRA adapter.
        prefix: Tokens the chunk is built behind.
        tokens: The chunk.
    """

    salt: str
    extra_key: str | None
    prefix: bytes
    tokens: bytes

    @property
    def path(self) -> array[int]:
        """Tokens of the path in the tree: the build prefix, then the chunk."""
        return array("q", self.prefix + self.tokens)

    @property
    def prefix_length(self) -> int:
        """Tokens of the build prefix."""
        return len(self.prefix) // array("q").itemsize

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return len(self.tokens) // array("q").itemsize

    @property
    def prefix_only(self) -> ChunkKey:
        """Key of the build prefix itself, as a chunk of no tokens."""
        return ChunkKey(self.salt, self.extra_key, self.prefix, b"")


@dataclass(frozen=True, slots=True)
class ChunkHit:
    """Stored KV of a chunk, or of its first tokens.

    Attributes:
        key: Identity of the chunk.
        span: Place of the whole chunk in the request.
        match: The stored path: build prefix, then as much of the chunk as there is.
        prefix_length: Tokens of the path that belong to the build prefix.
        num_tokens: Tokens of the chunk that are stored.
    """

    key: ChunkKey
    span: Span
    match: sglang.TreeMatch
    prefix_length: int
    num_tokens: int


class ChunkStore:
    """Finds and locks chunk KV in the server's tree; owns no state and no memory."""

    def __init__(self, tree: Any, page_size: int) -> None:
        self._tree = tree
        self._page_size = page_size

    def find(self, key: ChunkKey, span: Span) -> ChunkHit | None:
        """Return what is stored of a chunk on the device, or None if not a token is."""
        found = sglang.match(self._tree, key.path, salt=key.salt, extra_key=key.extra_key)
        prefix_length = key.prefix_length
        stored = len(found) - prefix_length
        return ChunkHit(key, span, found, prefix_length, stored) if stored > 0 else None

    def find_prefix(
        self,
        tokens: array[int],
        *,
        salt: str | None,
        extra_key: str | None,
        limit: int | None = None,
    ) -> sglang.TreeMatch:
        """Return the longest stored prefix of tokens[:limit] in any namespace."""
        return sglang.match(self._tree, tokens, salt=salt, extra_key=extra_key, limit=limit)

    def holds_all(self, hit: ChunkHit) -> bool:
        """Tell whether a hit is as long as the tree's pages allow."""
        wanted = hit.prefix_length + len(hit.span)
        return hit.prefix_length + hit.num_tokens >= wanted // self._page_size * self._page_size

    def is_complete(self, key: ChunkKey) -> bool:
        """Tell whether as much of a chunk is stored as the tree's pages can hold."""
        path = key.path
        if len(path) < self._page_size:
            return True
        found = sglang.match(self._tree, path, salt=key.salt, extra_key=key.extra_key)
        return len(found) >= len(path) // self._page_size * self._page_size

    def stored_tokens(self, path: array[int], *, salt: str, extra_key: str | None) -> int:
        """Return how many tokens of a path are stored, from its beginning on."""
        return len(sglang.match(self._tree, path, salt=salt, extra_key=extra_key))

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many of so many tokens the tree can hold: whole pages only."""
        return num_tokens // self._page_size * self._page_size

    @property
    def free_tokens(self) -> int:
        """Slots of the pool that nothing is stored in."""
        return sglang.free_tokens(self._tree)

    @property
    def evictable_tokens(self) -> int:
        """Tokens that the tree could evict now."""
        return sglang.evictable_tokens(self._tree)

    def lock(self, match: sglang.TreeMatch) -> sglang.TreeLock:
        """Keep a match's KV in place until unlock."""
        return sglang.lock(self._tree, match.node)

    def unlock(self, held: sglang.TreeLock) -> None:
        """Let the tree evict the KV again."""
        sglang.unlock(self._tree, held)

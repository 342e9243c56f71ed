"""Chunks in SGLang's own radix tree: [build prefix][chunk] paths in a namespace of their own.

The store keeps no KV itself. A chunk is found by matching its path, kept by locking its node, and
lost by eviction, like any prefix; the tree's accounting holds for it unchanged. The store remembers
where chunks were found, and asks the tree whether they still are there.

    chunk namespace        exact namespace       blended namespace
      [system prompt]        [system prompt]       [system prompt][chunk b][chunk a][question]
        ├ [chunk a]            └ [history ...]
        └ [chunk b]

Chunks that came from storage in few bits have a namespace of their own. They are looked for where the
chunk namespace lacks a chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from sgl_blend.engine.objects import Handle, Req, Tree
from sgl_blend.engine.requests import match_again
from sgl_blend.engine.tiers import (
    HostMatch,
    free_host_tokens,
    has_host_tier,
    holds_on_host,
    load_back,
    match_host,
)
from sgl_blend.engine.tree import (
    TOKEN_BYTES,
    TreeLock,
    TreeMatch,
    evictable_tokens,
    free_tokens,
    lock_node,
    match_prefix,
    pool_use,
    stored_tokens,
    unlock_node,
)
from sgl_blend.engine.tree_branch import Branch, find_branch, make_check, numbers_its_nodes
from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.namespaces import rounded_salt_of
from sgl_blend.radix_ext.places import Places


class ChunkKey(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """Identity of stored chunk KV: equal keys mean interchangeable KV.

    It is looked for in many tables while a request waits, and its hash is computed once.

    Attributes:
        salt: Chunk namespace (model and tenant).
        extra_key: SGLang's request class, which may hold the LoRA adapter.
        prefix: Tokens the chunk is built after.
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
        return len(self.prefix) // TOKEN_BYTES

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def prefix_only(self) -> ChunkKey:
        """Key of the build prefix itself, as a chunk of no tokens."""
        return ChunkKey(self.salt, self.extra_key, self.prefix, b"")

    @property
    def rounded(self) -> ChunkKey:
        """Key of the same chunk as storage holds it in few bits."""
        salt = rounded_salt_of(self.salt)
        return ChunkKey(salt, self.extra_key, self.prefix, self.tokens)


class ChunkHit(msgspec.Struct, eq=False, gc=False):
    """Stored KV of a chunk, or of its first tokens.

    Like a TreeMatch it is part of no cycle, and garbage collection need not know of it.

    Attributes:
        key: Identity of the chunk.
        span: Place of the whole chunk in the request.
        match: The stored path: build prefix, then as much of the chunk as there is.
        prefix_length: Tokens of the path that belong to the build prefix.
        num_tokens: Tokens of the chunk that are stored.
        complete: Whether that is as much as the tree's pages allow.
        is_rounded: Whether it is not what a build would compute, but came from storage in few bits.
    """

    key: ChunkKey
    span: Span
    match: TreeMatch
    prefix_length: int
    num_tokens: int
    complete: bool
    is_rounded: bool = False

    @property
    def stored_key(self) -> ChunkKey:
        """Key of the path that was found, in the namespace where it lies."""
        return self.key.rounded if self.is_rounded else self.key


class ChunkStore:
    """Finds and locks chunk KV in the server's tree; owns no memory.

    Args:
        tree: The server's tree.
        page_size: Tokens of its pages.
        with_rounded: Whether chunks may come from storage in few bits.
    """

    def __init__(self, tree: Tree, page_size: int, *, with_rounded: bool = False) -> None:
        self._tree = tree
        self._with_rounded = with_rounded
        self._page_size = page_size
        self._removals = 0
        self._are_there = make_check(tree)
        self._places = None
        if numbers_its_nodes(tree):
            capacity, may_change = pool_use(tree)["capacity"], has_host_tier(tree)
            self._places = Places(capacity, slots_may_change=may_change)

    def find(self, key: ChunkKey, span: Span) -> ChunkHit | None:
        """Return what is stored of a chunk on the device, or None if not a token is."""
        return self.find_all([key], [span])[0]

    def find_all(self, keys: Sequence[ChunkKey], spans: Sequence[Span]) -> list[ChunkHit | None]:
        """Return per chunk what is stored of it on the device, or None if not a token is.

        The build prefix counts as used, the chunks do not: see touch().

        Args:
            keys: Chunks of one request: all after the same build prefix, in one namespace.
            spans: Their places in the request.
        """
        hits = self._find_in_one(keys, spans)
        if not self._with_rounded:
            return hits
        wanted = [index for index, hit in enumerate(hits) if hit is None or not hit.complete]
        rounded = self._find_in_one([keys[i].rounded for i in wanted], [spans[i] for i in wanted])
        for index, hit in zip(wanted, rounded, strict=True):
            before = hits[index]
            if hit is not None and (before is None or hit.num_tokens > before.num_tokens):
                hits[index] = msgspec.structs.replace(hit, key=keys[index], is_rounded=True)
        return hits

    def _find_in_one(
        self, keys: Sequence[ChunkKey], spans: Sequence[Span]
    ) -> list[ChunkHit | None]:
        """Return per chunk what one namespace holds of it."""
        if not keys:
            return []
        salt, extra_key, prefix = keys[0].salt, keys[0].extra_key, keys[0].prefix
        branch = find_branch(
            self._tree,
            prefix,
            page_size=self._page_size,
            salt=salt,
            extra_key=extra_key,
        )
        hits: list[ChunkHit | None] = [None] * len(keys)
        if branch is None:
            return hits
        prefix_length, page_size = keys[0].prefix_length, self._page_size
        matches = self._find_matches(branch, keys)
        for index, (key, span, found) in enumerate(zip(keys, spans, matches, strict=True)):
            if found is not None and (stored := found.stop - prefix_length) > 0:
                missing = prefix_length + span.stop - span.start - found.stop
                complete = missing < page_size
                hits[index] = ChunkHit(key, span, found, prefix_length, stored, complete)
        return hits

    def _find_matches(self, branch: Branch, keys: Sequence[ChunkKey]) -> list[TreeMatch | None]:
        """Return as much of each path as is stored; where they were found before is asked first."""
        chunks, places = [key.tokens for key in keys], self._places
        if places is None:
            return branch.find_all(chunks)
        group = (keys[0].salt, keys[0].extra_key, keys[0].prefix)
        matches = places.find(group, chunks)
        known = [match for match in matches if match is not None]
        checks = iter(self._are_there(known))
        matches = [match if match is not None and next(checks) else None for match in matches]
        wanted = [index for index, match in enumerate(matches) if match is None]
        if not wanted:
            return matches
        new = branch.find_all(chunks[index] for index in wanted)
        prefix_length, page_size = keys[0].prefix_length, self._page_size
        complete: list[bytes] = []
        where: list[TreeMatch] = []
        for index, match in zip(wanted, new, strict=True):
            matches[index] = match
            if match is not None and match.known is None:
                tokens = chunks[index]
                if prefix_length + len(tokens) // TOKEN_BYTES - match.stop < page_size:
                    complete.append(tokens)
                    where.append(match)
        places.add(group, complete, where)
        return matches

    def remember(self, key: ChunkKey) -> None:
        """Note where a chunk is that was just built, so that no request has to search for it."""
        if self._places is not None:
            self._find_in_one([key], [Span(0, key.length)])

    def still_there(self, hits: Sequence[ChunkHit | None]) -> list[ChunkHit | None]:
        """Return the hits with None for those that may not be where they were found."""
        known = [hit for hit in hits if hit is not None]
        checks = iter(self._are_there([hit.match for hit in known]))
        return [hit if hit is not None and next(checks) else None for hit in hits]

    def touch(self, key: ChunkKey) -> None:
        """Count a chunk and its build prefix as used now, in the namespace that is read."""
        self.is_complete(key)

    @property
    def stamp(self) -> tuple[int, int]:
        """How often something was removed from the tree, and how many tokens it holds.

        While the first number is the same, what was found is where it was; while both are, nothing
        was added either, because without removals a tree that is added to grows.
        """
        return self._removals, stored_tokens(self._tree)

    def note_removal(self) -> None:
        """Note that the tree is about to evict, or to forget everything; stamps are right by that."""
        self._removals += 1

    def forget_places(self) -> None:
        """Forget where chunks were found: the tree is empty, or nobody asks for them again."""
        if self._places is not None:
            self._places.clear()

    def find_prefix(
        self,
        tokens: array[int],
        *,
        salt: str | None,
        extra_key: str | None,
        limit: int | None = None,
    ) -> TreeMatch:
        """Return the longest stored prefix of tokens[:limit] in any namespace."""
        return match_prefix(self._tree, tokens, salt=salt, extra_key=extra_key, limit=limit)

    def match_again(self, req: Req) -> None:
        """Give a request that is not admitted yet the prefix of the namespace it is in now."""
        match_again(req, self._tree)

    def is_complete(self, key: ChunkKey) -> bool:
        """Tell whether as much of a chunk is on the device as pages can hold; it counts as used."""
        path = key.path
        whole = self.whole_pages(len(path))
        return any(
            len(match_prefix(self._tree, path, salt=salt, extra_key=key.extra_key)) >= whole
            for salt in self._salts_of(key)
        )

    def _salts_of(self, key: ChunkKey) -> tuple[str, ...]:
        """Return the namespaces in which a chunk may lie, that of exact KV first."""
        return (key.salt, rounded_salt_of(key.salt)) if self._with_rounded else (key.salt,)

    @property
    def has_host_tier(self) -> bool:
        """Whether what is evicted goes to host memory."""
        return has_host_tier(self._tree)

    @property
    def free_host_tokens(self) -> int:
        """Tokens that host memory has room for beside what it holds."""
        return free_host_tokens(self._tree)

    def find_on_host(self, key: ChunkKey) -> HostMatch | None:
        """Return a chunk that lies in host memory, as far as it is not on the device.

        It counts as used. None if not all of its pages are stored, or none of them is on the host.
        """
        path = key.path
        for salt in self._salts_of(key):
            found = match_host(self._tree, path, salt=salt, extra_key=key.extra_key)
            stored = found.device_tokens + found.host_tokens
            if found.host_tokens and stored >= self.whole_pages(len(path)):
                return found
        return None

    def stored_in_tiers(self, key: ChunkKey) -> tuple[int, int]:
        """Return how many tokens of a chunk and its build prefix are on the device, and on the host.

        If not all of them are, those of the namespace that storage would bring the rest into.
        """
        path, on_device, on_host = key.path, 0, 0
        for salt in self._salts_of(key):
            found = match_host(self._tree, path, salt=salt, extra_key=key.extra_key)
            on_device, on_host = found.device_tokens, found.host_tokens
            if on_device + on_host >= self.whole_pages(len(path)):
                break
        return on_device, on_host

    def reach(self, tokens: array[int], *, salt: str | None, extra_key: str | None) -> int:
        """Return how many tokens of a path, from the first on, are on the device or on the host."""
        found = match_host(self._tree, tokens, salt=salt, extra_key=extra_key)
        return found.device_tokens + found.host_tokens

    def find_prefix_on_host(
        self, tokens: array[int], *, salt: str | None, extra_key: str | None
    ) -> HostMatch:
        """Return the longest prefix of tokens in any namespace, on the device or in host memory."""
        return match_host(self._tree, tokens, salt=salt, extra_key=extra_key)

    def load(self, found: HostMatch) -> bool:
        """Bring a chunk back beside the next forward; return whether there was room.

        What is found on the device from then on includes it, and it stays until it is there.
        """
        return load_back(self._tree, found)

    def stored_tokens(self, path: array[int], *, salt: str, extra_key: str | None) -> int:
        """Return how many tokens of a path are stored, from its beginning on."""
        return len(match_prefix(self._tree, path, salt=salt, extra_key=extra_key))

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many of so many tokens the tree can hold: whole pages only."""
        return num_tokens // self._page_size * self._page_size

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored, and no request holds KV that it could still store."""
        is_empty = free_tokens(self._tree) == pool_use(self._tree)["capacity"]
        return is_empty and not (self.has_host_tier and holds_on_host(self._tree))

    @property
    def free_tokens(self) -> int:
        """Slots of the pool that nothing is stored in."""
        return free_tokens(self._tree)

    @property
    def evictable_tokens(self) -> int:
        """Tokens that the tree could evict now."""
        return evictable_tokens(self._tree)

    def lock(self, match: TreeMatch) -> TreeLock:
        """Keep a match's KV in place until unlock."""
        return lock_node(self._tree, match.node)

    def lock_node(self, node: Handle) -> TreeLock:
        """Keep the KV of a node and its ancestors in place until unlock."""
        return lock_node(self._tree, node)

    def unlock(self, held: TreeLock) -> None:
        """Let the tree evict the KV again."""
        unlock_node(self._tree, held)

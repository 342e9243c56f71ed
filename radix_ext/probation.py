"""Probation: what may never be used again is evicted before what was used since.

A finished prompt that was blended holds every document of it a second time. Most prompts never come
again, and their copies would push out the chunks that the next prompts need. So a blended prompt is
evicted before chunks are, oldest first. A next turn that finds it takes it off probation. What probes
left was of use once, and goes before that. Chunks, and prompts that were not blended, keep the order of
SGLang: what was used longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sgl_blend.engine.eviction import keep_off_host, raise_rank, set_rank, stored_salt
from sgl_blend.engine.objects import InsertParams, Req, Tree
from sgl_blend.engine.requests import fill_ids, namespace_of, prefix_length
from sgl_blend.engine.tree import locked_tokens, match_prefix, stored_tokens
from sgl_blend.radix_ext.namespaces import is_blended, is_probe

Stored = TypeVar("Stored")
Evicted = TypeVar("Evicted")

_KEPT = 0
_ON_PROBATION = -1
_NEEDLESS = -2


class Probation:
    """Gives what is stored its rank, and takes blended prompts off probation.

    Owned by the scheduler thread.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._held = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are evicted before any chunk is; there may be more.

        Running requests lock some, and nobody knows which: none of what is locked counts.
        """
        return max(0, self._held - locked_tokens(self._tree))

    def store(self, insert: Callable[[], Stored], params: InsertParams) -> Stored:
        """Store something with the rank of its namespace."""
        salt = stored_salt(params)
        rank = _NEEDLESS if is_probe(salt) else _ON_PROBATION if is_blended(salt) else _KEPT
        set_rank(params, rank)
        if rank == _NEEDLESS:
            keep_off_host(params)
        before = stored_tokens(self._tree)
        result = insert()
        if rank != _KEPT:
            self._held += max(0, stored_tokens(self._tree) - before)
        return result

    def evict(self, evict: Callable[[], Evicted]) -> Evicted:
        """Let the tree evict."""
        before = stored_tokens(self._tree)
        result = evict()
        self._held = max(0, self._held - max(0, before - stored_tokens(self._tree)))
        return result

    def clear(self) -> None:
        """Note that nothing is stored any more."""
        self._held = 0

    def used(self, req: Req) -> None:
        """Note that a request was admitted with a prefix of the tree."""
        length = prefix_length(req)
        salt, extra_key = namespace_of(req)
        if length == 0 or not is_blended(salt):
            return
        tokens = fill_ids(req)
        found = match_prefix(self._tree, tokens, salt=salt, extra_key=extra_key, limit=length)
        raise_rank(self._tree, found, tokens, salt=salt, extra_key=extra_key, rank=_KEPT)
        self._held = max(0, self._held - len(found))

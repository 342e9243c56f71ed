"""What the tree holds of a request, found once and remembered until the tree changes.

A request is looked up whenever the scheduler considers it, which may be in hundreds of rounds while it
waits. While nothing was evicted, chunks that were found complete are where they were. Else each is
asked for by its place in the tree, which takes a fraction of a search. Only the others are looked for
again, and while nothing was added either, nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from sgl_blend.engine.objects import Req
from sgl_blend.engine.requests import fill_ids, prefix_length, rid_of
from sgl_blend.engine.tree import TreeMatch
from sgl_blend.fusion.plan import ReusedSpan
from sgl_blend.radix_ext.chunk_store import ChunkHit, ChunkKey, ChunkStore
from sgl_blend.radix_ext.late_uses import LateUses
from sgl_blend.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the tree holds of a request after its radix prefix.

    Attributes:
        hits: Chunks of which something is stored, in prompt order.
        missing: Identities of chunks that are not stored completely.
        exact: KV equal to a full prefill's that begins where the radix prefix ends, and the match
            it comes from; None if there is none.
    """

    hits: tuple[ChunkHit, ...]
    missing: tuple[ChunkKey, ...]
    exact: tuple[ReusedSpan, TreeMatch] | None


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A lookup and what it holds for.

    Attributes:
        keys: Identities that were looked for.
        prefix: Tokens that the radix tree gave the request.
        stamp: The store's.
        found: Per key what is stored of it.
        lookup: What came of it.
    """

    keys: tuple[ChunkKey, ...]
    prefix: int
    stamp: tuple[int, int]
    found: list[ChunkHit | None]
    lookup: Lookup


class Lookups:
    """Looks requests up; owned by the scheduler thread.

    Args:
        store: Where chunks are found.
        with_exact_namespace: Whether exact KV of the client's earlier prompts may be used.

    Attributes:
        holds_old_weights: Whether a client's exact namespace may hold KV of weights that are not
            loaded any more.
    """

    def __init__(self, store: ChunkStore, *, with_exact_namespace: bool) -> None:
        self._store = store
        self._with_exact_namespace = with_exact_namespace
        self._uses = LateUses(store)
        self.holds_old_weights = False

    def look_up(self, req: Req, state: RequestState) -> Lookup:
        """Return what the tree holds of a request; its chunks count as used now."""
        prefix, stamp = prefix_length(req), self._store.stamp
        known = _remembered(state)
        if known is None or known.stamp != stamp or known.prefix != prefix:
            before: list[ChunkHit | None] = [None] * len(state.keys)
            if known is not None:
                before = known.found
                if known.stamp[0] != stamp[0]:
                    before = self._store.still_there(before)
            found = self._find_chunks(state, prefix, before)
            lookup = self._put_together(req, state, prefix, found)
            state.missed.update(lookup.missing)
            known = _Remembered(state.keys, prefix, stamp, found, lookup)
            state.remembered = known
        self._uses.add(rid_of(req), known.lookup.hits, state.num_tokens)
        return known.lookup

    def before_evict(self) -> None:
        """Note that the tree is about to evict."""
        self._uses.tell_all()
        self._store.note_removal()

    def before_reset(self) -> None:
        """Note that the tree is about to forget everything."""
        self._uses.clear()
        self._store.note_removal()
        self._store.forget_places()
        self.holds_old_weights = False

    def weights_changed(self) -> None:
        """Note that the tree may hold KV of weights that are not loaded any more.

        Chunk and blended KV is of weights that its namespace names. The exact namespace is SGLang's
        own and names none: until the tree is empty, nothing is copied from it.
        """
        self.holds_old_weights = not self._store.is_empty
        self._store.forget_places()

    @property
    def exact_may_be_used(self) -> bool:
        """Whether exact KV of a client's earlier prompts may be copied now."""
        return self._with_exact_namespace and not self.holds_old_weights

    def _find_chunks(
        self, state: RequestState, prefix: int, before: list[ChunkHit | None]
    ) -> list[ChunkHit | None]:
        """Return per chunk what is stored of it; complete chunks found before are not looked for."""
        keys, spans, found = state.keys, state.spans, list(before)
        wanted = [
            index
            for index, (span, hit) in enumerate(zip(spans, found, strict=True))
            if span.stop > prefix and (hit is None or not hit.complete)
        ]
        new = self._store.find_all([keys[i] for i in wanted], [spans[i] for i in wanted])
        for index, hit in zip(wanted, new, strict=True):
            found[index] = hit
        return found

    def _put_together(
        self, req: Req, state: RequestState, prefix: int, found: list[ChunkHit | None]
    ) -> Lookup:
        hits = [
            hit
            for hit in found
            if hit is not None
            and hit.span.stop > prefix
            and hit.span.start + hit.num_tokens > prefix
        ]
        exact = self._find_exact(req, state, hits, prefix)
        covered = prefix if exact is None else exact[0].stop
        missing = tuple(
            key
            for key, span, hit in zip(state.keys, state.spans, found, strict=True)
            if span.stop > covered and (hit is None or not hit.complete)
        )
        return Lookup(tuple(hits), missing, exact)

    def _find_exact(
        self, req: Req, state: RequestState, hits: list[ChunkHit], prefix: int
    ) -> tuple[ReusedSpan, TreeMatch] | None:
        """Find the longest stored KV that a full prefill would compute itself.

        The build prefix is one such piece if it is the prompt's own beginning, together with the
        chunk right after it; the client's exact namespace may hold a longer one.
        """
        tokens = fill_ids(req)
        limit = state.num_tokens - 1
        matches = []
        key, first = state.keys[0], state.spans[0]
        # It may end before the first chunk: behind it stands text that is no chunk.
        begin = key.prefix_length
        end = begin * tokens.itemsize
        if memoryview(tokens).cast("B")[:end] == key.prefix:
            head = self._store.find_prefix(
                tokens, salt=key.salt, extra_key=key.extra_key, limit=begin
            )
            if hits and hits[0].span == first and first.start == begin and not hits[0].is_rounded:
                hits[0] = _from_the_beginning(hits[0], head)
                head = hits[0].match
            matches.append(head)
        if self.exact_may_be_used:
            # Without a limit, which would copy the prompt to leave its last token out.
            matches.append(
                self._store.find_prefix(tokens, salt=state.client_salt, extra_key=key.extra_key)
            )
        if not matches:
            return None
        best = max(matches, key=len)
        stop = min(len(best), limit)
        if stop <= prefix:
            return None
        return ReusedSpan(prefix, stop, prefix, best), best


def _remembered(state: RequestState) -> _Remembered | None:
    """Return what is remembered of a request, unless other weights have changed its keys."""
    known = state.remembered
    return known if isinstance(known, _Remembered) and known.keys is state.keys else None


def _from_the_beginning(hit: ChunkHit, head: TreeMatch) -> ChunkHit:
    """Return a hit whose match names the slots of its build prefix too."""
    if hit.match.start == 0:
        return hit
    slots = torch.cat([head.slots[: hit.match.start], hit.match.slots])
    match = TreeMatch(hit.match.node, hit.match.stop, known=slots)
    return msgspec.structs.replace(hit, match=match)

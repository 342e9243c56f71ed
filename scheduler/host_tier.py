"""Chunks that were evicted to host memory come back before the request that wants them is admitted.

SGLang brings the prefix of a request back by itself. A chunk is no prefix of the prompt, so nobody
would ask for it. The slots are known at once and the copy runs beside the forward, layer after layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from sgl_blend.engine.admission import rows_left
from sgl_blend.engine.requests import host_hit_length, prefix_length, prompt_ids
from sgl_blend.engine.tiers import HostMatch, own_node, tokens_to_spare
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.scheduler.attempt import AdmissionAttempt
from sgl_blend.scheduler.loading_controller import LoadingController
from sgl_blend.scheduler.lookup import Lookup, Lookups
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.tuning.loading import Chunk, Place


class HostTier:
    """Looks for chunks in host memory; owned by the scheduler thread.

    Args:
        store: Where chunks are found.
        lookups: Looks requests up again after something came back.
        build_first: Whether an answer may not depend on the room that there is.
        controller: Chooses what is worth loading; None to load whatever there is room for.
    """

    def __init__(
        self,
        store: ChunkStore,
        lookups: Lookups,
        *,
        build_first: bool,
        controller: LoadingController | None,
    ) -> None:
        self._controller = controller
        self._store = store
        self._lookups = lookups
        self._build_first = build_first

    def bring_back(self, attempt: AdmissionAttempt, lookup: Lookup) -> Lookup:
        """Bring back what a request lacks on the device and finds in host memory.

        Args:
            attempt: Admission of the request.
            lookup: What is on the device.

        Returns:
            What is there now. A chunk for which the pool has no room stays in host memory and is not
            missing, because nobody needs to build it; unless every answer has to wait for its chunks.
        """
        req, state = attempt.req, attempt.state
        if rows_left(attempt.adder) == 0:
            return lookup
        room = tokens_to_spare(attempt.adder, req)
        if self._is_as_before(state, lookup, room):
            return self._without(lookup, state.on_host)
        exact = self._find_exact(attempt, lookup)
        if not lookup.missing and exact is None:
            state.host_seen = self._stamp(lookup), room
            return lookup
        held = [self._store.lock(hit.match) for hit in lookup.hits]
        held.append(self._store.lock_node(own_node(req)))
        try:
            on_host, loaded, ratio = self._load(attempt, lookup, exact)
        finally:
            for lock in held:
                self._store.unlock(lock)
        if loaded is not None:  # to make room something may have been evicted, whatever came of it
            state.host_tokens += loaded
            state.load_ratio = ratio if loaded else None
            lookup = self._lookups.look_up(req, state)
        state.on_host = on_host
        state.host_seen = None if loaded else (self._stamp(lookup), room)
        state.missed -= on_host
        return self._without(lookup, on_host)

    def _find_exact(self, attempt: AdmissionAttempt, lookup: Lookup) -> HostMatch | None:
        """Return exact KV of earlier prompts in host memory that reaches further than what is there."""
        req, state = attempt.req, attempt.state
        if not self._lookups.exact_may_be_used:
            return None
        path = prompt_ids(req)[: state.num_tokens - 1]
        found = self._store.find_prefix_on_host(
            path, salt=state.client_salt, extra_key=state.keys[0].extra_key
        )
        there = prefix_length(req) + host_hit_length(req)
        if lookup.exact is not None:
            there = max(there, lookup.exact[0].stop)
        reach = found.device_tokens + found.host_tokens
        return found if found.host_tokens and reach > there else None

    def _load(
        self, attempt: AdmissionAttempt, lookup: Lookup, exact: HostMatch | None
    ) -> tuple[frozenset[ChunkKey], int | None, float | None]:
        """Load what is worth it and what there is room for.

        Returns:
            The chunks that are in host memory, or were; how many tokens come back, None if nothing
            was tried; and the ratio of tokens that can be recomputed meanwhile.
        """
        req, state = attempt.req, attempt.state
        # What SGLang is about to bring back of the prompt itself needs no chunk, if it has room.
        covered = 0 if self._build_first else prefix_length(req) + host_hit_length(req)
        stops = {key: span.stop for key, span in zip(state.keys, state.spans, strict=True)}
        on_host = self._find(lookup)
        room, loaded = tokens_to_spare(attempt.adder, req), None
        if exact is not None and exact.host_tokens <= room:
            loaded = exact.host_tokens if self._store.load(exact) else 0
            room -= loaded
            covered = max(covered, exact.device_tokens + loaded)
        if self._build_first and _tokens_of(on_host) > room:
            # What came would be pushed out again before there is room for the rest.
            return frozenset(on_host), None, None
        chosen, ratio = self._choose(state, lookup, on_host, covered)
        for key, as_found in on_host.items():
            if key not in chosen:
                continue
            # A load brings the build prefix along that others share, and may push something out.
            found = as_found if loaded is None else self._store.find_on_host(key)
            if found is None or stops[key] <= covered or found.host_tokens > room:
                continue
            came = found.host_tokens if self._store.load(found) else 0
            loaded, room = (loaded or 0) + came, room - came
        return frozenset(on_host), loaded, ratio

    def _choose(
        self,
        state: RequestState,
        lookup: Lookup,
        on_host: Mapping[ChunkKey, HostMatch],
        covered: int,
    ) -> tuple[Collection[ChunkKey], float | None]:
        """Return the chunks in host memory that are worth loading, and the ratio to recompute."""
        if self._controller is None or not on_host:
            return on_host, None
        missing, keys, chunks = set(lookup.missing), [], []
        for key, span in zip(state.keys, state.spans, strict=True):
            if span.stop > covered:
                place = Place.TEXT if key in missing else Place.DEVICE
                keys.append(key)
                chunks.append(Chunk(len(span), Place.HOST if key in on_host else place))
        num_plain = max(1, state.num_tokens - covered - sum(chunk.num_tokens for chunk in chunks))
        choice = self._controller.choose(chunks, num_plain, ratios=state.ratios)
        return {keys[index] for index in choice.loaded}, choice.ratio

    def _is_as_before(self, state: RequestState, lookup: Lookup, room: int) -> bool:
        """Tell whether nothing changed since nothing could be brought back: no more room, either."""
        if state.host_seen is None:
            return False
        stamp, room_then = state.host_seen
        return stamp == self._stamp(lookup) and (room <= room_then or not state.on_host)

    def _find(self, lookup: Lookup) -> dict[ChunkKey, HostMatch]:
        """Return what the host has of each missing chunk that it can complete."""
        found = {key: self._store.find_on_host(key) for key in dict.fromkeys(lookup.missing)}
        return {key: match for key, match in found.items() if match is not None}

    def _without(self, lookup: Lookup, on_host: frozenset[ChunkKey]) -> Lookup:
        if self._build_first:
            return lookup
        return replace(lookup, missing=tuple(key for key in lookup.missing if key not in on_host))

    def _stamp(self, lookup: Lookup) -> tuple[object, ...]:
        return lookup.missing, self._store.stamp, self._store.free_host_tokens


def _tokens_of(found: Mapping[ChunkKey, HostMatch]) -> int:
    """Return how many tokens chunks in host memory are, their common build prefix counted once."""
    shared = [max(0, key.prefix_length - match.device_tokens) for key, match in found.items()]
    return sum(match.host_tokens for match in found.values()) - sum(shared) + max(shared, default=0)

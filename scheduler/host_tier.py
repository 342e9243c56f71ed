"""Chunks that were evicted to host memory come back before the request that wants them is admitted.

SGLang brings the prefix of a request back by itself. A chunk is no prefix of the prompt, so nobody
would ask for it. The slots are known at once and the copy runs beside the forward, layer after layer.
"""

from __future__ import annotations

from dataclasses import replace

from sgl_blend.engine.admission import rows_left
from sgl_blend.engine.requests import host_hit_length, prefix_length
from sgl_blend.engine.tiers import own_node, tokens_to_spare
from sgl_blend.radix_ext.chunk_store import ChunkStore
from sgl_blend.scheduler.attempt import AdmissionAttempt
from sgl_blend.scheduler.lookup import Lookup, Lookups


class HostTier:
    """Looks for chunks in host memory; owned by the scheduler thread.

    Args:
        store: Where chunks are found.
        lookups: Looks requests up again after something came back.
    """

    def __init__(self, store: ChunkStore, lookups: Lookups) -> None:
        self._store = store
        self._lookups = lookups

    def bring_back(self, attempt: AdmissionAttempt, lookup: Lookup) -> Lookup:
        """Bring back what a request lacks on the device and finds in host memory.

        Args:
            attempt: Admission of the request.
            lookup: What is on the device.

        Returns:
            What is there now. A chunk for which the pool has no room stays in host memory, and is not
            missing: nobody needs to build it.
        """
        if not lookup.missing or rows_left(attempt.adder) == 0:
            return lookup
        req, state = attempt.req, attempt.state
        # What SGLang is about to bring back of the prompt itself needs no chunk.
        covered = prefix_length(req) + host_hit_length(req)
        wanted = {
            key for key, span in zip(state.keys, state.spans, strict=True) if span.stop > covered
        }
        held = [self._store.lock(hit.match) for hit in lookup.hits]
        held.append(self._store.lock_node(own_node(req)))
        loaded, there = 0, set()
        try:
            for key in dict.fromkeys(lookup.missing):
                found = self._store.find_on_host(key)
                if found is None:
                    continue
                there.add(key)
                room = tokens_to_spare(attempt.adder, req)
                if key in wanted and found.host_tokens <= room and self._store.load(found):
                    loaded += found.host_tokens
        finally:
            for lock in held:
                self._store.unlock(lock)
        state.host_tokens += loaded
        if loaded:
            lookup = self._lookups.look_up(req, state)
        return replace(lookup, missing=tuple(key for key in lookup.missing if key not in there))

"""Builds that a request waits for (--blend-on-miss build): its chunks first, then their probes."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_blend.engine.admission import continue_verdict, is_alone, stop_verdict
from sgl_blend.engine.objects import PrefillAdder, Verdict
from sgl_blend.policies import POLICIES
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.scheduler.attempt import AdmissionAttempt
from sgl_blend.scheduler.builds import ChunkBuilder, may_hold_builds
from sgl_blend.scheduler.lookup import Lookup
from sgl_blend.scheduler.probes import PROBE_TOKENS, Memories, ProbeKey
from sgl_blend.scheduler.request_state import RequestState


class ForegroundBuilds:
    """Builds what a request lacks before it is admitted; owned by the scheduler thread.

    Args:
        store: Where chunks are found.
        capacity: Tokens of the pool.
        builder: Builds chunks.
        prober: Runs their probes.
        memories: Which of them have run.
    """

    def __init__(
        self,
        store: ChunkStore,
        capacity: int,
        builder: ChunkBuilder,
        prober: ChunkBuilder,
        memories: Memories,
    ) -> None:
        self._store = store
        self._capacity = capacity
        # Pages that are not full, and what SGLang asks for on top.
        self._slack = store.page_size + 1
        self._builder = builder
        self._prober = prober
        self._memories = memories

    def missing(self, state: RequestState, lookup: Lookup) -> tuple[ChunkKey, ...]:
        """Return what is to be built for a request: chunks, or once they are there their probes."""
        if lookup.missing or not self.may_probe(state):
            return lookup.missing
        exact = 0 if lookup.exact is None else lookup.exact[0].stop
        chunks = [
            hit.key
            for hit in lookup.hits
            if hit.span.stop > exact
            and hit.complete
            and not hit.is_rounded
            and self._memories.place_of(hit) is None
        ]
        keys = self._memories.keys_of(dict.fromkeys(chunks))
        return tuple(key for key in keys if self._memories.lacks(key))

    def may_probe(self, state: RequestState) -> bool:
        """Tell whether a request goes by what is remembered of its chunks.

        Not if the model's context cannot hold a probe of one of them, or the pool a probe beside all of
        them. That is told from lengths alone: what was remembered for other requests must not change an
        answer.
        """
        if state.goes_by_memory is None:
            state.goes_by_memory = self._has_room_for_probes(state)
        return state.goes_by_memory

    def _has_room_for_probes(self, state: RequestState) -> bool:
        if not POLICIES[state.policy].trusts_memory or not state.keys:
            return False
        chunks = dict.fromkeys(state.keys)
        if not all(map(self._memories.can_probe, chunks)):
            return False
        prefix = state.keys[0].prefix_length
        stored = prefix + sum(key.length + self._slack for key in chunks)
        longest = max(key.length for key in chunks)
        return stored + prefix + PROBE_TOKENS + longest + 3 * self._slack <= self._capacity

    def waits(self, state: RequestState) -> bool:
        """Tell whether something is being built that a request was found to lack."""
        return any(self._builder_of(key).is_in_flight(key) for key in state.waits_for)

    def build(
        self, attempt: AdmissionAttempt, missing: Sequence[ChunkKey], lookup: Lookup
    ) -> Verdict | None:
        """Build what a request lacks, without pushing out what is there for it already.

        Args:
            attempt: Admission of the request.
            missing: What it lacks.
            lookup: What is stored for it.

        Returns:
            SGLang's verdict while the request waits for it, None if it cannot be built.
        """
        state, adder = attempt.state, attempt.adder
        state.waits_for = tuple(missing)
        if self.waits(state):
            return waiting_verdict(state)
        # Every round builds something. A request that needs more rounds than there is to build sees
        # its chunks go as fast as they are built: others evict or flush them, or the pool cannot hold
        # them all. So they are built with nobody else in the server before that is believed.
        if state.build_rounds > 2 * self._count_steps(state) + 2:
            if state.builds_alone:
                return None
            if not self.is_alone(adder):
                return stop_verdict()
            state.builds_alone, state.build_rounds = True, 0
        if not may_hold_builds(adder):
            return stop_verdict()
        builder = self._builder_of(missing[0])
        held = [self._store.lock(hit.match) for hit in lookup.hits]
        try:
            num_admitted = builder.build_now(list(dict.fromkeys(missing)), adder, attempt.add)
        finally:
            for lock in held:
                self._store.unlock(lock)
        if num_admitted > 0:
            state.build_rounds += 1
            return waiting_verdict(state)
        return None if self.is_alone(adder) else stop_verdict()

    def is_alone(self, adder: PrefillAdder) -> bool:
        """Tell whether no memory can come free: neither of the batch and who decodes, nor of a step."""
        return is_alone(adder) and not (self._builder.is_running or self._prober.is_running)

    def _builder_of(self, key: ChunkKey) -> ChunkBuilder:
        return self._prober if isinstance(key, ProbeKey) else self._builder

    def _count_steps(self, state: RequestState) -> int:
        steps = sum(map(self._builder.count_steps, state.keys))
        if self.may_probe(state):
            steps += sum(map(self._prober.count_steps, self._memories.keys_of(state.keys)))
        return steps


def waiting_verdict(state: RequestState) -> Verdict:
    """Return SGLang's verdict for a request that waits for builds: whether others are tried now."""
    return stop_verdict() if state.builds_alone else continue_verdict()

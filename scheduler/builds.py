"""Building chunks: prefilling them alone behind their build prefix, so that their KV is canonical.

A build is an ordinary request of SGLang's in the chunk namespace that ends with its prefill; when it
ends, the scheduler inserts its KV into the tree. Four rules make the KV the same bytes whatever else
is served: builds share a batch with builds only, each runs as a forward of its own, only the first of
a batch may be cut by chunked prefill, and a chunk is always computed whole, on top of a build prefix
that was built first.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sgl_blend import sglang_adapter as sglang
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.fair_share import FairShare
from sgl_blend.ranks import Ranks
from sgl_blend.scheduler.build_queue import BuildQueue
from sgl_blend.scheduler.internal_requests import (
    is_internal,
    new_internal_request,
    secret_rid_prefix,
)

logger = logging.getLogger(__name__)

_MAX_PENDING = 4096
_CREDIT_SHARE = 0.05
"""Where requests wait, background builds may cost this share of the prefill work done meanwhile."""
_MAX_CREDIT_TOKENS = 4096.0
_QUIET_S = 0.05
_MAX_QUIET_S = 1.0
"""After a prefill, builds leave the machine alone for a moment, so that first tokens get out."""

AddReq = Callable[[Any], Any]


@dataclass(slots=True)
class _Offer:
    """A background build that stands in the waiting queue for one scheduling round."""

    key: ChunkKey
    stage: ChunkKey
    build: Any
    admitted: bool = False
    too_large: bool = False


class ChunkBuilder:
    """Turns missing chunks into build requests.

    Owned by the scheduler thread. A build in flight belongs to SGLang; a pending one is a key and
    holds no memory of the pool, so dropping it is always safe.
    """

    def __init__(self, scheduler: Any, store: ChunkStore, shares: FairShare, ranks: Ranks) -> None:
        self._scheduler = scheduler
        self._shares = shares
        self._ranks = ranks
        self._store = store
        self._pending = BuildQueue(_MAX_PENDING)
        self._quiet_until_s = 0.0
        self._in_flight: dict[ChunkKey, Any] = {}
        self._offer: _Offer | None = None
        self.rid_prefix = secret_rid_prefix("build", ranks)
        self._serial = 0
        self._credit = 0.0
        self._offered_last_round = False
        self.num_built = 0

    @property
    def num_pending(self) -> int:
        """Builds waiting for a free moment."""
        return len(self._pending)

    @property
    def num_forgotten(self) -> int:
        """Builds given up: too many, or too large for the pool."""
        return self._pending.num_forgotten

    @property
    def num_unfinished(self) -> int:
        """Chunks that are waiting to be built or being built."""
        running = sum(bool(key.length) and key not in self._pending for key in self._in_flight)
        return len(self._pending) + running

    @property
    def in_flight_rids(self) -> set[str]:
        """Request ids of the builds that SGLang is running."""
        return {build.rid for build in self._in_flight.values()}

    # --- background builds ---

    def enqueue(self, keys: Iterable[ChunkKey]) -> None:
        """Build chunks in the background, oldest first, tenants in turns."""
        new = [key for key in keys if key not in self._in_flight and key not in self._pending]
        if new:
            self._pending.add(new, self._ranks.now())

    def forget_pending(self) -> None:
        """Drop all pending builds, because the cache was flushed."""
        self._pending.clear()

    def earn(self, num_tokens: int) -> None:
        """Let background builds take a share of prefill work that somebody waits behind."""
        if self._scheduler.waiting_queue:
            credit = self._credit + _CREDIT_SHARE * num_tokens
            self._credit = min(credit, _MAX_CREDIT_TOKENS)

    def keep_quiet(self) -> None:
        """Note that a prefill has just ended, and its first tokens are on their way."""
        self._quiet_until_s = self._ranks.now() + _QUIET_S

    def must_keep_quiet(self, since_s: float) -> bool:
        """Tell whether background work that has waited since then must let first tokens out."""
        if self._first_tokens_are_held():
            return True
        now = self._ranks.now()
        return now < self._quiet_until_s and now < since_s + _MAX_QUIET_S

    def _first_tokens_are_held(self) -> bool:
        """Tell whether a prefill has run whose result SGLang's overlap schedule has not looked at.

        It looks at it after the next batch was launched, so a build would stand in front of it.
        """
        scheduler = self._scheduler
        last = scheduler.last_batch
        return (
            bool(getattr(scheduler, "result_queue", None))
            and last is not None
            and last.forward_mode.is_extend()
            and not all(is_internal(req) for req in last.reqs)
        )

    def rest_next_round(self) -> None:
        """Note that background work runs in this round; while requests decode, none runs next."""
        self._offered_last_round = True

    def offer(self, running_batch: Any) -> bool:
        """Begin a scheduling round; put a background build into the waiting queue if one may run.

        One chunk a round, and none right behind a prefill. While requests wait or decode, never in
        two rounds in a row; while they wait, only on credit.

        Returns:
            Whether the round is free for other background work: no chunk is missing, nobody waits.
        """
        self._sweep()
        scheduler = self._scheduler
        busy = bool(scheduler.waiting_queue) or not running_batch.is_empty()
        rest = busy and self._offered_last_round
        self._offered_last_round = False
        if rest or self._in_flight or scheduler.chunked_req is not None:
            return False
        key = self._next_pending()
        if key is None:
            return not scheduler.waiting_queue
        stage = self._next_stage([key])[0]
        if scheduler.waiting_queue:
            if self._credit < stage.length + stage.prefix_length:
                return False
        elif self.must_keep_quiet(self._pending.since_s(key)):
            return False
        self._offer = _Offer(key, stage, self._new_build(stage))
        scheduler.waiting_queue.insert(0, self._offer.build)
        return False

    def withdraw(self) -> None:
        """End the round: take back what offer() put into the waiting queue, unless it was admitted."""
        if self._offer is None:
            return
        offer, self._offer = self._offer, None
        scheduler = self._scheduler
        if offer.admitted:
            self.rest_next_round()
            if scheduler.waiting_queue:
                self._credit -= len(offer.build.origin_input_ids)
            if offer.stage == offer.key:
                self._pending.remove(offer.key)
            return
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req is not offer.build]
        if offer.too_large:
            self._pending.forget(offer.key)

    def _next_pending(self) -> ChunkKey | None:
        """Return the chunk whose turn it is; those stored meanwhile are dropped."""
        while (key := self._pending.first()) is not None and self._store.is_complete(key):
            self._pending.remove(key)
        return key

    # --- builds that a request waits for ---

    def is_in_flight(self, key: ChunkKey) -> bool:
        """Tell whether the chunk or its build prefix is being built."""
        return key in self._in_flight or key.prefix_only in self._in_flight

    def build_now(self, keys: list[ChunkKey], adder: Any, add: AddReq) -> int:
        """Admit builds of one request's missing chunks into the batch that is being put together.

        Args:
            keys: Missing chunks, all behind the same build prefix.
            adder: SGLang's PrefillAdder of the batch.
            add: Admission of one request.

        Returns:
            How many were admitted.
        """
        num_admitted = 0
        for key in self._next_stage(keys):
            if len(adder.can_run_list) >= self._free_rows(adder):
                break
            build = self._new_build(key)
            verdict = add(build)
            if not sglang.was_admitted(build, adder):
                break
            self._in_flight[key] = build
            num_admitted += 1
            if verdict != sglang.continue_verdict():
                break
        return num_admitted

    # --- admission of any build ---

    def admit(self, build: Any, adder: Any, add: AddReq) -> Any:
        """Admit a build if its batch may hold it; add is SGLang's own admission.

        A build that is not admitted never closes the batch for the requests behind it.
        """
        self._compute_whole(build)
        verdict = sglang.stop_verdict()
        if may_hold_builds(adder) and (not adder.can_run_list or sglang.fits_whole(build, adder)):
            verdict = add(build)
        offer = self._offer if self._offer is not None and self._offer.build is build else None
        if sglang.was_admitted(build, adder):
            if offer is not None:
                offer.admitted = True
                self._in_flight[offer.stage] = build
            return verdict
        if offer is not None:
            offer.too_large = sglang.is_out_of_memory(verdict) and sglang.is_alone(adder)
        return sglang.continue_verdict()

    def _compute_whole(self, build: Any) -> None:
        """Let a build compute its whole chunk, even if the tree holds a chunk that begins like it."""
        key: ChunkKey = build.sgl_blend_build
        limit = key.prefix_length if key.length else 0
        if sglang.prefix_length(build) <= limit:
            return
        found = self._store.find_prefix(
            key.path, salt=key.salt, extra_key=key.extra_key, limit=limit
        )
        sglang.set_prefix(build, found)

    def _next_stage(self, keys: list[ChunkKey]) -> list[ChunkKey]:
        """Return what to build next: the shared build prefix first, then all chunks at once."""
        prefix = keys[0].prefix_only
        return keys if self._store.is_complete(prefix) else [prefix]

    def _new_build(self, key: ChunkKey) -> Any:
        self._serial += 1
        build = new_internal_request(
            self._scheduler,
            f"{self.rid_prefix}{self._serial}",
            key.path,
            salt=key.salt,
            extra_key=key.extra_key,
        )
        build.sgl_blend_build = key
        return build

    def _free_rows(self, adder: Any) -> int:
        running = adder.running_batch
        rows: int = self._scheduler.get_num_allocatable_reqs(
            0 if running is None else len(running.reqs)
        )
        return rows

    def _sweep(self) -> None:
        """Forget builds that ended: their KV is inserted, or they were aborted, in the queue or out.

        Called between rounds, when every admitted build holds KV or has given it back.
        """
        waiting = self._scheduler.waiting_queue
        for key, build in list(self._in_flight.items()):
            if build.finished() or not (sglang.holds_kv(build) or build in waiting):
                del self._in_flight[key]
                if key.length and build.finished():
                    self.num_built += 1
                    self._shares.use(key)
                logger.debug("%s ended, %d tokens", build.rid, key.length)


def is_build(req: Any) -> bool:
    """Tell whether an internal request is a build."""
    return getattr(req, "sgl_blend_build", None) is not None


def may_hold_builds(adder: Any) -> bool:
    """Tell whether builds may join a batch: they keep to themselves."""
    return all(is_build(req) for req in adder.can_run_list)

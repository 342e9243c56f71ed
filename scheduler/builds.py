"""Building chunks: prefilling them alone behind their build prefix, so that their KV is canonical.

A build is cut into steps. Each step is an ordinary request of SGLang's in the chunk namespace that ends
with its prefill; when it ends, the scheduler inserts its KV into the tree, and the next step begins
where that KV stops.

    [build prefix][chunk .......................]
    ├ step ┤├step┤├─ step ─┤├─ step ─┤├─ step ─┤     each at most so many tokens

Four rules make the KV the same bytes whatever else is served: builds share a batch with builds only;
each step runs as a forward of its own; the cuts depend on the lengths of build prefix and chunk alone,
and a step computes all of its tokens even if the tree holds some of them; a chunk is built on top of a
build prefix that was built first.

Nothing of a build stays with SGLang between two steps. So every step asks for leave again, and what is
in flight is over with its one forward.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sgl_blend.engine import adapter as sglang
from sgl_blend.engine import orders as sglang_orders
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.fair_share import FairShare
from sgl_blend.scheduler.build_budget import BuildBudget
from sgl_blend.scheduler.build_queue import BuildQueue
from sgl_blend.scheduler.build_steps import BuildStep, StepPlanner
from sgl_blend.scheduler.internal_requests import (
    is_internal,
    new_internal_request,
    secret_rid_prefix,
    step_length,
)

logger = logging.getLogger(__name__)

_MAX_PENDING = 4096
_MAX_PENDING_POOLS = 2
"""Pending chunks hold at most as many tokens as so many KV pools: more would evict each other."""
_BACKGROUND_STEP_TOKENS = 256
_FOREGROUND_STEP_TOKENS = 2048
"""No request that arrives meanwhile waits for more than one such step; short ones cost more launches,
which nobody notices in the background. A step of 512 tokens between the decode steps of a prompt of
7,000 took up to 5.3 % of its time (benchmarks/closed_loop.py)."""
_QUIET_S = 0.05
_MAX_QUIET_S = 1.0
"""After a prefill, builds leave the machine alone for a moment, so that first tokens get out."""

AddReq = Callable[[Any], Any]


@dataclass(slots=True)
class _Offer:
    """A step of a background build that stands in the waiting queue for one scheduling round."""

    key: ChunkKey
    build: Any
    is_charged: bool
    admitted: bool = False
    too_large: bool = False


class ChunkBuilder:
    """Turns missing chunks into build requests.

    Owned by the scheduler thread. A step in flight belongs to SGLang; a pending build is a key and
    holds no memory of the pool, so dropping it is always safe.
    """

    def __init__(
        self,
        scheduler: Any,
        store: ChunkStore,
        shares: FairShare,
        tp_group: TPGroup,
        *,
        build_first: bool,
    ) -> None:
        self._scheduler = scheduler
        self._shares = shares
        self._tp_group = tp_group
        self._store = store
        self._capacity: int = scheduler.max_total_num_tokens
        bytes_per_pool = self._capacity * sglang.TOKEN_BYTES
        self._pending = BuildQueue(_MAX_PENDING, _MAX_PENDING_POOLS * bytes_per_pool)
        limit = _FOREGROUND_STEP_TOKENS if build_first else _BACKGROUND_STEP_TOKENS
        self._steps = StepPlanner(store, step_length(scheduler, limit))
        self._budget = BuildBudget()
        self._quiet_until_s = 0.0
        self._gap_until_s = 0.0
        self._in_flight: dict[ChunkKey, Any] = {}
        self._launched_s: float | None = None
        self._offer: _Offer | None = None
        self.rid_prefix = secret_rid_prefix("build", tp_group)
        self._serial = 0
        self._offered_last_round = False
        self.num_built = 0
        self.num_steps = 0

    @property
    def step_tokens(self) -> int:
        """Most tokens that one step computes."""
        return self._steps.step_tokens

    def count_steps(self, key: ChunkKey) -> int:
        """Return how many steps a chunk and its build prefix take if nothing is stored."""
        return self._steps.count(key)

    @property
    def num_pending(self) -> int:
        """Chunks that are not built yet, in flight or not."""
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the tokens of all pending chunks."""
        return self._pending.num_bytes

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
        """Request ids of the steps that SGLang is running."""
        return {build.rid for build in self._in_flight.values()}

    # --- background builds ---

    def enqueue(self, keys: Iterable[ChunkKey]) -> None:
        """Build chunks in the background, oldest first, tenants in turns."""
        new = []
        for key in keys:
            if key.prefix_length + key.length >= self._capacity:
                self._pending.num_forgotten += 1
            elif key not in self._in_flight and key not in self._pending:
                new.append(key)
        if new:
            self._pending.add(new, self._tp_group.now())

    def forget_pending(self) -> None:
        """Drop all pending builds, because the cache was flushed or the weights have changed."""
        self._pending.clear()

    def keep_quiet(self) -> None:
        """Note that a prefill has just ended, and its first tokens are on their way."""
        self._quiet_until_s = self._tp_group.now() + _QUIET_S

    def must_keep_quiet(self, since_s: float) -> bool:
        """Tell whether background work that has waited since then must let first tokens out."""
        if self._first_tokens_are_held():
            return True
        now = self._tp_group.now()
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

    def stop_timing(self) -> None:
        """Note that the step in flight was interrupted, so that its duration tells nothing."""
        self._launched_s = None

    def offer(self, running_batch: Any) -> bool:
        """Begin a scheduling round; put a step of a background build into the queue if one may run.

        One step a round. While requests wait or decode, never in two rounds in a row, and only on
        credit; none right behind a prefill.

        Returns:
            Whether the round is free for other background work: no chunk is missing, nobody waits.
        """
        self.sweep()
        scheduler = self._scheduler
        busy = bool(scheduler.waiting_queue) or not running_batch.is_empty()
        rest = busy and self._offered_last_round
        self._offered_last_round = False
        is_charged = self._tell_time(busy=busy)
        if not sglang_orders.takes_background_work(scheduler):
            return False
        if rest or self._in_flight or scheduler.chunked_req is not None:
            return False
        if not self._pending:
            return not scheduler.waiting_queue
        if is_charged and not self._budget.affords_step():
            return False
        if not scheduler.waiting_queue and self.must_keep_quiet(self._waiting_since_s()):
            return False
        return self._offer_next(is_charged=is_charged)

    def _tell_time(self, *, busy: bool) -> bool:
        """Let time count as served to requests or not; return whether a step now is paid by credit.

        Between two requests of a client that sends without a pause nobody is served for a moment. What
        runs then delays the next request, so it is paid for, unless there is room in the cache.
        """
        if not self._pending:
            self._budget.stop_clock()
            return busy
        now = self._tp_group.now()
        self._budget.elapse(now, busy=busy)
        if busy:
            self._gap_until_s = now + _QUIET_S
        return busy or (now < self._gap_until_s and not self._has_free_room())

    def _waiting_since_s(self) -> float:
        key = self._pending.first()
        assert key is not None, "something is pending"
        return self._pending.since_s(key)

    def _has_free_room(self) -> bool:
        """Tell whether a step pushes nothing out of the cache: then it is worth a gap's time."""
        return self._store.free_tokens > 2 * self.step_tokens

    def _offer_next(self, *, is_charged: bool) -> bool:
        """Put the next step into the waiting queue; return whether nothing is left to be built."""
        scheduler = self._scheduler
        while (key := self._pending.first()) is not None:
            step = self._steps.next_step(key)
            if step is not None:
                self._offer = _Offer(key, self._new_build(step), is_charged)
                scheduler.waiting_queue.insert(0, self._offer.build)
                return False
            self._pending.remove(key)  # stored meanwhile
        return not scheduler.waiting_queue

    def withdraw(self) -> None:
        """End the round: take back what offer() put into the waiting queue, unless it was admitted."""
        if self._offer is None:
            return
        offer, self._offer = self._offer, None
        scheduler = self._scheduler
        if offer.admitted:
            self.rest_next_round()
            self._launched_s = self._tp_group.now()
            if offer.is_charged:
                self._budget.charge()
            # Its KV may be evicted between two steps, but not for ever.
            if self._pending.spend(offer.key) > 2 * self._steps.count(offer.key) + 1:
                self._pending.forget(offer.key)
            return
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req is not offer.build]
        if offer.too_large:
            self._pending.forget(offer.key)

    # --- builds that a request waits for ---

    def is_in_flight(self, key: ChunkKey) -> bool:
        """Tell whether a step of the chunk or of its build prefix is running."""
        return key in self._in_flight or key.prefix_only in self._in_flight

    def build_now(self, keys: list[ChunkKey], adder: Any, add: AddReq) -> int:
        """Admit the next steps of one request's missing chunks into the batch that is put together.

        Args:
            keys: Missing chunks, all behind the same build prefix.
            adder: SGLang's PrefillAdder of the batch.
            add: Admission of one request.

        Returns:
            How many were admitted.
        """
        num_admitted = 0
        for key in keys:
            step = self._steps.next_step(key)
            if step is None or step.key in self._in_flight:
                continue
            if len(adder.can_run_list) >= self._free_rows(adder):
                break
            build = self._new_build(step)
            verdict = add(build)
            if not sglang.was_admitted(build, adder):
                break
            self._in_flight[step.key] = build
            num_admitted += 1
            if verdict != sglang.continue_verdict() or not step.key.length:
                break  # the batch is full, or the chunks stand behind this build prefix
        return num_admitted

    # --- admission of any step ---

    def admit(self, build: Any, adder: Any, add: AddReq) -> Any:
        """Admit a step if its batch may hold it; add is SGLang's own admission.

        A step that is not admitted never closes the batch for the requests behind it.
        """
        step: BuildStep = build.sgl_blend_step
        verdict = sglang.stop_verdict()
        if (
            may_hold_builds(adder)
            and self._begin_at_cut(build, step)
            and sglang.fits_whole(build, adder)
        ):
            verdict = add(build)
        offer = self._offer if self._offer is not None and self._offer.build is build else None
        if sglang.was_admitted(build, adder):
            self.num_steps += 1
            if offer is not None:
                offer.admitted = True
                self._in_flight[step.key] = build
            return verdict
        if offer is not None:
            offer.too_large = sglang.is_out_of_memory(verdict) and sglang.is_alone(adder)
        return sglang.continue_verdict()

    def _begin_at_cut(self, build: Any, step: BuildStep) -> bool:
        """Let a step begin at its cut, even if the tree holds more; return whether it holds enough."""
        if sglang.prefix_length(build) > step.done:
            key = step.key
            found = self._store.find_prefix(
                key.path, salt=key.salt, extra_key=key.extra_key, limit=step.done
            )
            sglang.set_prefix(build, found)
        return sglang.prefix_length(build) == step.done

    def _new_build(self, step: BuildStep) -> Any:
        self._serial += 1
        build = new_internal_request(
            self._scheduler,
            f"{self.rid_prefix}{self._serial}",
            step.key.path[: step.stop],
            salt=step.key.salt,
            extra_key=step.key.extra_key,
        )
        build.sgl_blend_build = step.key
        build.sgl_blend_step = step
        return build

    def _free_rows(self, adder: Any) -> int:
        running = adder.running_batch
        rows: int = self._scheduler.get_num_allocatable_reqs(
            0 if running is None else len(running.reqs)
        )
        return rows

    def sweep(self) -> None:
        """Forget steps that ended: their KV is inserted, or they were aborted, in the queue or out.

        Called between rounds, when every admitted step holds KV or has given it back.
        """
        waiting = self._scheduler.waiting_queue
        for key, build in list(self._in_flight.items()):
            ended: bool = build.finished()
            if not ended and (sglang.holds_kv(build) or build in waiting):
                continue
            del self._in_flight[key]
            if self._launched_s is not None:
                self._budget.learn(self._tp_group.now() - self._launched_s)
                self._launched_s = None
            if ended and not sglang.was_aborted(build) and build.sgl_blend_step.is_last:
                self._pending.remove(key)
                self.num_built += 1
                self._shares.built(key)
            logger.debug("%s ended, %d tokens", build.rid, len(build.origin_input_ids))


def is_build(req: Any) -> bool:
    """Tell whether an internal request is a step of a build."""
    return getattr(req, "sgl_blend_build", None) is not None


def may_hold_builds(adder: Any) -> bool:
    """Tell whether builds may join a batch: they keep to themselves."""
    return all(is_build(req) for req in adder.can_run_list)

"""Building chunks: prefilling them alone after their build prefix, so that their KV is canonical.

A build is cut into steps. Each step is an ordinary request of SGLang's in the chunk namespace that ends
with its prefill; when it ends, the scheduler inserts its KV into the tree, and the next step begins
where that KV stops.

    [build prefix][chunk .......................]
    ├ step ┤├step┤├─ step ─┤├─ step ─┤├─ step ─┤     each at most so many tokens

Four rules make the KV the same bytes whatever else is served: a build joins no batch of clients'
prefills; each step runs as a forward of its own; the cuts depend on the lengths of build prefix and
chunk alone, and a step computes all of its tokens even if the tree holds some of them; a chunk is built
on top of a build prefix that was built first.

Nothing of a build stays with SGLang between two steps. So every step asks for leave again, and what is
in flight is over with its one forward.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sgl_blend.engine.adapters import Adapters, FitsClass
from sgl_blend.engine.admission import (
    admitted,
    continue_verdict,
    fits_whole,
    is_alone,
    is_out_of_memory,
    stop_verdict,
    was_admitted,
)
from sgl_blend.engine.objects import PrefillAdder, Req, Scheduler, Verdict
from sgl_blend.engine.requests import (
    has_finished,
    holds_kv,
    host_hit_length,
    prefix_length,
    prompt_ids,
    rid_of,
    set_prefix,
    was_aborted,
)
from sgl_blend.engine.rounds import (
    free_rows,
    is_queued,
    leave_queue,
    pool_capacity,
    put_first,
    uncut_length,
)
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.engine.tree import TOKEN_BYTES, TreeLock
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.scheduler.build_budget import BuildBudget
from sgl_blend.scheduler.build_queue import BuildQueue
from sgl_blend.scheduler.build_steps import BuildStep, StepPlanner
from sgl_blend.scheduler.internal_requests import (
    AddReq,
    new_internal_request,
    secret_rid_prefix,
)
from sgl_blend.scheduler.rounds import QUIET_S, Round

logger = logging.getLogger(__name__)

_MAX_PENDING = 4096
_BACKGROUND_STEP_TOKENS = 256
_FOREGROUND_STEP_TOKENS = 2048
"""No request that arrives meanwhile waits for more than one such step; short ones cost more launches,
which nobody notices in the background. A step of 512 tokens between the decode steps of a prompt of
7,000 took up to 5.3 % of its time (benchmarks/closed_loop.py)."""

_MOST_DROPPED = 32
"""Chunks that need no build any more and leave the queue in one round; each costs a search."""

_STEP = "sgl_blend_step"
"""Attribute of SGLang's Req: the step of a build that it computes."""


@dataclass(slots=True)
class _Offer:
    """A step of a background build that stands in the waiting queue for one scheduling round."""

    key: ChunkKey
    build: Req
    is_charged: bool
    admitted: bool = False
    too_large: bool = False


def step_tokens(scheduler: Scheduler, *, build_first: bool) -> int:
    """Return how many tokens a step computes at most.

    A request that SGLang cuts occupies the only place for such requests, and the server is busy for a
    flush or for new weights until its last piece is done. So long work is cut by us.
    """
    limit = _FOREGROUND_STEP_TOKENS if build_first else _BACKGROUND_STEP_TOKENS
    return uncut_length(scheduler, limit)


class ChunkBuilder:
    """Turns missing chunks into build requests.

    Owned by the scheduler thread. A step in flight belongs to SGLang; a pending build is a key and
    holds no memory of the pool, so dropping it is always safe.

    Args:
        scheduler: SGLang's Scheduler.
        store: The tree.
        tp_group: Whose ranks agree on the ids of requests.
        steps: Where builds are cut.
        adapters: Whose KV is built.
        kind: Word in the ids of requests.
        budget: What background steps may take of the requests' time.
        on_built: Each is called with every chunk that was built.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: ChunkStore,
        tp_group: TPGroup,
        steps: StepPlanner,
        adapters: Adapters,
        *,
        kind: str,
        budget: BuildBudget,
        on_built: Sequence[Callable[[ChunkKey], None]] = (),
    ) -> None:
        self._scheduler = scheduler
        self._on_built = on_built
        self._store = store
        self._capacity = pool_capacity(scheduler)
        # More tokens than the pool holds would evict each other.
        self._pending = BuildQueue(_MAX_PENDING, self._capacity * TOKEN_BYTES)
        self._steps = steps
        self._adapters = adapters
        self._budget = budget
        self._gap_until_s = 0.0
        self._in_flight: dict[ChunkKey, Req] = {}
        self._held: dict[str, TreeLock] = {}
        self._launched_s: float | None = None
        self._offer: _Offer | None = None
        self.rid_prefix = secret_rid_prefix(kind, tp_group)
        self._serial = 0
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
        """Chunks that wait to be built, also those of which a step is in flight."""
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
    def is_running(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    @property
    def in_flight(self) -> dict[str, BuildStep]:
        """The steps that SGLang is running, by request id."""
        return {rid_of(build): _step_of(build) for build in self._in_flight.values()}

    # --- background builds ---

    def enqueue(self, keys: Iterable[ChunkKey]) -> None:
        """Build chunks in the background before those that wait already, tenants in turns."""
        new = []
        for key in keys:
            if key.prefix_length + key.length >= self._capacity:
                self._pending.num_forgotten += 1
            elif key not in self._in_flight:
                new.append(key)
        self._pending.add(reversed(new))

    def forget(self) -> None:
        """Drop all pending builds."""
        self._pending.clear()

    def interrupt(self) -> None:
        """Note that the step in flight ended early, so that its duration tells nothing."""
        self._launched_s = None

    def offer(self, now: Round) -> bool:
        """Put a step of a background build into the queue if one may run.

        While requests are served their time pays for it; none runs right after a prefill.

        Returns:
            Whether the round is free for other background work: nothing can be built.
        """
        is_charged = self._is_charged(now)
        if not now.is_open:
            return False
        fits = self._adapters.fitting() if self._pending else None
        if (key := self._pending.first(fits)) is None:
            return True
        if is_charged and not self._budget.affords_step():
            return False
        if not now.is_waited_in and now.must_keep_quiet(self._pending.since_s(key, now.now_s)):
            return False
        return self._offer_next(fits, is_charged=is_charged)

    def _is_charged(self, now: Round) -> bool:
        """Tell whether a step now is paid for by the time in which requests were served.

        Between two requests of a client that sends without a pause nobody is served for a moment. What
        runs then delays the next request, so it is paid for, unless there is room in the cache.
        """
        if now.is_busy and self._pending:
            self._gap_until_s = now.now_s + QUIET_S
        return now.is_busy or (now.now_s < self._gap_until_s and not self._has_free_room())

    def _has_free_room(self) -> bool:
        """Tell whether a step pushes nothing out of the cache: then it is worth a gap's time."""
        return self._store.free_tokens > 2 * self.step_tokens

    def _offer_next(self, fits: FitsClass | None, *, is_charged: bool) -> bool:
        """Put the next step into the waiting queue; return whether nothing can be built."""
        for _ in range(_MOST_DROPPED):
            if (key := self._pending.first(fits)) is None:
                return True
            gone = self._adapters.is_gone(key.extra_key)
            step = None if gone else self._steps.next_step(key)
            if step is not None:
                self._offer = _Offer(key, self._new_build(step), is_charged)
                put_first(self._scheduler, self._offer.build)
                return False
            self._pending.remove(key)  # stored meanwhile, or nobody's any more
        return False

    def withdraw(self, now: Round) -> bool:
        """Take back what offer() put into the waiting queue, unless it was admitted.

        Returns:
            Whether it was.
        """
        if self._offer is None:
            return False
        offer, self._offer = self._offer, None
        if offer.admitted:
            self._launched_s = now.now_s
            if offer.is_charged:
                self._budget.charge()
            # Its KV may be evicted between two steps, but not for ever.
            if self._pending.spend(offer.key) > 2 * self._steps.count(offer.key) + 1:
                self._pending.forget(offer.key)
            return True
        leave_queue(self._scheduler, offer.build)
        if offer.too_large:
            self._pending.forget(offer.key)
        return False

    # --- builds that a request waits for ---

    def is_in_flight(self, key: ChunkKey) -> bool:
        """Tell whether a step of the chunk or of its build prefix is running."""
        running = self._in_flight  # mostly empty, and keys are long
        return bool(running) and (key in running or key.prefix_only in running)

    def build_now(self, keys: list[ChunkKey], adder: PrefillAdder, add: AddReq) -> int:
        """Admit the next steps of one request's missing chunks into the batch that is put together.

        Args:
            keys: Missing chunks, all after the same build prefix.
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
            if len(admitted(adder)) >= free_rows(self._scheduler, adder):
                break
            build = self._new_build(step)
            verdict = add(build)
            if not was_admitted(build, adder):
                break
            self._in_flight[step.key] = build
            num_admitted += 1
            if verdict != continue_verdict() or not step.key.length:
                break  # the batch is full, or the chunks stand after this build prefix
        return num_admitted

    # --- admission of any step ---

    def owns(self, req: Req) -> bool:
        """Tell whether an internal request is a step of a build."""
        return rid_of(req).startswith(self.rid_prefix)

    def admit(self, build: Req, adder: PrefillAdder, add: AddReq) -> Verdict:
        """Admit a step if its batch may hold it; if not, the batch stays open for those after it."""
        step = _step_of(build)
        verdict, fits = stop_verdict(), True
        held = self._steps.hold(step.key)  # before SGLang counts what it may evict
        if may_hold_builds(adder) and self._begin_at_cut(build, step):
            fits = fits_whole(build, adder)
            verdict = add(build) if fits else verdict
        if held is not None and was_admitted(build, adder):
            self._held[rid_of(build)] = held
        elif held is not None:
            self._store.unlock(held)
        offer = self._offer if self._offer is not None and self._offer.build is build else None
        if was_admitted(build, adder):
            self.num_steps += 1
            if offer is not None:
                offer.admitted = True
                self._in_flight[step.key] = build
            return verdict
        if offer is not None:
            offer.too_large = is_alone(adder) and (is_out_of_memory(verdict) or not fits)
        return continue_verdict()

    def _begin_at_cut(self, build: Req, step: BuildStep) -> bool:
        """Let a step begin at its cut, though device or host hold more; return if there is enough."""
        if prefix_length(build) + host_hit_length(build) > step.done:
            key = step.key
            found = self._store.find_prefix(
                key.path, salt=key.salt, extra_key=key.extra_key, limit=step.done
            )
            set_prefix(build, found)
        return prefix_length(build) == step.done

    def _new_build(self, step: BuildStep) -> Req:
        self._serial += 1
        build = new_internal_request(
            self._scheduler,
            f"{self.rid_prefix}{self._serial}",
            step.key.path[: step.stop],
            salt=step.key.salt,
            extra_key=step.key.extra_key,
        )
        setattr(build, _STEP, step)
        return build

    def collect(self, now_s: float | None) -> None:
        """Forget steps that ended; between rounds each of the others holds KV or is queued."""
        for key, build in list(self._in_flight.items()):
            ended = has_finished(build)
            if not ended and (holds_kv(build) or is_queued(self._scheduler, build)):
                continue
            del self._in_flight[key]
            if (held := self._held.pop(rid_of(build), None)) is not None:
                self._store.unlock(held)
            if self._launched_s is not None and now_s is not None:
                self._budget.learn(now_s - self._launched_s)
            self._launched_s = None
            if ended and not was_aborted(build) and _step_of(build).is_last:
                self._pending.remove(key)
                self.num_built += 1
                for tell in self._on_built:
                    tell(key)
            logger.debug("%s ended, %d tokens", rid_of(build), len(prompt_ids(build)))


def _step_of(build: Req) -> BuildStep:
    step: BuildStep = getattr(build, _STEP)
    return step


def is_build(req: Req) -> bool:
    """Tell whether an internal request is a step of a build."""
    return hasattr(req, _STEP)


def may_hold_builds(adder: PrefillAdder) -> bool:
    """Tell whether builds may join a batch: they keep to themselves."""
    return all(is_build(req) for req in admitted(adder))

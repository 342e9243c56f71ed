"""Building chunks: prefilling them alone behind their build prefix, so that their KV is canonical.

A build is an ordinary request of SGLang's in the chunk namespace that ends with its prefill; when it
ends, the scheduler inserts its KV into the tree. Three rules make the KV the same bytes whatever else
is served: builds share a batch with builds only, the fusor runs each of them as a forward of its own,
and a chunk is always computed whole, on top of a build prefix that was built first.
"""

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sgl_blend import sglang_adapter as sglang
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore

logger = logging.getLogger(__name__)

_MAX_PENDING = 4096
_CREDIT_SHARE = 0.05
"""Background builds may cost this share of the prefill work of requests that have to wait for them."""

AddReq = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Offer:
    """A background build that stands in the waiting queue for one scheduling round."""

    key: ChunkKey
    stage: ChunkKey
    build: Any


class ChunkBuilder:
    """Turns missing chunks into build requests.

    Owned by the scheduler thread. A build in flight belongs to SGLang; a pending one is a key and
    holds no memory of the pool, so dropping it is always safe.
    """

    def __init__(self, scheduler: Any, store: ChunkStore) -> None:
        self._scheduler = scheduler
        self._store = store
        self._pending: OrderedDict[ChunkKey, None] = OrderedDict()
        self._in_flight: dict[ChunkKey, Any] = {}
        self._serial = 0
        self._credit = 0.0
        self._offered: _Offer | None = None
        self.num_built = 0
        self.num_forgotten = 0

    @property
    def num_pending(self) -> int:
        """Builds waiting for a free moment."""
        return len(self._pending)

    @property
    def has_in_flight(self) -> bool:
        """Whether a build is admitted and not finished."""
        return bool(self._in_flight)

    def enqueue(self, keys: Iterable[ChunkKey]) -> None:
        """Build chunks in the background, oldest first."""
        for key in keys:
            if key not in self._in_flight:
                self._pending.setdefault(key)
        while len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)
            self.num_forgotten += 1

    def forget_pending(self) -> None:
        """Drop all pending builds, for instance because the cache is flushed."""
        self._pending.clear()

    def earn(self, num_tokens: int) -> None:
        """Let background builds take a share of the prefill work just admitted."""
        self._credit = min(self._credit + _CREDIT_SHARE * num_tokens, 65536.0)

    def is_in_flight(self, key: ChunkKey) -> bool:
        """Tell whether a build of the chunk or of its build prefix runs."""
        self._sweep()
        return key in self._in_flight or key.prefix_only in self._in_flight

    def is_building(self, key: ChunkKey) -> bool:
        """Tell whether the chunk itself, not only its build prefix, is being built."""
        return key in self._in_flight

    def build_now(self, keys: list[ChunkKey], adder: Any, add: AddReq) -> bool:
        """Admit builds of one request's missing chunks into the batch that is being put together.

        Args:
            keys: Missing chunks, all behind the same build prefix.
            adder: SGLang's PrefillAdder of the batch.
            add: Stock admission of one request.

        Returns:
            True if at least one was admitted or the batch has no room just now; False if none can
            be built, because the pool has no memory for it.
        """
        if not self.may_join(adder):
            return True
        refused = False
        for key in self._next_stage(keys):
            if len(adder.can_run_list) >= self._free_rows():
                break
            build = self._new_build(key)
            before = len(adder.can_run_list)
            verdict = add(build)
            if len(adder.can_run_list) == before:
                refused = sglang.is_out_of_memory(verdict)
                break
            self._in_flight[key] = build
            if verdict != sglang.continue_verdict():
                break
        return bool(adder.can_run_list) or not refused

    @staticmethod
    def may_join(adder: Any) -> bool:
        """Tell whether a build may join a batch: builds keep to themselves."""
        return all(is_build(req) for req in adder.can_run_list)

    def offer(self, running_batch: Any) -> None:
        """Put background builds into the waiting queue for one scheduling round.

        One chunk a round. Where requests wait, only on credit; where requests decode, only every
        other round, so that a build never holds them up twice in a row.
        """
        scheduler = self._scheduler
        self._sweep()
        if not self._pending or scheduler.chunked_req is not None or self._in_flight:
            return
        last = scheduler.last_batch
        decoding = not running_batch.is_empty()
        if decoding and last is not None and last.forward_mode.is_extend():
            return
        key = self._next_pending()
        if key is None:
            return
        stage = self._next_stage([key])[0]
        if scheduler.waiting_queue and self._credit < stage.length + stage.prefix_length:
            return
        build = self._new_build(stage)
        self._offered = _Offer(key, stage, build)
        scheduler.waiting_queue.insert(0, build)

    def withdraw(self) -> None:
        """Take back what offer() put into the waiting queue, unless the scheduler admitted it."""
        if self._offered is None:
            return
        offer, self._offered = self._offered, None
        scheduler = self._scheduler
        if offer.build not in scheduler.waiting_queue:
            self._in_flight[offer.stage] = offer.build
            if offer.stage == offer.key:
                del self._pending[offer.key]
            if scheduler.waiting_queue:
                self._credit -= len(offer.build.origin_input_ids)
            return
        scheduler.waiting_queue.remove(offer.build)
        if scheduler.running_batch.is_empty() and not scheduler.waiting_queue:
            # Nothing else holds memory that could come free: the chunk does not fit the pool.
            del self._pending[offer.key]
            self.num_forgotten += 1

    def prepare(self, build: Any) -> None:
        """Make a build about to be admitted compute its whole chunk behind the stored prefix."""
        prefix_length = build.sgl_blend_build.prefix_length
        if len(build.prefix_indices) <= prefix_length or not build.sgl_blend_build.length:
            return
        key = build.sgl_blend_build
        found = self._store.find_prefix(
            key.path, salt=key.salt, extra_key=key.extra_key, limit=prefix_length
        )
        build.prefix_indices, build.last_node = found.slots, found.node
        build.last_host_node = build.best_match_node = found.node
        build.host_hit_length = 0
        build.kv.cache_protected_len = len(found)

    def _next_pending(self) -> ChunkKey | None:
        """Return the oldest chunk that is still missing; chunks stored meanwhile are dropped."""
        while self._pending:
            key = next(iter(self._pending))
            if not self._store.is_complete(key):
                return key
            del self._pending[key]
        return None

    def _next_stage(self, keys: list[ChunkKey]) -> list[ChunkKey]:
        """Return what to build next: the shared build prefix first, then all chunks at once."""
        prefix = keys[0].prefix_only
        return keys if self._store.is_complete(prefix) else [prefix]

    def _new_build(self, key: ChunkKey) -> Any:
        scheduler = self._scheduler
        self._serial += 1
        build = sglang.new_build_request(
            f"{sglang.BUILD_RID_PREFIX}{self._serial}",
            key.path,
            salt=key.salt,
            extra_key=key.extra_key,
            vocab_size=scheduler.model_config.vocab_size,
            priority=self._lowest_priority(),
        )
        build.sgl_blend_build = key
        build.finished_output = True  # SGLang then streams nothing of it to the detokenizer
        return build

    def _lowest_priority(self) -> int | None:
        """Return the priority that SGLang itself gives requests without one."""
        scheduler = self._scheduler
        if not scheduler.enable_priority_scheduling:
            return None
        return sys.maxsize if scheduler.schedule_low_priority_values_first else -sys.maxsize - 1

    def _free_rows(self) -> int:
        scheduler = self._scheduler
        rows: int = scheduler.get_num_allocatable_reqs(len(scheduler.running_batch.reqs))
        return rows

    def _sweep(self) -> None:
        """Forget builds that ended; SGLang has inserted their KV, or an abort has dropped it."""
        for key in [key for key, build in self._in_flight.items() if build.finished()]:
            build = self._in_flight.pop(key)
            self.num_built += bool(key.length)
            logger.debug("%s built %d tokens", build.rid, key.length)


def is_build(req: Any) -> bool:
    """Tell whether a request is an internal build."""
    return getattr(req, "sgl_blend_build", None) is not None

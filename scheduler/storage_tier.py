"""Chunks in storage come to host memory before the request that wants them is admitted.

SGLang asks its storage for the prompt of a request as a whole. A blended prompt is never stored. So
each chunk is asked for by its own path, and the client's exact prefix with them. Chunks are built after
the same build prefix. If device and host lack that, it is asked for first, and once.

    arrival      exact prefix, build prefix or chunks are asked for      arrived
    each round   what came is counted, the next is asked for             begin_round
    admission    SGLang asks whether to go on waiting                    is_waited_for

What comes too late stays in host memory for the next request.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable
from typing import Any

from sgl_blend.engine.objects import Handle, Req, Scheduler, Tree
from sgl_blend.engine.prefetch import (
    Coded,
    Prefetch,
    drop_prefetches,
    expect_chunk_pages,
    finish_writes,
    has_storage,
    namespace_of_node,
    reads_coded,
    start_prefetch,
    writes_in_flight,
)
from sgl_blend.engine.requests import prompt_ids, rid_of
from sgl_blend.engine.rounds import is_queued, is_serving
from sgl_blend.engine.storage import name_stored_weights, storage_of
from sgl_blend.engine.tiers import finished_loads
from sgl_blend.metrics import StorageMetrics
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.namespaces import is_chunk_of, may_leave_server
from sgl_blend.scheduler.arrivals import Arrival, exact_head, exact_reach
from sgl_blend.scheduler.level_choice import LevelChoice
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.loading_controller import LoadingController, Patience
from sgl_blend.scheduler.lookup import Lookups
from sgl_blend.scheduler.pieces import Pieces
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.tuning.loading import Chunk, Place

logger = logging.getLogger(__name__)

_PATIENCE = Patience(2.0, 2.0)
"""How long a request waits where no controller knows better."""

_PUBLISH_S = 1.0
_MOMENT_S = 2e-3
"""Long beside what a round without work takes, and short beside what a client waits for."""


class StorageTier:
    """Asks storage for chunks; owned by the scheduler thread.

    Args:
        scheduler: SGLang's Scheduler.
        tree: Its tree.
        store: Where chunks are found.
        lookups: Knows whether exact KV of a client's earlier prompts is of use.
        model: Whose KV is of use.
        controller: Chooses what is worth loading; None to ask for everything.
        pieces: Prefills what stands before it.
        metrics: Where the totals of storage are published.
        levels: Chooses the levels at which chunks come; None: nothing is lost.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tree: Tree,
        store: ChunkStore,
        lookups: Lookups,
        model: LoadedModel,
        controller: LoadingController | None,
        pieces: Pieces,
        metrics: StorageMetrics,
        levels: LevelChoice | None = None,
    ) -> None:
        self._levels = levels
        self._pieces = pieces
        self._metrics = metrics
        self._published_s = 0.0
        self._model = model
        self._store = store
        self._controller = controller
        self._scheduler = scheduler
        self._tree = tree
        self._lookups = lookups
        self._arrivals: dict[str, Arrival] = {}
        self._seen_s, self._serial = 0.0, 0
        self._is_named = False
        self._old_writes: frozenset[int] = frozenset()
        self._name_weights()

    @property
    def needs_clock(self) -> bool:
        """Whether something is on its way, so that the next round has to know the time."""
        return bool(self._arrivals)

    @property
    def num_coming(self) -> int:
        """What is on its way, or was asked for."""
        return sum(len(arrival.coming) for arrival in self._arrivals.values())

    def arrived(self, req: Req, state: RequestState) -> None:
        """Ask storage for what device and host lack of a request; also after a retraction."""
        self._name_weights()  # the first request after new weights comes before a round
        if not has_storage(self._tree) or rid_of(req) in self._arrivals:
            return
        if self._controller is not None and (storage := storage_of(self._tree)) is not None:
            storage.observe(self._controller.storage_read)
        first, tokens = state.keys[0], prompt_ids(req)[: state.num_tokens - 1]
        own = state.blended_namespace(self._model)
        covered = self._store.reach(tokens, salt=own, extra_key=first.extra_key)
        if all(span.stop <= covered for span in state.spans):
            return  # a prompt that was blended before
        if self._lookups.exact_may_be_used:
            covered = max(covered, exact_reach(self._store, req, state))
        levels = self._levels if reads_coded(self._tree) else None
        exact = 0 if levels else exact_head(first, tokens)  # what may be rounded is none
        keys, patience, in_pieces = self._choose(state, covered, exact)
        stream = levels.stream(state, keys) if levels and keys else None
        if stream is not None:  # a finer level may take as long as there is time
            patience = Patience(*(max(wait_s, stream.remaining_s) for wait_s in patience))
        arrival = Arrival(req, state, patience, in_pieces, stream, exact)
        has_time = levels is None or levels.has_time_for_exact(stream, len(tokens) - covered)
        if has_time and self._lookups.exact_may_be_used:
            arrival.client = self._ask(arrival, tokens, state.client_salt, first.extra_key)
        if keys and self._ask_for_key(arrival, first.prefix_only, None):
            arrival.next_keys = keys
        else:
            self._ask_for_chunks(arrival, keys)
        if arrival.coming:
            self._arrivals[rid_of(req)] = arrival

    def begin_round(self, now_s: float | None) -> None:
        """See what has come; all ranks begin their rounds together.

        Args:
            now_s: The first rank's clock, in seconds; None where nobody needs it.
        """
        self._name_weights()
        self._publish()
        if self._controller is not None:
            for load in finished_loads(self._tree):
                self._controller.host_loaded(*load)
        if now_s is None or not self._arrivals:
            return
        self._seen_s = now_s
        self._look()
        for rid, arrival in list(self._arrivals.items()):
            if arrival.since_s is None:
                arrival.since_s = now_s
            if arrival.is_awaited and not is_queued(self._scheduler, arrival.req):
                arrival.give_up(self._tree)  # it was aborted
            waited_s = now_s - arrival.since_s
            if arrival.is_awaited and (not arrival.coming or self._is_late(arrival, waited_s)):
                arrival.stop_waiting(waited_s)
            if arrival.is_awaited and arrival.in_pieces:
                self._want_piece(arrival)
            if not arrival.coming:
                del self._arrivals[rid]

    def _is_late(self, arrival: Arrival, waited_s: float) -> bool:
        patience = arrival.patience
        if waited_s <= patience.least_s:
            return False
        if waited_s > patience.most_s or self._controller is None:
            return True
        come, left = arrival.progress(self._tree)
        return not self._controller.is_in_time(come, left, waited_s, patience)

    def let_read(self) -> None:
        """Leave the core, and Python's lock, to the threads that read: this round has nothing to run.

        They take no longer then if the machine has few cores. What a client sends waits as long.
        """
        if self._arrivals:
            time.sleep(_MOMENT_S)

    def is_waited_for(self, rid: str) -> bool:
        """Tell whether a request goes on waiting for its KV; all ranks are told the same."""
        arrival = self._arrivals.get(rid)
        is_awaited = arrival is not None and arrival.is_awaited
        return is_awaited or self._pieces.is_running_for(rid)

    def keys_coming(self, rid: str) -> frozenset[ChunkKey]:
        """Return the chunks of a request that are still on their way, though it waits no longer."""
        arrival = self._arrivals.get(rid)
        coming = () if arrival is None else arrival.coming.values()
        return frozenset(key for key in coming if key is not None)

    def drop_all(self) -> None:
        """Give up whatever is on its way: an order is about to be carried out."""
        for arrival in self._arrivals.values():
            arrival.drop(self._tree, self._seen_s)
        self._arrivals.clear()

    def weights_changed(self) -> None:
        """Find and write nothing until the new weights are known, and no KV of old ones is written."""
        self.drop_all()
        name_stored_weights(self._tree, None, "")
        self._is_named = False
        self._old_writes |= writes_in_flight(self._tree)

    def _publish(self) -> None:
        storage, now_s = storage_of(self._tree), time.monotonic()
        if storage is not None and now_s > self._published_s + _PUBLISH_S:
            self._published_s = now_s
            self._metrics.update(storage.counters)

    def _name_weights(self) -> None:
        if self._is_named or self._model.weights is None:
            return
        self._old_writes &= writes_in_flight(self._tree)
        if not self._old_writes:
            weights, identity = self._model.weights, self._model.identity
            levels = None if self._levels is None else self._levels.levels
            name_stored_weights(self._tree, weights, identity, levels)
            self._is_named = True
            if levels is not None and storage_of(self._tree) and not reads_coded(self._tree):
                logger.warning(
                    "sgl-blend: the profile was not measured on the weights that are loaded now: "
                    "chunks are stored losslessly"
                )

    def describe(self) -> dict[str, Any] | None:
        """Return totals of storage for /server_info, and the speeds; None without a host tier."""
        storage = storage_of(self._tree)
        speeds = {} if self._controller is None else self._controller.describe()
        totals = {} if storage is None else storage.counters.snapshot()
        if not (totals or speeds):
            return None
        return {**totals, **speeds, "pieces": self._pieces.num_run}

    def leave(self) -> None:
        """Give up what is on its way, and wait a moment for what is being written.

        Not while clients are served: SGLang refuses the order then, and nobody is held up for it.
        """
        if is_serving(self._scheduler):
            return
        self.drop_all()
        drop_prefetches(self._tree)
        finish_writes(self._tree)

    def takes(self, node: Handle) -> bool:
        """Tell whether a node of the tree is written to storage.

        The exact namespace names no weights. While it may hold KV of old ones, nothing of it is
        written, because it would lie under the name of the present ones.
        """
        salt = namespace_of_node(self._tree, node)
        if self._lookups.holds_old_weights and not is_chunk_of(salt, self._model.fingerprint):
            return False
        return may_leave_server(salt, self._model.fingerprint)

    def will_write(self, node: Handle) -> None:
        """Have a node that is about to be written coded, if it is a chunk's."""
        if self._levels is not None and is_chunk_of(
            namespace_of_node(self._tree, node), self._model.fingerprint
        ):
            expect_chunk_pages(self._tree, node)

    def _choose(
        self, state: RequestState, covered: int, exact: int
    ) -> tuple[tuple[ChunkKey, ...], Patience, bool]:
        """Return the chunks to ask storage for, how long to wait for them, and if to prefill in pieces.

        Args:
            state: Of the request.
            covered: Tokens of its own that are on the device or on the host, from the first on.
            exact: Tokens up to the end of the first chunk if its KV counts as exact; else 0.
        """
        pairs = zip(state.keys, state.spans, strict=True)
        wanted = [(key, span) for key, span in pairs if span.stop > covered]
        if self._controller is None:
            lacking = [key for key, _ in wanted if not self._is_in_a_tier(key)]
            return tuple(lacking), _PATIENCE, False
        token_bytes = self._controller.token_bytes
        chunks, asks = [], False
        for key, span in wanted:
            on_device, on_host = self._store.stored_in_tiers(key)
            there = on_device + on_host
            if asks:  # for the build prefix too, which all chunks share
                there = max(there, self._store.whole_pages(key.prefix_length))
            lacks = self._store.whole_pages(len(key.path)) - there
            asks = asks or lacks > 0
            there_already = Place.HOST if on_host else Place.DEVICE
            place = Place.STORAGE if lacks > 0 else there_already
            stored_bytes = round(max(0, lacks) * token_bytes * self._least_share)
            is_exact = span.stop == exact
            num_tokens = exact - covered if is_exact else len(span)
            chunks.append(Chunk(num_tokens, place, stored_bytes, is_exact))
        rest = state.num_tokens - covered - sum(chunk.num_tokens for chunk in chunks)
        queued = sum(one.num_tokens for each in self._arrivals.values() for one in each.coming)
        queued_bytes = round(queued * token_bytes * self._least_share)
        choice = self._controller.choose(
            chunks, max(1, rest), ratios=state.ratios, num_queued=queued_bytes
        )
        keys = tuple(
            wanted[index][0] for index in choice.loaded if chunks[index].place is Place.STORAGE
        )
        return keys, self._controller.patience(choice), choice.stepwise

    def _is_in_a_tier(self, key: ChunkKey) -> bool:
        """Tell whether all of a chunk is on the device or on the host, in whatever namespace."""
        return sum(self._store.stored_in_tiers(key)) >= self._store.whole_pages(len(key.path))

    @property
    def _least_share(self) -> float:
        """What the coarsest stored level takes of the bytes of KV."""
        storage = storage_of(self._tree)
        return 1.0 if storage is None else storage.least_share

    def _look(self) -> None:
        """See what is over, ask for what comes after it, and wait for nothing that another brought."""
        came: list[ChunkKey] = []
        for arrival in self._arrivals.values():
            before = len(arrival.coming)
            came += arrival.take_over(self._tree)
            if arrival.client is not None and arrival.client not in arrival.coming:
                arrival.give_up_covered(self._tree, self._store)
            if before and not arrival.coming and arrival.next_keys:
                keys, arrival.next_keys = arrival.next_keys, ()
                self._ask_for_chunks(arrival, keys)
        if came:
            self._give_up_doubles(came)

    def _give_up_doubles(self, came: Iterable[ChunkKey]) -> None:
        """Read no chunk to its end that came for another request: the tree would drop it."""
        # To ask the tree is a use, and all ranks have to use chunks in one order.
        there = frozenset(filter(self._is_in_a_tier, dict.fromkeys(came)))
        for arrival in self._arrivals.values():
            arrival.give_up(self._tree, there)

    def _want_piece(self, arrival: Arrival) -> None:
        """Have prefilled what stands before the first chunk that is still on its way."""
        coming = set(arrival.coming.values())
        if None in coming:
            return  # the exact prefix, or the build prefix of all chunks
        if not arrival.is_being_read(self._tree):
            return  # a forward now would hold up what the scheduler has to do for it
        state = arrival.state
        awaited = [
            span.start for key, span in zip(state.keys, state.spans, strict=True) if key in coming
        ]
        border, first = min(awaited, default=0), state.keys[0]
        if border <= arrival.exact and (first in coming or self._is_in_a_tier(first)):
            return
        if border > arrival.prefilled and self._pieces.want(arrival.req, state, border):
            arrival.prefilled = border

    def _ask_for_chunks(self, arrival: Arrival, keys: Iterable[ChunkKey]) -> None:
        for key in dict.fromkeys(keys):
            self._ask_for_key(arrival, key, key)

    def _ask_for_key(self, arrival: Arrival, key: ChunkKey, part_of: ChunkKey | None) -> bool:
        """Ask for a chunk, or for the build prefix of all; return whether something may come.

        What may be rounded comes into a namespace where nothing counts as exact. Its objects are named
        by the one that it was built in.
        """
        path, stream = key.path, arrival.stream
        if stream is None or self._levels is None:
            return self._ask(arrival, path, key.salt, key.extra_key, part_of) is not None
        into = key.rounded
        coded = Coded(stream, key.salt, is_prefix=part_of is None)
        asked = self._ask(arrival, path, into.salt, into.extra_key, part_of, coded)
        more = (0 if asked is None else asked.num_tokens) - (key.length or key.prefix_length)
        stream.add(more * self._levels.token_bytes)
        return asked is not None

    def _ask(
        self,
        arrival: Arrival,
        path: array[int],
        salt: str | None,
        extra_key: str | None,
        key: ChunkKey | None = None,
        coded: Coded | None = None,
    ) -> Prefetch | None:
        """Ask for a path; return what may come of it."""
        self._serial += 1
        name = f"{rid_of(arrival.req)}#{self._serial}"
        prefetch = start_prefetch(
            self._tree, name, path, salt=salt, extra_key=extra_key, coded=coded
        )
        if prefetch is not None:
            arrival.coming[prefetch] = key
        return prefetch

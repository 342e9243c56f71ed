"""What SGLang's HiCache sees as its storage backend: pages that are checked on their way.

Every page goes through the container of storage/container.py, and every call of the store through the
guard of storage/breaker.py. Whatever goes wrong is a miss or a failed write, and is counted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import torch

from sgl_blend.engine.host_pages import HostPages
from sgl_blend.engine.page_objects import Observer, PageObjects
from sgl_blend.engine.storage_backends import LateStore
from sgl_blend.errors import ConfigError, UnsupportedError
from sgl_blend.storage.breaker import CallFault, GuardedCalls
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.storage.codec.streams import ChunkStream
from sgl_blend.storage.container import LEVEL, PageLabel
from sgl_blend.storage.counters import StorageCounters
from sgl_blend.storage.names import ObjectNames, StoreKey

logger = logging.getLogger(__name__)


class ReadOrder(list[str]):
    """The prefix of pages that are asked for, as SGLang hands it to a backend, and for what.

    Attributes:
        stream: The chunk that is read.
    """

    def __init__(self, keys: Iterable[str], stream: ChunkStream) -> None:
        super().__init__(keys)
        self.stream = stream

    def __bool__(self) -> bool:
        return True  # SGLang hands on no prefix that is false

    def copy(self) -> ReadOrder:
        """Return what SGLang keeps of it."""
        return ReadOrder(self, self.stream)

    def __add__(self, other: Any) -> ReadOrder:  # type: ignore[override]
        return ReadOrder([*self, *other], self.stream)


def _always() -> bool:
    return True


_MOST_EXPECTED = 1_000_000
"""Pages that wait to be written, in a queue of SGLang that nothing bounds."""
_MOST_STREAMS = 100_000
"""Pages that were found and are not read yet."""
_FEW_STREAMS = 1000
_SETUP_S = 30.0
_CLEAR_S = 60.0


class CheckedPages:
    """A backend for SGLang's HiCache, as a HiCacheStorage; see make_storage.

    Args:
        store: The store of objects.
        pages: Of the host pool.
        names: Of their objects.
        calls: Makes all calls of the store.
        key: Keys of the operator.
    """

    def __init__(
        self,
        store: LateStore,
        pages: HostPages,
        names: ObjectNames,
        calls: GuardedCalls,
        key: StoreKey | None = None,
    ) -> None:
        self._store = store
        self._pages = pages
        self._calls = calls
        secret = None if key is None else key.pages
        self._objects = PageObjects(store, pages.form, names, calls, secret)
        self._positions: dict[str, int] = {}
        self._streams: dict[str, tuple[ChunkStream, ...]] = {}
        self._forget_at = _FEW_STREAMS
        self._lock = Lock()

    def connect(self, backend: str) -> None:
        """Set the store up, or leave that to later calls if it does not answer.

        Raises:
            ConfigError: It is not configured as it has to be.
        """
        outcome = self._calls.call(self._store.get, _SETUP_S)
        if not isinstance(outcome, CallFault):
            return
        self.counters.fault(outcome)
        err = self._store.refused
        if isinstance(err, ImportError | ValueError | TypeError | LookupError | AttributeError):
            self._calls.close()
            raise ConfigError(f"--hicache-storage-backend {backend}: {err}") from err
        logger.warning("sgl-blend: the KV store %s is down, the server starts without", backend)

    # --- reading ---

    @property
    def counters(self) -> StorageCounters:
        """What happened."""
        return self._objects.counters

    @property
    def levels(self) -> StoredLevels | None:
        """At which chunks are stored; None: nothing is lost."""
        return self._objects.levels

    @property
    def page_bytes(self) -> int:
        """Bytes of KV of a page."""
        return self._pages.form.page_bytes

    @property
    def least_share(self) -> float:
        """What the coarsest level takes of the bytes of KV."""
        levels = self.levels
        if levels is None:
            return self._objects.lossless_share
        return levels.share_of(levels.names[-1], self._pages.form.dtype)

    def observe(self, observer: Observer) -> None:
        """Have an observer called in SGLang's thread after each batch that was read.

        Args:
            observer: Is given its stored bytes and the seconds that took.
        """
        self._objects.observe = observer

    def exists(self, key: str) -> bool:
        """Tell whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many of the pages, from the first on, are stored at some level."""
        stream, levels = _stream_of(extra_info), self.levels
        if stream is None:
            return self._objects.count(keys, LEVEL)
        found, names = 0, [stream.stored_name(key) for key in keys]
        readable = (LEVEL,) if levels is None else levels.readable
        while found < len(keys):
            # From a gap on all levels are asked again: a full disk leaves single pages out.
            counts = {level: self._objects.count(names[found:], level) for level in readable}
            reach = max(counts.values())
            if reach == 0:
                break
            for index in range(reach):
                stored = [level for level, count in counts.items() if count > index]
                stream.found(keys[found + index], stored)
            found += reach
        if found < len(keys):
            stream.found_all()
        with self._lock:
            for key in keys[:found]:
                # Two requests may ask for a page; it is popped so that it stands behind all others.
                others = [each for each in self._streams.pop(key, ()) if each.waits_for(key)]
                self._streams[key] = (*others, stream)
            self._forget_streams()
        return found

    def _forget_streams(self) -> None:
        """Forget what nobody waits for any more, now and then, and too many in any case."""
        if len(self._streams) > self._forget_at:
            alive = {
                key: waiting
                for key, streams in self._streams.items()
                if (waiting := tuple(each for each in streams if each.waits_for(key)))
            }
            while len(alive) > _MOST_STREAMS:
                del alive[next(iter(alive))]
            self._streams, self._forget_at = alive, max(_FEW_STREAMS, 2 * len(alive))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill one of SGLang's flat pages; None if the page is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill SGLang's flat pages up to the first that is not there; after that all are None."""
        found: list[torch.Tensor | None] = [None] * len(keys)
        for index, page in enumerate(self._objects.read(*self._chosen(keys), _always)):
            self._pages.fill(target_locations[index], page)
            found[index] = target_locations[index]
        return found

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Put pages into the host pool up to the first that is not there."""
        read = self.read_pages(keys, host_indices, _always)
        return [index < read for index in range(len(keys))]

    def read_pages(
        self, keys: Sequence[str], host_indices: torch.Tensor, is_wanted: Callable[[], bool]
    ) -> int:
        """Put pages into the host pool up to the first that is not there, or while they are wanted.

        Args:
            keys: SGLang's hashes of the pages.
            host_indices: int64 [pages * tokens of a page], where they go.
            is_wanted: Tells whether they are still needed.

        Returns:
            How many were read.
        """
        read, slots = 0, self._slots(host_indices)
        for page in self._objects.read(*self._chosen(keys), is_wanted):
            self._pages.write(slots[read], page)
            read += 1
        return read

    def _chosen(self, keys: Sequence[str]) -> tuple[list[PageLabel], ChunkStream | None]:
        """Return what to read of some pages, up to the first that is left, and for which chunk."""
        levels = self.levels
        with self._lock:
            # The last page is the chunk's own; the first ones may be shared with others.
            waiting = self._streams.get(keys[-1], ()) if keys else ()
            stream = next((each for each in waiting if each.waits_for(keys[-1])), None)
            if stream is not None:
                stream.take(
                    keys
                )  # so that another request's read of these pages is not taken for it
        if stream is None:
            return self._objects.labels(keys, LEVEL), None
        if levels is None:
            return self._objects.labels([stream.stored_name(key) for key in keys], LEVEL), stream
        dtype, labels = self._pages.form.dtype, []
        for key in keys:
            level = stream.level_of(key, lambda level: levels.share_of(level, dtype))
            name = stream.stored_name(key)
            label = None if level is None else self._objects.names.label(name, level)
            if label is None:
                break
            labels.append(label)
        if len(labels) < len(keys):
            self.counters.add("left_for_text", len(keys) - len(labels))
            stream.stop()
        return labels, stream

    # --- writing ---

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one of SGLang's flat pages; return whether it is stored."""
        return self._write([key], [lambda: self._pages.canonical(value)]) == 1

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store SGLang's flat pages up to the first that cannot be stored."""
        reads = [functools.partial(self._pages.canonical, value) for value in values]
        return self._write(keys, reads) == len(keys)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Store pages of the host pool up to the first that cannot be stored."""
        slots = self._slots(host_indices)
        stored = self._write(keys, [functools.partial(self._pages.read, slot) for slot in slots])
        return [index < stored for index in range(len(keys))]

    def will_write(self, keys: Sequence[str], position: int) -> None:
        """Say that pages of a chunk are about to be written, so that they are coded.

        Args:
            keys: SGLang's hashes of neighbouring pages.
            position: Of the first token of the first.
        """
        if self.levels is None:
            return
        tokens = self._pages.form.tokens
        with self._lock:
            for index, key in enumerate(keys):
                self._positions[key] = position + index * tokens
            while len(self._positions) > _MOST_EXPECTED:
                del self._positions[next(iter(self._positions))]

    def _write(self, keys: Sequence[str], reads: Sequence[Callable[[], memoryview]]) -> int:
        """Store pages at all of their levels; return how many are stored, from the first on.

        A page is stored if its coarsest level is. All pages get that one first: a disk that fills
        keeps the coarsest level of all of them, not all levels of the first ones.
        """
        with self._lock:
            positions = [self._positions.pop(key, None) for key in keys]
        levels = self.levels
        coarsest, *finer = (LEVEL,) if levels is None else reversed(levels.names)
        stored = 0
        for key, read, position in zip(keys, reads, positions, strict=True):
            level = LEVEL if position is None else coarsest
            if not self._objects.write(key, level, read, position or 0):
                break
            stored += 1
        for level in finer:
            for key, read, position in zip(keys[:stored], reads, positions, strict=False):
                if position is not None:
                    self._objects.write(key, level, read, position)
        return stored

    # --- the rest of HiCacheStorage ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take note of the host pool; the backend never sees its memory."""
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse side pools.

        Raises:
            UnsupportedError: For any pool but that of K and V.
        """
        if str(host_pool_name) != "kv":
            raise UnsupportedError(
                f"--hicache-storage-backend: side pool {host_pool_name} is not supported"
            )

    def on_host_pools_registered(self) -> None:
        """Nothing depends on which pools there are."""

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: object = None
    ) -> Any:
        """Find nothing where a side pool is asked for."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        return PoolTransferResult(0 if pool_transfers else self.batch_exists(keys), {})

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, Any]:
        """Read nothing of side pools."""
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, Any]:
        """Write nothing of side pools."""
        return self.batch_get_v2(transfers)

    def clear(self) -> bool:
        """Remove all objects of the store, also those of other servers, as SGLang does."""
        outcome = self._calls.call(lambda: self._store.get().clear(), _CLEAR_S)
        if isinstance(outcome, CallFault):
            self.counters.fault(outcome)
        return not isinstance(outcome, CallFault)

    def get_stats(self) -> Any:
        """Return what SGLang publishes about the backend; None if it has nothing."""
        made = self._store.made
        return None if made is None else made.stats()

    def close(self) -> None:
        """Let the backend go, and make no calls any more."""
        made = self._store.made
        if made is not None:
            self._calls.call(made.close)
        self._calls.close()

    def _slots(self, host_indices: torch.Tensor) -> list[int]:
        """Return where pages begin whose tokens go to these slots."""
        slots: list[int] = host_indices[:: self._pages.form.tokens].tolist()
        return slots


def _stream_of(extra_info: object) -> ChunkStream | None:
    """Return the chunk that SGLang reads pages of, if it is one that was asked for in levels."""
    order = getattr(extra_info, "prefix_keys", None)
    return order.stream if isinstance(order, ReadOrder) else None

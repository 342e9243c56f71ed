"""What SGLang's HiCache sees as its storage backend: pages that are checked on their way.

Every page goes through the container of storage/container.py, and every call of the store through the
guard of storage/breaker.py. Whatever goes wrong is a miss or a failed write, and is counted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

import torch

from sgl_blend.engine.host_pages import HostPages
from sgl_blend.engine.storage_backends import LateStore
from sgl_blend.errors import ConfigError, UnsupportedError
from sgl_blend.storage.breaker import CallFault, GuardedCalls, Pending
from sgl_blend.storage.container import Fault, PageLabel, pack, unpack
from sgl_blend.storage.counters import StorageCounters
from sgl_blend.storage.names import ObjectNames, StoreKey

logger = logging.getLogger(__name__)

Observer = Callable[[int, float], None]
_Read = bytearray | Fault | None

_READ_AHEAD = 2
_MOST_SUSPECTS = 10_000
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

    Attributes:
        counters: What happened.
        observe: Called after each batch that was read, with its bytes of KV and the seconds that
            took, in SGLang's thread.
    """

    def __init__(
        self,
        store: LateStore,
        pages: HostPages,
        names: ObjectNames,
        calls: GuardedCalls,
        key: StoreKey | None = None,
    ) -> None:
        self.counters = StorageCounters()
        self.observe: Observer | None = None
        self._store = store
        self._pages = pages
        self._names = names
        self._calls = calls
        self._key = None if key is None else key.pages
        self._suspects: dict[str, None] = {}
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

    def exists(self, key: str) -> bool:
        """Tell whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many of the pages, from the first on, are stored."""
        labels = self._labels(keys)
        if not labels:
            return 0
        names = [label.name for label in labels]
        found = self._calls.call(lambda: self._store.get().count(names))
        if isinstance(found, CallFault):
            self.counters.fault(found)
            return 0
        return found

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill one of SGLang's flat pages; None if the page is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill SGLang's flat pages up to the first that is not there; after that all are None."""
        found: list[torch.Tensor | None] = [None] * len(keys)
        for index, page in enumerate(self._read(keys)):
            self._pages.fill(target_locations[index], page)
            found[index] = target_locations[index]
        return found

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Put pages into the host pool up to the first that is not there."""
        found = [False] * len(keys)
        for index, page in enumerate(self._read(keys)):
            self._pages.write(self._slot(host_indices, index), page)
            found[index] = True
        return found

    def _read(self, keys: Sequence[str]) -> Iterator[bytearray]:
        """Yield pages until one is missing; SGLang uses none behind it."""
        labels = self._labels(keys)
        begun: deque[Pending[_Read]] = deque()
        began, hits, refused = time.perf_counter(), 0, CallFault.OPEN
        for index in range(len(labels)):
            for label in labels[index + len(begun) : index + _READ_AHEAD]:
                pending = self._calls.start(functools.partial(self._read_object, label))
                if isinstance(pending, CallFault):
                    refused = pending
                    break
                begun.append(pending)
            page = self._finish(begun.popleft()) if begun else refused
            if not isinstance(page, bytearray):
                self._note_missing(labels[index].name, page)
                if isinstance(page, Fault):
                    self._suspect(labels[index + 1 :])
                break
            hits += 1
            yield page
        for pending in begun:
            self._calls.drop(pending)
        self._note_read(hits, time.perf_counter() - began)

    def _finish(self, pending: Pending[_Read]) -> _Read | CallFault:
        return self._calls.finish(pending)

    def _read_object(self, label: PageLabel) -> _Read:
        data = self._store.get().read(label.name)
        return None if data is None else unpack(data, label, self._key)

    def _note_missing(self, name: str, why: Fault | CallFault | None) -> None:
        if why is None:
            self.counters.add("misses")
            return
        self.counters.fault(why)
        if why in (Fault.CORRUPT, Fault.MISMATCH):
            # Or it would stay there: no backend writes over what it has.
            logger.warning("sgl-blend: stored object %s is removed: %s", name, why)
            gone = self._calls.call(lambda: self._store.get().remove(name))
            self.counters.add("removed", int(not isinstance(gone, CallFault)))

    def _suspect(self, labels: Sequence[PageLabel]) -> None:
        """Look at pages once more before they are left as they are: what came before them is faulty."""
        with self._lock:  # SGLang reads in one thread and writes in another
            self._suspects.update(dict.fromkeys(label.name for label in labels))
            while len(self._suspects) > _MOST_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]

    def _is_stored(self, label: PageLabel) -> bool | CallFault:
        """Tell whether a page is stored; one that is under suspicion is read, and removed if faulty."""
        stored = self._calls.call(lambda: self._store.get().count([label.name]) == 1)
        with self._lock:
            is_suspect = label.name in self._suspects
            self._suspects.pop(label.name, None)
        if stored is not True or not is_suspect:
            return stored
        page = self._calls.call(lambda: self._read_object(label))
        if isinstance(page, bytearray | CallFault):
            return True
        self._note_missing(label.name, page)
        return False

    def _note_read(self, hits: int, seconds: float) -> None:
        if not hits:
            return
        num_bytes = hits * self._pages.form.page_bytes
        self.counters.add("hits", hits)
        self.counters.add_moved("read", num_bytes, seconds)
        if self.observe is not None:
            self.observe(num_bytes, seconds)

    # --- writing ---

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one of SGLang's flat pages; return whether it is stored."""
        return self._write(key, lambda: self._pages.canonical(value))

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store SGLang's flat pages up to the first that cannot be stored."""
        return all(map(self.set, keys, values))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Store pages of the host pool up to the first that cannot be stored."""
        stored = [False] * len(keys)
        for index, key in enumerate(keys):
            slot = self._slot(host_indices, index)
            stored[index] = self._write(key, functools.partial(self._pages.read, slot))
            if not stored[index]:
                break
        return stored

    def _write(self, key: str, read: Callable[[], memoryview]) -> bool:
        label = self._names.label(key)
        if label is None:
            self.counters.add("not_stored")
            return False
        began = time.perf_counter()
        stored = self._is_stored(label)
        if stored is True:
            return True
        if stored is False:
            # The page is copied here: after a call that is given up, it may be another's.
            data = pack(read(), label, self._key)
            stored = self._calls.call(lambda: self._store.get().write(label.name, data))
        if isinstance(stored, CallFault):
            self.counters.fault(stored)
        if stored is not True:
            self.counters.add("not_stored")
            return False
        self.counters.add("writes")
        self.counters.add_moved("write", label.format.page_bytes, time.perf_counter() - began)
        return True

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

    def _labels(self, keys: Sequence[str]) -> list[PageLabel]:
        found = [self._names.label(key) for key in keys]
        return [label for label in found if label is not None] if None not in found else []

    def _slot(self, host_indices: torch.Tensor, index: int) -> int:
        return int(host_indices[index * self._pages.form.tokens])

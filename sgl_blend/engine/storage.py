"""Checked storage: what stands between SGLang's HiCache and the backend that an operator configured.

SGLang hands over pages by hash and takes back what a backend gives it: a flipped bit is served, and a
short file kills the thread that reads. Here a backend is put into CheckedPages, or refused.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

from sgl_blend.engine.checked_pages import CheckedPages
from sgl_blend.engine.host_pages import HostPages
from sgl_blend.engine.objects import HiCacheController, PrefetchOperation, Tree
from sgl_blend.engine.storage_backends import (
    FileStore,
    LateStore,
    MooncakeStore,
    ObjectStore,
    probe_mooncake,
)
from sgl_blend.engine.tiers import storage_keys_hold_namespaces
from sgl_blend.engine.versions import targets_since_0_5_21
from sgl_blend.errors import UnsupportedError
from sgl_blend.storage.breaker import Breaker, GuardedCalls
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.storage.names import ObjectNames, Rank, StoreKey, WeightsInUse

logger = logging.getLogger(__name__)

BACKENDS = ("file", "mooncake")
"""Values of --hicache-storage-backend whose objects are checked."""

Create = Callable[[str, Any, Any], Any]
_WEIGHTS = "_sgl_blend_weights"
_ONE_NAME = "sgb1"
"""Stands for the model in SGLang's own keys, so that all servers agree on them."""


def make_storage(
    create: Create,
    backend: str,
    storage_config: Any,
    pool: Any,
    *,
    key: StoreKey | None = None,
    unchecked: bool = False,
    calls: GuardedCalls | None = None,
) -> Any:
    """Make the backend that HiCache is to use; for the hook around create_backend of SGLang's factory.

    SGLang calls that at start, and when an operator attaches a backend (/hicache/storage-backend).

    Args:
        create: SGLang's create_backend.
        backend: Its name.
        storage_config: SGLang's HiCacheStorageConfig.
        pool: The host pool whose pages are stored.
        key: Keys of the operator.
        unchecked: Let backends that are not checked run as they are.
        calls: Makes the calls; by default one with the usual limits.

    Returns:
        A HiCacheStorage. A store that is down does not keep the server from starting.

    Raises:
        UnsupportedError: The backend, the pool or this SGLang cannot be used.
        ConfigError: The backend is not configured as it has to be.
    """
    if not storage_keys_hold_namespaces():
        raise UnsupportedError(
            "--hicache-storage-backend: the storage keys of this SGLang do not hold the tenant"
        )
    if backend not in BACKENDS:
        if unchecked:
            logger.warning("sgl-blend: nothing that %s stores is checked", backend)
            return create(backend, storage_config, pool)
        raise UnsupportedError(
            f"--hicache-storage-backend {backend} is not checked, only {' and '.join(BACKENDS)}; "
            "--blend-store-unchecked lets it run as it is"
        )
    for name, most in (("pp_size", 1), ("attn_cp_size", 1), ("should_split_heads", False)):
        if getattr(storage_config, name) > most:
            raise UnsupportedError(f"--hicache-storage-backend: {name} is not supported")
    pages = HostPages(pool)
    rank = Rank(storage_config.tp_rank, storage_config.tp_size)
    store = LateStore(functools.partial(_make_store, create, backend, storage_config, pool, pages))
    made = _storage_class()(
        store,
        pages,
        ObjectNames(pages.form, rank, weights_in_use(pool), key),
        calls or GuardedCalls(Breaker()),
        key,
    )
    made.connect(backend)
    return made


def attach_targets() -> list[str]:
    """Return the method through which HiCache puts a backend behind host memory."""
    return targets_since_0_5_21(
        "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
    )


def use_host_pool(controller: HiCacheController) -> None:
    """Have checked pages move straight between host memory and storage, while somebody wants them.

    SGLang moves pages of some backends so, by name. For the others it makes flat pages first, all of a
    batch at once, and copies between them and host memory. And it reads a batch to its end, however
    long that takes, when nobody needs it any more.
    """
    storage = controller.storage_backend
    if isinstance(storage, CheckedPages):
        controller.page_get_func = functools.partial(_read_pages, storage, controller)
        controller.page_set_func = controller._page_set_zero_copy


def _read_pages(
    storage: CheckedPages,
    controller: HiCacheController,
    operation: PrefetchOperation,
    keys: list[str],
    host_indices: torch.Tensor,
    extra_info: object = None,
) -> int:
    def is_wanted() -> bool:
        return not (operation.is_terminated() or controller.storage_stop_event.is_set())

    return storage.read_pages(keys, host_indices, is_wanted)


def weights_in_use(pool: Any) -> WeightsInUse:
    """Return which weights the KV of a host pool is computed with; nobody knows until it is told."""
    found: WeightsInUse | None = getattr(pool, _WEIGHTS, None)
    if found is None:
        found = WeightsInUse()
        setattr(pool, _WEIGHTS, found)
    return found


def name_stored_weights(
    tree: Tree, weights: str | None, identity: str, levels: StoredLevels | None = None
) -> None:
    """Say which weights a tree's KV is of from now on; None: nobody knows yet.

    Args:
        tree: With or without storage, which an operator may attach later.
        weights: Digest of this rank's weights.
        identity: A text that differs where the same weights give KV another meaning.
        levels: At which chunks are stored; None: nothing is lost.
    """
    if getattr(getattr(tree, "cache_controller", None), "storage_host_pool", None) is not None:
        if levels is not None:
            levels.prepare(HostPages(tree.cache_controller.storage_host_pool).form)
        rotary = sha256(identity.encode()).hexdigest()[:16]
        stored_weights(tree).renew(weights, rotary, levels)


def stored_weights(tree: Tree) -> WeightsInUse:
    """Return which weights a tree stores KV of, for storage that is there or will be attached."""
    return weights_in_use(tree.cache_controller.storage_host_pool)


def storage_of(tree: Tree) -> CheckedPages | None:
    """Return the checked storage behind a tree; None without, or if it is not checked."""
    found = getattr(getattr(tree, "cache_controller", None), "storage_backend", None)
    return found if isinstance(found, CheckedPages) else None


def _make_store(
    create: Create, backend: str, storage_config: Any, pool: Any, pages: HostPages
) -> ObjectStore:
    most = pages.form.max_object_bytes
    if backend == "file":
        # The name is in the suffix of SGLang's keys, and its evictor counts files of that suffix.
        named = dataclasses.replace(storage_config, model_name=_ONE_NAME)
        return FileStore(create(backend, named, pool), most)
    named = dataclasses.replace(storage_config, model_name=None)
    probe_mooncake(named)
    return MooncakeStore(create(backend, named, pool), most)


@functools.cache
def _storage_class() -> Callable[..., CheckedPages]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return type("CheckedStorage", (CheckedPages, HiCacheStorage), {})

"""HiCache's storage: KV on its way from there to host memory, and what is written there."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sgl_blend.engine.checked_pages import ReadOrder
from sgl_blend.engine.objects import Handle, Tree
from sgl_blend.engine.storage import storage_of
from sgl_blend.engine.tree import prefix_match, prefix_tokens, tree_key
from sgl_blend.engine.versions import targets_since_0_5_21
from sgl_blend.storage.codec.streams import ChunkStream, RequestStream

_WAIT_S = 0.001
_MOST_WAITS = 3000
"""How long an order waits for what is being written; SGLang answers it "busy" after that."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A path on its way from storage to host memory.

    Attributes:
        name: An id that no other prefetch has, nor any request.
        handle: SGLang's CacheRequestHandle, by which the tree knows it.
        num_tokens: Tokens that were asked for: of them as many come as are stored from the first on.
        chunk: Knows at which level it comes, if chunks are stored at levels.
    """

    name: str
    handle: Handle
    num_tokens: int
    chunk: ChunkStream | None = None


@dataclass(frozen=True, slots=True)
class Coded:
    """A path that may be stored in few bits.

    Attributes:
        stream: Of the request that it is read for.
        salt: The namespace that its objects are named by.
        is_prefix: Whether it is the build prefix. Nobody reads its KV there: it comes at the coarsest.
    """

    stream: RequestStream
    salt: str
    is_prefix: bool


def has_storage(tree: Tree) -> bool:
    """Tell whether there is storage behind host memory now; an operator can attach and detach it."""
    return bool(getattr(tree, "enable_storage", False))


def reads_coded(tree: Tree) -> bool:
    """Tell whether storage may hold chunks in few bits of the weights that are loaded now."""
    storage = storage_of(tree)
    return storage is not None and storage.levels is not None


def prepare_storage(tree: Tree) -> None:
    """Have what names pages compiled now: SGLang does it while the first request waits."""
    if has_storage(tree):
        from sglang.srt.mem_cache.utils import get_hash_str

        get_hash_str(array("q", [0] * tree.page_size), None, page_size=tree.page_size)


def start_prefetch(
    tree: Tree,
    name: str,
    token_ids: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    coded: Coded | None = None,
) -> Prefetch | None:
    """Ask storage for what device and host lack of a path.

    Args:
        tree: SGLang's tree.
        name: An id that no other prefetch has, nor any request.
        token_ids: The path.
        salt: Its namespace.
        extra_key: SGLang's request class.
        coded: If the path may be stored in few bits: for whom it is read, and the namespace that its
            objects are named by. Its own is the one that it comes into.

    Returns:
        The prefetch; None if nothing is to be asked for, or if SGLang reads too much at present.
    """
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    result = prefix_match(tree, tree_key(token_ids, salt=salt, extra_key=extra_key))
    anchor = result.last_host_node
    matched = prefix_tokens(result) + result.host_hit_length
    num_tokens = (len(token_ids) - matched) // tree.page_size * tree.page_size
    # KV that is stored is on the host first, from its beginning on.
    if num_tokens == 0 or not (tree.is_backuped(anchor) or tree.is_root(anchor)):
        return None
    # SGLang asks for no less than 256 tokens. It compares again when it knows how many are stored,
    # so the limit stays low until everything is there; see with_own_limit.
    tree.prefetch_threshold = tree.page_size
    handle = CacheRequestHandle(rid=name, attempt_id=0)
    order, chunk = None, None
    if tree.hicache_storage_pass_prefix_keys:
        order = tree.get_prefix_hash_values(anchor)
    if coded is not None and (storage := storage_of(tree)) is not None:
        asked = tree_key(token_ids[matched : matched + num_tokens], salt=salt, extra_key=extra_key)
        own = _page_hashes(tree, asked, tree.get_last_hash_value(anchor))
        whole = tree_key(
            token_ids, salt=coded.salt, extra_key=extra_key, limit=matched + num_tokens
        )
        names = dict(zip(own, _page_hashes(tree, whole)[-len(own) :], strict=True))
        chunk = ChunkStream(
            coded.stream, len(own), storage.page_bytes, names, coarsest=coded.is_prefix
        )
        order = ReadOrder(order or (), chunk)
    tree.prefetch_from_storage(
        handle,
        anchor,
        token_ids[matched:],
        tree.get_last_hash_value(anchor),
        order,
        matched_prefix_tokens=token_ids[:matched],
        extra_key=extra_key,
        cache_salt=salt or None,
    )
    if tree.has_ongoing_prefetch(handle):
        return Prefetch(name, Handle(handle), num_tokens, chunk)
    _forget(tree, name)
    return None


def _page_hashes(tree: Tree, key: Any, last: str | None = None) -> list[str]:
    """Return SGLang's hashes of the pages of a path, whole ones, which may follow on others."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(key, last, page_size=tree.page_size))


@contextmanager
def with_own_limit(tree: Tree) -> Iterator[None]:
    """Let SGLang ask for a prefix as on a stock server: for no less than its own limit."""
    if not has_storage(tree):
        yield
        return
    lowered = tree.prefetch_threshold
    tree.prefetch_threshold = tree.cache_controller.prefetch_threshold
    try:
        yield
    finally:
        tree.prefetch_threshold = lowered


def is_on_its_way(tree: Tree, prefetch: Prefetch) -> bool:
    """Tell whether a prefetch may still bring something; all ranks are told the same."""
    return bool(tree.has_ongoing_prefetch(prefetch.handle))


def is_being_read(tree: Tree, prefetch: Prefetch) -> bool:
    """Tell whether a prefetch goes on while the scheduler computes; all ranks are told the same.

    Before that SGLang looks up how much is stored. Then the scheduler has to find room for it.
    """
    return tree.ongoing_prefetch[prefetch.handle].host_indices is not None


def tokens_read(tree: Tree, prefetch: Prefetch) -> int:
    """Return how many tokens of a prefetch that is on its way have come to this rank."""
    return int(tree.ongoing_prefetch[prefetch.handle].operation.completed_tokens)


def take_loaded(tree: Tree, prefetch: Prefetch) -> int:
    """Return how many tokens a prefetch that is over has brought; the tree forgets it."""
    loaded = int(tree.pop_prefetch_loaded_tokens(prefetch.handle))
    _forget(tree, prefetch.name)
    _stop(prefetch)
    return loaded


def drop_prefetch(tree: Tree, prefetch: Prefetch) -> None:
    """Give a prefetch up. Host memory that is being read into comes free when the read is over."""
    tree.release_aborted_request(prefetch.handle)
    _stop(prefetch)


def drop_prefetches(tree: Tree) -> None:
    """Give up all that is on its way, also what SGLang itself asked for."""
    for handle in list(tree.ongoing_prefetch if has_storage(tree) else ()):
        tree.release_aborted_request(handle)


def _stop(prefetch: Prefetch) -> None:
    if prefetch.chunk is not None:
        prefetch.chunk.stop()


def _forget(tree: Tree, name: str) -> None:
    """Let SGLang not wait for a request of that name, to ask once more for it."""
    tree.storage_prefetch_retries.cancel(name)


def namespace_of_node(tree: Tree, node: Handle) -> str | None:
    """Return the cache salt of a node."""
    salt: str | None = tree.tree_core.prefetch_anchor_info(node)[1]
    return salt


def expect_chunk_pages(tree: Tree, node: Handle) -> None:
    """Have pages of a chunk coded when they are written, which SGLang is about to order."""
    if (storage := storage_of(tree)) is None or storage.levels is None:
        return
    spec = tree.tree_core.build_storage_backup_spec(node, True)
    if spec is not None:
        storage.will_write(spec.hash_value, len(spec.prefix_keys) * tree.page_size)


def writes_in_flight(tree: Tree) -> frozenset[int]:
    """Return SGLang's numbers of what is being written to storage, or waits to be."""
    return frozenset(tree.ongoing_backup) if has_storage(tree) else frozenset()


def finish_writes(tree: Tree) -> None:
    """Wait a moment for what is being written to storage; SGLang takes no order meanwhile.

    All ranks must come here together. They see the same writes end in the same turn.
    """
    for _ in range(_MOST_WAITS):
        if not writes_in_flight(tree):
            return
        time.sleep(_WAIT_S)
        tree.check_hicache_events()


# --- hooks ---


def prefetch_targets() -> list[str]:
    """Return the method through which the scheduler asks storage for an arriving request."""
    return targets_since_0_5_21("sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache")


def progress_targets() -> list[str]:
    """Return the method through which the scheduler asks whether a request goes on waiting."""
    return targets_since_0_5_21(f"{_TREE}.check_prefetch_progress")


def write_targets() -> list[str]:
    """Return the method through which a node is written to storage."""
    return targets_since_0_5_21(f"{_TREE}.write_backup_storage")


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

"""The radix tree: finding, locking and counting what it stores."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sgl_blend.engine.objects import EvictParams, Handle, PrefillAdder, Scheduler, Tree
from sgl_blend.engine.versions import features

TOKEN_BYTES = array("q").itemsize
"""SGLang keeps token ids as 64-bit integers."""


class TreeMatch(msgspec.Struct, eq=False, gc=False):
    """A stored path: its KV slots and the node it ends at.

    Thousands are made for a prompt. Python's garbage collector need not know of them: they are
    part of no cycle.

    Attributes:
        node: The tree's handle of the last node, to be locked while the slots are read.
        stop: Tokens of the path that are stored.
        start: Tokens at the beginning of the path whose slots are left out.
        known: The slots, or None while nobody asked for them.
        read: Reads the slots of a match from the tree, where they are not known.
    """

    node: Handle
    stop: int
    start: int = 0
    known: torch.Tensor | None = None
    read: Callable[[TreeMatch], torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.stop

    @property
    def slots(self) -> torch.Tensor:
        """int64 [stop - start], device slots of the stored path.

        They are read at the first use, which must come while the path is stored.
        """
        if self.known is None:
            assert self.read is not None, "slots are known or can be read"
            self.known = self.read(self)
        return self.known

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return int64 [stop - start], pool slots of a part of the path."""
        return self.slots[start - self.start : stop - self.start]


@dataclass(frozen=True, slots=True)
class TreeLock:
    """A lock on a node and the receipt its release needs."""

    node: Handle
    receipt: object


def match_prefix(
    tree: Tree,
    token_ids: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    limit: int | None = None,
) -> TreeMatch:
    """Find the longest prefix of token_ids stored on the device in one namespace; it counts as used."""
    result = prefix_match(tree, tree_key(token_ids, salt=salt, extra_key=extra_key, limit=limit))
    node = result.last_device_node
    if features().match_has_slots:
        slots = result.device_indices
        return TreeMatch(node, slots.numel(), known=slots)
    stop = result.device_prefix_len
    return TreeMatch(node, stop, known=tree.path_device_indices(node)[:stop])


def prefix_match(tree: Tree, key: Any) -> Any:
    """Return SGLang's MatchResult for a path; it counts as used."""
    return tree.match_prefix(_match_types()[1](key=key))


def prefix_tokens(result: Any) -> int:
    """Return how many tokens of a match are on the device."""
    if features().match_has_slots:
        return int(result.device_indices.numel())
    return int(result.device_prefix_len)


def tree_key(
    token_ids: array[int], *, salt: str | None, extra_key: str | None, limit: int | None = None
) -> Any:
    """Return SGLang's key of a path in one namespace."""
    key_type = _match_types()[0]
    if features().keys_have_salt:
        return key_type(token_ids, extra_key=extra_key, limit=limit, cache_salt=salt or None)
    return key_type(token_ids, extra_key=salt or None, limit=limit)


@functools.cache
def _match_types() -> tuple[Any, Any]:
    """Import what every match needs once: the two statements would be 8 % of the time to match."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey, MatchPrefixParams


def node_number(found: TreeMatch) -> int:
    """Return a number of the node that a path ends at; no other node ever has it.

    A node that is split keeps its end, and with it its number.
    """
    number = getattr(found.node, "id", found.node)
    assert isinstance(number, int), f"a node of an unknown kind: {found.node!r:.80}"
    return number


def lock_node(tree: Tree, node: Handle) -> TreeLock:
    """Keep a node and its ancestors from being evicted."""
    return TreeLock(node, tree.inc_lock_ref(node).to_dec_params())


def unlock_node(tree: Tree, held: TreeLock) -> None:
    """Give a lock back."""
    tree.dec_lock_ref(held.node, held.receipt)


def pool_use(tree: Tree) -> dict[str, int]:
    """Return how many slots of the KV pool are free, evictable and locked by the tree, and all."""
    allocator = tree.token_to_kv_pool_allocator
    return {
        "capacity": int(allocator.size),
        "free": int(allocator.available_size()),
        "evictable": int(tree.evictable_size()),
        "locked": int(tree.protected_size()),
    }


def free_tokens(tree: Tree) -> int:
    """Return how many slots of a tree's pool hold nothing."""
    return int(tree.token_to_kv_pool_allocator.available_size())


def stored_tokens(tree: Tree) -> int:
    """Return how many tokens a tree holds; locks do not change it."""
    return int(tree.evictable_size() + tree.protected_size())


def locked_tokens(tree: Tree) -> int:
    """Return how many tokens of a tree running requests hold."""
    return int(tree.protected_size())


def evictable_tokens(tree: Tree) -> int:
    """Return how many tokens a tree could evict."""
    return int(tree.evictable_size())


def tree_of(owner: Scheduler | PrefillAdder) -> Tree:
    """Return the tree that a scheduler, or the batch it puts together, reads from."""
    return owner.tree_cache


def tokens_to_evict(params: EvictParams) -> int:
    """Return how many tokens a tree is asked to evict."""
    return params.num_tokens

"""Finding many stored paths that begin alike, without the tree's own match for each.

SGLang's match walks a path from the root, copies its slots and counts as a use. For a prompt of
thousands of chunks that is most of the time to admit it. Here the shared beginning is matched once,
and what lies behind it is read from the tree as it is: nothing is split, no use is counted. Tokens
are compared by the tree itself or in full. Whatever is not a whole number of nodes is left to
SGLang's match, and so is every tree that is not one of the two known ones.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import torch

from sgl_blend.sglang_adapter import TreeMatch, match, tree_key

_FULL = 0
"""SGLang's ComponentType of full attention."""


class Branch(Protocol):
    """The paths behind one stored beginning; valid until something is evicted."""

    head: TreeMatch

    def find(self, tokens: array[int]) -> TreeMatch | None:
        """Return as much of a path as is stored, or None if it is no more than the head.

        Args:
            tokens: The whole path, the head's tokens first.
        """
        ...


def find_branch(
    tree: Any, head: array[int], *, page_size: int, salt: str | None, extra_key: str | None
) -> Branch | None:
    """Return what lies behind a beginning, or None if not all of its pages are stored.

    The beginning counts as used.
    """
    from sglang.srt.mem_cache.radix_cache import RadixCache

    found = match(tree, head, salt=salt, extra_key=extra_key)
    if len(found) != len(head) // page_size * page_size:
        return None
    any_tree = _MatchBranch(tree, found, salt, extra_key)
    core = getattr(tree, "tree_core", None)
    if core is not None and hasattr(core, "match_full_device_prefix"):
        return _CoreBranch(core, any_tree, tree_key(array("q"), salt=salt, extra_key=extra_key))
    if type(tree) is RadixCache:
        probe = tree_key(array("q", [0]), salt=salt, extra_key=extra_key)
        return _NodeBranch(any_tree, page_size, probe)
    return any_tree


class _MatchBranch:
    """Any tree: every path is matched from the root, and counts as used."""

    def __init__(self, tree: Any, head: TreeMatch, salt: str | None, extra_key: str | None) -> None:
        self.head = head
        self._tree = tree
        self._salt = salt
        self._extra_key = extra_key

    def find(self, tokens: array[int]) -> TreeMatch | None:
        found = match(self._tree, tokens, salt=self._salt, extra_key=self._extra_key)
        return found if len(found) > len(self.head) else None


class _CoreBranch:
    """A UnifiedRadixCache whose core, in Python or Rust, has a match that changes nothing."""

    def __init__(self, core: Any, any_tree: _MatchBranch, key: Any) -> None:
        self.head = any_tree.head
        self._any_tree = any_tree
        self._start = len(self.head)
        self._key = key  # one for all paths: to make one takes as long as to match it
        self._match = core.match_full_device_prefix
        self._value_of = core.get_component_device_value
        self._collect = core.collect_full_device_indices

    def find(self, tokens: array[int]) -> TreeMatch | None:
        self._key.token_ids = tokens
        length, node, whole = self._match(self._key)
        if length <= self._start:
            return None
        if length != whole:  # it ends inside a node, which only the tree's own match can split
            return self._any_tree.find(tokens)
        slots = self._value_of(node, _FULL)
        if slots.numel() + self._start != length:  # several nodes
            if not self._start:
                return self._any_tree.find(tokens)
            slots = self._collect(node, self.head.node)
        return TreeMatch(slots, node, self._start)


class _NodeBranch:
    """A RadixCache: nodes are looked up in their parent's children.

    Args:
        any_tree: For what is not a whole number of nodes.
        page_size: Tokens of a page.
        probe: Key of one token; SGLang says how it becomes a key among a node's children.
    """

    def __init__(self, any_tree: _MatchBranch, page_size: int, probe: Any) -> None:
        self.head = any_tree.head
        self._any_tree = any_tree
        self._page_size = page_size
        child_key = probe.child_key(1)
        self._namespace = child_key[0] if isinstance(child_key, tuple) else None

    def find(self, tokens: array[int]) -> TreeMatch | None:
        page_size = self._page_size
        start, end = len(self.head), len(tokens) // page_size * page_size
        node, at = self.head.node, start
        values: list[torch.Tensor] = []
        while at < end:
            first: Any = tokens[at] if page_size == 1 else tuple(tokens[at : at + page_size])
            key = first if self._namespace is None else (self._namespace, first)
            child = node.children.get(key)
            if child is None:
                break
            stop = at + len(child.key)
            if stop > end or child.key.token_ids != tokens[at:stop]:
                return self._any_tree.find(tokens)  # to split a node is the tree's own business
            values.append(child.value)
            node, at = child, stop
        if not values:
            return None
        slots = values[0] if len(values) == 1 else torch.cat(values)
        return TreeMatch(slots, node, start)


def eviction_targets() -> list[str]:
    """Return the methods through which SGLang's trees evict; the first argument but self says what."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    unified = "_evict" if hasattr(UnifiedRadixCache, "_evict") else "evict"
    return [
        f"sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.{unified}",
        "sglang.srt.mem_cache.radix_cache.RadixCache.evict",
    ]


def reset_targets() -> list[str]:
    """Return the methods through which SGLang's trees forget everything."""
    return [
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
        "sglang.srt.mem_cache.radix_cache.RadixCache.reset",
    ]

"""Finding many stored paths that begin alike, without the tree's own match for each.

SGLang's match walks a path from the root, copies its slots and counts as a use. For a prompt of
thousands of chunks that is most of the time to admit it. Here the shared beginning is matched once,
and what lies after it is read from the tree as it is: nothing is split, no use is counted. Tokens
are compared by the tree itself or in full. Whatever is not a whole number of nodes is left to
SGLang's match, and so is every tree that is not a known one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from sgl_blend.engine.objects import Tree
from sgl_blend.engine.tiers import has_host_tier
from sgl_blend.engine.tree import TOKEN_BYTES, TreeMatch, match_prefix, tree_key

_FULL = 0
"""SGLang's ComponentType of full attention."""


class Branch(Protocol):
    """The paths after one stored beginning; valid until something is evicted."""

    def find_all(self, paths: Iterable[bytes]) -> list[TreeMatch | None]:
        """Return as much of each path as is stored, or None if it is no more than the beginning.

        Args:
            paths: int64, the paths after the beginning.
        """
        ...


def find_branch(
    tree: Tree, prefix: bytes, *, page_size: int, salt: str | None, extra_key: str | None
) -> Branch | None:
    """Return what lies after a beginning, or None if not all of its pages are stored.

    The beginning counts as used.

    Args:
        tree: SGLang's tree.
        prefix: int64, the beginning.
        page_size: Tokens of a page.
        salt: Namespace.
        extra_key: SGLang's request class.
    """
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    tokens = array("q", prefix)
    head = match_prefix(tree, tokens, salt=salt, extra_key=extra_key)
    if len(head) != len(tokens) // page_size * page_size:
        return None
    any_tree = _MatchBranch(tree, prefix, len(head), salt, extra_key)
    probe = tree_key(array("q", [0] * page_size), salt=salt, extra_key=extra_key)
    core: Any = getattr(tree, "tree_core", None)
    if type(tree) is RadixCache and not tree.is_eagle:
        return _NodeBranch(any_tree, head, head.node, page_size, probe, _own_value, _the_node)
    if type(core) is UnifiedTreeCore and not core.is_eagle:
        node = core.node_by_id(head.node)
        return _NodeBranch(any_tree, head, node, page_size, probe, _component_value, _node_number)
    if _is_known_rust(core):
        return _RustBranch(core, any_tree, head, tree_key(tokens, salt=salt, extra_key=extra_key))
    return any_tree


def _is_known_rust(core: Any) -> bool:
    """Tell whether a tree's core is Rust and answers what 0.5.21 and 0.5.23 answer."""
    calls = ("match_full_device_prefix", "get_node_key_lengths", "get_component_device_value")
    native = getattr(core, "_binding", None)
    return hasattr(core, "_bindings") and all(hasattr(native, call) for call in calls)


def numbers_its_nodes(tree: Tree) -> bool:
    """Tell whether nodes are known by numbers for good, so that make_check can find them again."""
    return _is_known_rust(getattr(tree, "tree_core", None))


def make_check(tree: Tree) -> Callable[[Sequence[TreeMatch]], list[bool]]:
    """Return a test whether KV is still where a branch found it, whatever was removed since.

    It may say no where it cannot know. In a UnifiedRadixCache nodes have numbers that are never given
    again, not even after a reset, and a node that was split has fewer tokens. So a node of the same
    number and length is the same node. With a host tier evicted nodes stay in the tree, and may come
    back in other slots. So there a node must be on the device, and nobody must have read its slots.
    """
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    core: Any = getattr(tree, "tree_core", None)
    if _is_known_rust(core):
        lengths_of = core._binding.get_node_key_lengths
        if not has_host_tier(tree):
            return lambda found: _check_lengths(lengths_of, found)
        return lambda found: [
            there and one.known is None and not core.is_full_device_evicted(one.node)
            for one, there in zip(found, _check_lengths(lengths_of, found), strict=True)
        ]
    if type(core) is UnifiedTreeCore:
        return lambda found: [_check_value(core.get_component_device_value, one) for one in found]
    return lambda found: [False] * len(found)


_CHECKED_AT_ONCE = 64
"""Nodes whose lengths are asked for in one call, which fails if one of them is gone."""


def _check_lengths(
    lengths_of: Callable[[list[Any]], list[int]], found: Sequence[TreeMatch]
) -> list[bool]:
    checked: list[bool] = []
    for begin in range(0, len(found), _CHECKED_AT_ONCE):
        some = found[begin : begin + _CHECKED_AT_ONCE]
        try:
            lengths = lengths_of([one.node for one in some])
        except KeyError:
            lengths = [_length_of(lengths_of, one.node) for one in some]
        checked += [
            one.stop - one.start == length for one, length in zip(some, lengths, strict=True)
        ]
    return checked


def _length_of(lengths_of: Callable[[list[Any]], list[int]], node: Any) -> int:
    """Return the tokens of a node, -1 if it is gone."""
    try:
        return lengths_of([node])[0]
    except KeyError:
        return -1


def _check_value(value_of: Callable[[Any, int], torch.Tensor | None], found: TreeMatch) -> bool:
    """Tell whether a node has the slots that were found.

    The slots that are remembered keep their memory, so no others can have their address.
    """
    slots = found.slots
    try:
        value = value_of(found.node, _FULL)
    except KeyError:
        return False
    if value is None or value.data_ptr() != slots.data_ptr():
        return False
    return bool(value.numel() == slots.numel())


class _MatchBranch:
    """Any tree: every path is matched from the root, and counts as used."""

    def __init__(
        self, tree: Tree, prefix: bytes, start: int, salt: str | None, extra_key: str | None
    ) -> None:
        self.prefix = prefix
        self._tree = tree
        self._start = start
        self._salt = salt
        self._extra_key = extra_key

    def find_all(self, paths: Iterable[bytes]) -> list[TreeMatch | None]:
        return [self.find(tokens) for tokens in paths]

    def find(self, tokens: bytes) -> TreeMatch | None:
        path = array("q", self.prefix + tokens)
        found = match_prefix(self._tree, path, salt=self._salt, extra_key=self._extra_key)
        return found if len(found) > self._start else None


def _read_slots(rust: Any, head: Any, found: TreeMatch) -> torch.Tensor:
    """Return the slots of a node, or of all nodes from a head on that it was split into.

    It holds nothing of the search that found the node: a match may be remembered for long.
    """
    slots: torch.Tensor = rust.get_component_device_value(found.node, _FULL)
    if slots.numel() == found.stop - found.start:
        return slots
    # The node was split since, and keeps its end.
    whole: torch.Tensor = rust.collect_full_device_indices(found.node, head)
    return whole


class _RustBranch:
    """A UnifiedRadixCache whose core is Rust: it has a match that changes nothing.

    The core is asked directly: SGLang's Python around it takes as long as it does. Slots are read when
    somebody wants them, because a lookup does not.
    """

    def __init__(self, core: Any, any_tree: _MatchBranch, head: TreeMatch, key: Any) -> None:
        self._any_tree = any_tree
        self._head = head
        self._key = key
        self._rust = core._binding
        self._make = core._bindings.MatchParamsBinding

    def find_all(self, paths: Iterable[bytes]) -> list[TreeMatch | None]:
        make, find = self._make, self._rust.match_full_device_prefix
        read = partial(_read_slots, self._rust, self._head.node)
        extra_key, salt = self._key.extra_key, self._key.cache_salt
        paths = list(paths)
        start, path = len(self._head), array("q", self._any_tree.prefix)
        prefix_tokens = len(path)
        # Lists of numbers, because thousands of tuples that live would call Python's garbage collector.
        stops: list[int] = []
        nodes: list[Any] = []
        wholes: list[int] = []
        for tokens in paths:
            del path[prefix_tokens:]
            path.frombytes(tokens)
            stop, node, whole = find(make(key=path, extra_key=extra_key, cache_salt=salt))
            stops.append(stop)
            nodes.append(node)
            wholes.append(whole)
        lengths = self._rust.get_node_key_lengths(nodes)
        found: list[TreeMatch | None] = []
        for tokens, stop, node, whole, length in zip(
            paths, stops, nodes, wholes, lengths, strict=True
        ):
            if stop <= start:
                found.append(None)
            elif stop == whole == start + length:
                found.append(TreeMatch(node, stop, start, None, read))
            else:
                found.append(self._find_pieces(tokens, stop, node, whole))
        return found

    def _find_pieces(self, tokens: bytes, stop: int, node: Any, whole: int) -> TreeMatch | None:
        """Find a path that is not one node after the beginning."""
        start = len(self._head)
        if stop != whole or start == 0:  # only the tree's own match can split a node
            return self._any_tree.find(tokens)
        slots = self._rust.collect_full_device_indices(node, self._head.node)
        return TreeMatch(node, stop, start, slots)


class _NodeBranch:
    """A tree of Python objects: nodes are looked up in their parent's children.

    Args:
        any_tree: For what is not a whole number of nodes.
        head: The beginning.
        node: The node it ends at.
        page_size: Tokens of a page.
        probe: Key of a page; SGLang says how it becomes a key among a node's children.
        value_of: Returns a node's slots, or None if its KV is not on the device.
        handle_of: Returns what the tree's lock takes for a node.
    """

    def __init__(
        self,
        any_tree: _MatchBranch,
        head: TreeMatch,
        node: Any,
        page_size: int,
        probe: Any,
        value_of: Callable[[Any], torch.Tensor | None],
        handle_of: Callable[[Any], Any],
    ) -> None:
        self._any_tree = any_tree
        self._node = node
        self._start = len(head)
        self._page_size = page_size
        self._value_of = value_of
        self._handle_of = handle_of
        self._uncached = any_tree.prefix[self._start * TOKEN_BYTES :]
        child_key = probe.child_key(page_size)
        page: Any = 0 if page_size == 1 else (0,) * page_size
        self._namespace = None if child_key == page else child_key[0]

    def find_all(self, paths: Iterable[bytes]) -> list[TreeMatch | None]:
        return [self._find(tokens) for tokens in paths]

    def _find(self, tokens: bytes) -> TreeMatch | None:
        path, page_size = array("q", self._uncached + tokens), self._page_size
        if page_size > 1:
            del path[len(path) // page_size * page_size :]
        if not path:
            return None
        child = self._child(self._node, path, 0)
        if child is None:
            return None
        value = self._value_of(child)
        if value is not None and value.numel() == len(path) and child.key.token_ids == path:
            start = self._start
            return TreeMatch(self._handle_of(child), start + len(path), start, value)
        return self._walk(path, tokens)

    def _child(self, node: Any, path: array[int], at: int) -> Any:
        page_size = self._page_size
        first: Any = path[at] if page_size == 1 else tuple(path[at : at + page_size])
        return node.children.get(first if self._namespace is None else (self._namespace, first))

    def _walk(self, path: array[int], tokens: bytes) -> TreeMatch | None:
        """Follow a path over several nodes."""
        node, at, values = self._node, 0, []
        while at < len(path):
            child = self._child(node, path, at)
            value = None if child is None else self._value_of(child)
            if value is None:
                break
            stop = at + len(child.key)
            if child.key.token_ids != path[at:stop]:
                return self._any_tree.find(tokens)  # to split a node is the tree's own business
            values.append(value)
            node, at = child, stop
        if not values:
            return None
        start = self._start
        return TreeMatch(self._handle_of(node), start + at, start, torch.cat(values))


def _own_value(node: Any) -> torch.Tensor | None:
    value: torch.Tensor | None = node.value
    return value


def _the_node(node: Any) -> Any:
    return node


def _component_value(node: Any) -> torch.Tensor | None:
    value: torch.Tensor | None = node.component_data[_FULL].value
    return value


def _node_number(node: Any) -> Any:
    return node.id


def eviction_targets() -> list[str]:
    """Return the methods through which SGLang's trees evict; the first argument but self says what."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    unified = "_evict" if hasattr(UnifiedRadixCache, "_evict") else "evict"
    return [f"{_UNIFIED_TREE}.{unified}", *(f"{tree}.evict" for tree in _plain_trees())]


def reset_targets() -> list[str]:
    """Return the methods through which SGLang's trees forget everything."""
    return [f"{tree}.reset" for tree in (_UNIFIED_TREE, *_plain_trees())]


def insert_targets() -> list[str]:
    """Return the methods through which something is stored in SGLang's trees."""
    return [f"{tree}.insert" for tree in (_UNIFIED_TREE, *_plain_trees())]


_UNIFIED_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


def _plain_trees() -> list[str]:
    """Return the other classes of trees; 0.5.17 has one of its own for a host tier."""
    trees = ["sglang.srt.mem_cache.radix_cache.RadixCache"]
    if find_spec("sglang.srt.mem_cache.hiradix_cache") is not None:
        trees.append("sglang.srt.mem_cache.hiradix_cache.HiRadixCache")
    return trees

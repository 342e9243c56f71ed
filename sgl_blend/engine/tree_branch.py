"""Finding many stored paths that begin alike, without the tree's own match for each.

SGLang's match walks a path from the root, copies its slots and counts as a use. For a prompt of
thousands of chunks that is most of the time to admit it. Here the shared beginning is matched once,
and what lies after it is read from the tree as it is: nothing is split, no use is counted. Tokens
are compared by the tree itself or in full. Whatever is not a whole number of nodes is left to
SGLang's match, and so is every tree that is not a known one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from sgl_blend.engine.objects import Tree
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
    if core is not None and hasattr(core, "match_full_device_prefix"):
        return _CoreBranch(core, any_tree, head, tree_key(tokens, salt=salt, extra_key=extra_key))
    return any_tree


def make_check(tree: Tree) -> Callable[[TreeMatch], bool]:
    """Return a test whether KV is still where a branch found it, whatever was removed since.

    It may say no where it cannot know. In a UnifiedRadixCache nodes have numbers that are never given
    again, not even after a reset, and a node that was split has fewer slots. The slots that are
    remembered keep their memory, so no others can have their address.
    """
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    core: Any = getattr(tree, "tree_core", None)
    native = getattr(core, "_binding", None)
    if type(core) is not UnifiedTreeCore and not hasattr(native, "get_component_device_value"):
        return lambda found: False
    value_of = (core if native is None else native).get_component_device_value

    def is_there(found: TreeMatch) -> bool:
        slots = found.slots
        try:
            value = value_of(found.node, _FULL)
        except KeyError:
            return False
        if value is None or value.data_ptr() != slots.data_ptr():
            return False
        return bool(value.numel() == slots.numel())

    return is_there


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


class _CoreBranch:
    """A UnifiedRadixCache whose core is not Python: it has a match that changes nothing."""

    def __init__(self, core: Any, any_tree: _MatchBranch, head: TreeMatch, key: Any) -> None:
        self._any_tree = any_tree
        self._head = head
        self._key = key
        self._core = core

    def find_all(self, paths: Iterable[bytes]) -> list[TreeMatch | None]:
        find, value_of = self._calls()
        start, path = len(self._head), array("q", self._any_tree.prefix)
        prefix_tokens = len(path)
        found: list[TreeMatch | None] = []
        for tokens in paths:
            del path[prefix_tokens:]
            path.frombytes(tokens)
            stop, node, whole = find(path)
            if stop <= start:
                found.append(None)
            elif stop == whole and (slots := value_of(node, _FULL)).numel() + start == stop:
                found.append(TreeMatch(slots, node, stop, start))
            else:
                found.append(self._find_pieces(tokens, stop, node, whole))
        return found

    def _calls(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the core's match of a path that changes nothing, and the slots of a node.

        The Rust core is asked directly if it is where 0.5.21 and 0.5.23 have it: SGLang's Python
        around it takes as long as it does.
        """
        core, key = self._core, self._key
        native = getattr(core, "_binding", None)
        make = getattr(getattr(core, "_bindings", None), "MatchParamsBinding", None)
        if native is None or make is None:

            def match_in_python(path: array[int]) -> Any:
                key.token_ids = path
                return core.match_full_device_prefix(key)

            return match_in_python, core.get_component_device_value
        find, extra_key, salt = native.match_full_device_prefix, key.extra_key, key.cache_salt
        return (
            lambda path: find(make(key=path, extra_key=extra_key, cache_salt=salt)),
            native.get_component_device_value,
        )

    def _find_pieces(self, tokens: bytes, stop: int, node: Any, whole: int) -> TreeMatch | None:
        """Find a path that is not one node after the beginning."""
        start = len(self._head)
        if stop != whole or start == 0:  # only the tree's own match can split a node
            return self._any_tree.find(tokens)
        slots = self._core.collect_full_device_indices(node, self._head.node)
        return TreeMatch(slots, node, stop, start)


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
            return TreeMatch(value, self._handle_of(child), start + len(path), start)
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
        return TreeMatch(torch.cat(values), self._handle_of(node), start + at, start)


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

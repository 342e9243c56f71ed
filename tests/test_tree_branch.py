"""Chunks after a stored beginning: found as SGLang's own match finds them, in each of its trees."""

from __future__ import annotations

from array import array
from dataclasses import fields
from random import Random
from typing import Any

import pytest
import torch

from sgl_blend.engine.tree import lock_node, match_prefix, pool_use, tree_key, unlock_node
from sgl_blend.engine.tree_branch import find_branch, make_check
from sgl_blend.engine.versions import features

pytestmark = pytest.mark.engine

SALT = "sgl-blend:test"
SIZE = 100_000


def _allocator(page_size: int) -> Any:
    from sglang.srt.mem_cache.allocator import (
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )

    rest: Any = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    if page_size == 1:
        return TokenToKVPoolAllocator(SIZE, **rest)
    return PagedTokenToKVPoolAllocator(SIZE, page_size, **rest)


def make_tree(kind: str, page_size: int) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    common: Any = {"req_to_token_pool": None, "page_size": page_size, "disable": False}
    common["token_to_kv_pool_allocator"] = _allocator(page_size)
    if kind == "radix":
        return RadixCache(CacheInitParams(**common))
    known = {field.name for field in fields(CacheInitParams)}
    if "tree_core_backend" in known:
        common["tree_core_backend"] = kind
    elif kind == "rust":
        pytest.skip("this SGLang has no Rust tree")
    return UnifiedRadixCache(CacheInitParams(tree_components=(ComponentType.FULL,), **common))


def insert(tree: Any, path: list[int], page_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    length = len(path) // page_size * page_size
    tokens = array("q", path[:length])
    known = len(match_prefix(tree, tokens, salt=SALT, extra_key=None))
    slots = tree.token_to_kv_pool_allocator.alloc(length)
    key = tree_key(tokens, salt=SALT, extra_key=None)
    tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=known))


@pytest.mark.parametrize("kind", ["radix", "python", "rust"])
def test_a_path_that_ends_in_a_node_as_long_as_its_part_after_the_beginning(kind: str) -> None:
    tree = make_tree(kind, 1)
    prefix, first, second = [1, 2, 3], [4] * 10, [5] * 20
    for path in (prefix + first + second, prefix + first + [6] * 5):
        insert(tree, path, 1)
    head = array("q", prefix).tobytes()
    branch = find_branch(tree, head, page_size=1, salt=SALT, extra_key=None)
    assert branch is not None
    (found,) = branch.find_all([array("q", first + second[:10]).tobytes()])
    want = match_prefix(tree, array("q", prefix + first + second), salt=SALT, extra_key=None)
    assert found is not None
    assert found.slots.tolist() == want.slots[found.start : 23].tolist()


def chunks_of(draw: Random) -> list[list[int]]:
    """Return chunks that begin alike, end early or late, or have nothing in common."""
    base = [[draw.randrange(50) for _ in range(40)] for _ in range(3)]
    found = [*base]
    for chunk in base:
        cut = draw.randrange(1, 40)
        found.append(chunk[:cut] + [draw.randrange(50) for _ in range(draw.randrange(20))])
        found.append(chunk[:cut])
    return found


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("kind", ["radix", "python", "rust"])
def test_a_branch_finds_what_the_trees_own_match_finds(kind: str, page_size: int) -> None:
    draw = Random(f"{kind} {page_size}")
    several, parts, whole = 0, 0, 0
    for _ in range(60):
        tree = make_tree(kind, page_size)
        prefix = [draw.randrange(50) for _ in range(draw.choice((0, 5, 16, 19, 32)))]
        chunks = chunks_of(draw)
        insert(tree, prefix, page_size)
        for chunk in draw.sample(chunks, 5):
            insert(tree, prefix + chunk, page_size)

        branch = find_branch(
            tree, array("q", prefix).tobytes(), page_size=page_size, salt=SALT, extra_key=None
        )

        assert branch is not None
        head = len(prefix) // page_size * page_size
        found = branch.find_all([array("q", chunk).tobytes() for chunk in chunks])
        for chunk, got in zip(chunks, found, strict=True):
            path = array("q", prefix + chunk)
            want = match_prefix(tree, path, salt=SALT, extra_key=None)
            if len(want) == head:
                assert got is None
                continue
            assert got is not None
            assert got.stop == len(got) == len(want)
            assert got.slots.tolist() == want.slots[got.start :].tolist()
            held = lock_node(tree, got.node)
            assert pool_use(tree)["locked"] >= len(want)
            unlock_node(tree, held)
            several += got.start > 0
            parts += len(want) < len(path) // page_size * page_size
            whole += len(want) == len(path)
    assert min(several, parts, whole) > 20, "some kind of path was never tried"


@pytest.mark.parametrize("kind", ["radix", "python", "rust"])
def test_other_namespaces_hold_nothing_of_it(kind: str) -> None:
    tree = make_tree(kind, 1)
    insert(tree, [1, 2, 3, 4, 5], 1)
    prefix = array("q", [1, 2]).tobytes()
    others: list[tuple[str | None, str | None]] = [("sgl-blend:other", None), (None, None)]
    if features().keys_have_salt:  # before that one name holds both
        others.append((SALT, "other"))
    for salt, extra_key in others:
        assert find_branch(tree, prefix, page_size=1, salt=salt, extra_key=extra_key) is None
        branch = find_branch(tree, b"", page_size=1, salt=salt, extra_key=extra_key)
        assert branch is not None
        assert branch.find_all([array("q", [1, 2, 3, 4, 5]).tobytes()]) == [None]


@pytest.mark.parametrize("kind", ["radix", "python", "rust"])
def test_what_is_still_there_is_told_from_what_is_not(kind: str) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    draw, kept, gone, split = Random(kind), 0, 0, 0
    for number in range(40):
        tree = make_tree(kind, 1)
        are_there = make_check(tree)
        prefix = [draw.randrange(50) for _ in range(9)]
        chunks = [[100 + i, *(draw.randrange(50) for _ in range(20))] for i in range(8)]
        for chunk in chunks:
            insert(tree, prefix + chunk, 1)
        paths = [array("q", chunk).tobytes() for chunk in chunks]
        head = array("q", prefix).tobytes()
        branch = find_branch(tree, head, page_size=1, salt=SALT, extra_key=None)
        assert branch is not None
        found = branch.find_all(paths)
        slots = [None if one is None else one.slots for one in found]  # read before they may go
        assert None not in slots

        if number % 4 == 3:
            tree.reset()
        else:
            tree.evict(EvictParams(num_tokens=draw.randrange(90)))
            cut = draw.randrange(8)
            insert(tree, prefix + chunks[cut][:5] + [99], 1)  # splits it, if it is there
        for chunk in draw.sample(chunks, 3):
            insert(tree, prefix + chunk, 1)  # those that were evicted come back elsewhere

        matches = [one for one in found if one is not None]
        for chunk, before, stays in zip(chunks, matches, are_there(matches), strict=True):
            path = array("q", prefix + chunk)
            now = match_prefix(tree, path, salt=SALT, extra_key=None).slots.tolist()
            is_same = now[before.start :] == before.slots.tolist()
            if stays:
                assert is_same
                kept += 1
            else:
                gone += not is_same
                split += is_same
    assert gone > 100
    if kind == "radix":
        assert kept == 0, "its nodes cannot be told from what took their place"
    else:
        assert kept > 50
        assert split > 0


def test_other_slots_at_the_same_place_are_noticed() -> None:
    tree = make_tree("python", 1)
    are_there = make_check(tree)
    insert(tree, [1, 2], 1)
    insert(tree, [1, 2, 3, 4, 5], 1)
    branch = find_branch(tree, array("q", [1, 2]).tobytes(), page_size=1, salt=SALT, extra_key=None)
    assert branch is not None
    (found,) = branch.find_all([array("q", [3, 4, 5]).tobytes()])
    assert found is not None
    assert are_there([found]) == [True]
    slots = found.slots
    for other in (slots.clone(), slots[:2]):
        tree.tree_core.node_by_id(found.node).component_data[0].value = other
        assert are_there([found]) == [False]

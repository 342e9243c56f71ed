"""In which order a radix tree evicts: by a rank that it keeps per node, then what was used longest ago.

SGLang's trees know such a rank as the priority of a node. A node has the largest rank that anything was
stored with whose path leads through it.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any

from sgl_blend.engine.objects import InsertParams, Tree, TreeSettings
from sgl_blend.engine.tree import TreeMatch, tree_key
from sgl_blend.engine.versions import features

_RANK = "sgl_blend_rank"
"""Attribute of SGLang's InsertParams: the rank is chosen already."""


def let_ranks_decide(settings: TreeSettings) -> None:
    """Let a tree that would evict what was used longest ago look at ranks first."""
    if settings.eviction_policy == "lru":
        settings.eviction_policy = "priority"


def stored_salt(params: InsertParams) -> str | None:
    """Return the namespace in which something is about to be stored."""
    key = params.key
    salt: str | None = key.cache_salt if features().keys_have_salt else key.extra_key
    return salt


def set_rank(params: InsertParams, rank: int) -> None:
    """Give what is about to be stored a rank, unless it has one of ours."""
    params.priority = getattr(params, _RANK, rank)


def keep_off_host(params: InsertParams) -> None:
    """Let what is about to be stored be dropped when it is evicted, and not go to host memory.

    SGLang does so with what a request has stored before, up to a length, or in older versions with
    pieces of a prompt that is still being prefilled.
    """
    if hasattr(params, "inserted_len"):
        params.inserted_len = len(params.key)
    else:
        params.chunked = True


def raise_rank(
    tree: Tree,
    found: TreeMatch,
    tokens: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    rank: int,
) -> None:
    """Give a stored path at least a rank, by storing once more what is there.

    Args:
        tree: SGLang's tree.
        found: The path. It must be stored, with slots from its beginning on.
        tokens: Its tokens, or more.
        salt: Namespace.
        extra_key: SGLang's request class.
        rank: The rank.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams as Params

    given: dict[str, Any] = {
        "key": tree_key(tokens, salt=salt, extra_key=extra_key, limit=len(found)),
        "value": found.slots,
        # So many tokens are the tree's own: their slots are no duplicates to be freed.
        "prev_prefix_len": len(found),
        "chunked": True,
    }
    known = {field.name for field in fields(Params)}
    params = Params(**{name: value for name, value in given.items() if name in known})
    setattr(params, _RANK, rank)
    tree.insert(params)

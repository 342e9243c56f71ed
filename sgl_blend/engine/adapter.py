"""Everything that knows how SGLang spells things: one place to change when SGLang moves.

Here are its features, its radix tree and its requests; forward.py has its models and batches.
Nothing in either decides anything. Types of SGLang are Any to the type checker, so what crosses the
boundary is typed by our own classes.
"""

from __future__ import annotations

import functools
import inspect
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sgl_blend.errors import UnsupportedError

TESTED_VERSIONS = ("0.5.17", "0.5.21", "0.5.23")

TOKEN_BYTES = array("q").itemsize
"""SGLang keeps token ids as 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Features:
    """Which of its spellings an SGLang uses; code paths follow these, never the version.

    Attributes:
        version: For messages only.
        match_has_slots: A tree match names its slots, and a request its prefix slots; otherwise both
            give a length, and slots are read off the path to a node.
        keys_have_salt: A tree key has a cache salt beside the extra key; otherwise the extra key is
            the whole namespace.
        extend_is_range: A request names its prefill step as a range; otherwise by its end.
        kv_has_owner: A request's KV record tells whether it holds slots, and how many of them are
            the tree's; otherwise the request does.
        context_takes_batch: A forward context wants the batch too.
    """

    version: str
    match_has_slots: bool
    keys_have_salt: bool
    extend_is_range: bool
    kv_has_owner: bool
    context_takes_batch: bool


@functools.cache
def features() -> Features:
    """Probe the installed SGLang.

    Raises:
        UnsupportedError: It has none of the spellings that this module knows; the message names
            what is missing.
    """
    import sglang
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        IncLockRefResult,
        MatchResult,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.model_runner import ModelRunner

    has_slots = "device_indices" in MatchResult._fields
    has_lengths = "device_prefix_len" in MatchResult._fields
    key_slots = RadixKey.__slots__
    wanted = {
        "MatchResult.device_indices or .device_prefix_len": has_slots or has_lengths,
        "BasePrefixCache.path_device_indices": has_slots
        or hasattr(BasePrefixCache, "path_device_indices"),
        "IncLockRefResult.to_dec_params": hasattr(IncLockRefResult, "to_dec_params"),
        "RadixKey.extra_key": "extra_key" in key_slots,
        "PrefillAdder.add_chunked_req": hasattr(PrefillAdder, "add_chunked_req"),
        "ModelRunner.forward_split_prefill": hasattr(ModelRunner, "forward_split_prefill"),
        "memory_pool.KVWriteLoc": hasattr(memory_pool, "KVWriteLoc"),
    }
    missing = [name for name, there in wanted.items() if not there]
    if missing:
        raise UnsupportedError(
            f"enable_blend: SGLang {sglang.__version__} has no {', '.join(missing)}; "
            f"supported are {', '.join(TESTED_VERSIONS)}"
        )
    return Features(
        version=sglang.__version__,
        match_has_slots=has_slots,
        keys_have_salt="cache_salt" in key_slots,
        extend_is_range=hasattr(Req, "set_extend_range"),
        kv_has_owner=hasattr(ReqKvInfo, "holds_kv"),
        context_takes_batch="forward_batch"
        in inspect.signature(forward_context.forward_context).parameters,
    )


def check_version(*, allow_untested: bool) -> Features:
    """Probe the installed SGLang and refuse a version that was never tested, unless that is wanted.

    Raises:
        UnsupportedError: The version is not known, or lacks what blending needs.
    """
    found = features()
    if found.version not in TESTED_VERSIONS and not allow_untested:
        raise UnsupportedError(
            f"enable_blend: SGLang {found.version} was not tested; use one of "
            f"{', '.join(TESTED_VERSIONS)}, or add --blend-allow-untested"
        )
    return found


# --- radix tree ---------------------------------------------------------------------------------


class TreeMatch(msgspec.Struct, eq=False, gc=False):
    """A stored path: its KV slots and the node it ends at.

    Thousands are made for a prompt. Python's garbage collector need not know of them: they are
    part of no cycle.

    Attributes:
        slots: int64 [stop - start], device slots of the longest stored prefix of the key.
        node: The tree's handle of the last node, to be locked while the slots are read.
        stop: Tokens of the path that are stored.
        start: Tokens at the beginning of the path whose slots are left out.
    """

    slots: torch.Tensor
    node: Any
    stop: int
    start: int = 0

    def __len__(self) -> int:
        return self.stop


@dataclass(frozen=True, slots=True)
class TreeLock:
    """A lock on a node and the receipt its release needs."""

    node: Any
    receipt: Any


def match(
    tree: Any,
    token_ids: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    limit: int | None = None,
) -> TreeMatch:
    """Find the longest prefix of token_ids stored on the device in one namespace; it counts as used."""
    key = tree_key(token_ids, salt=salt, extra_key=extra_key, limit=limit)
    result = tree.match_prefix(_match_types()[1](key=key))
    node = result.last_device_node
    if features().match_has_slots:
        return TreeMatch(result.device_indices, node, result.device_indices.numel())
    stop = result.device_prefix_len
    return TreeMatch(tree.path_device_indices(node)[:stop], node, stop)


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


def lock(tree: Any, node: Any) -> TreeLock:
    """Keep a node and its ancestors from being evicted."""
    return TreeLock(node, tree.inc_lock_ref(node).to_dec_params())


def unlock(tree: Any, held: TreeLock) -> None:
    """Give a lock back."""
    tree.dec_lock_ref(held.node, held.receipt)


def pool_use(tree: Any) -> dict[str, int]:
    """Return how many slots of the KV pool are free, evictable and locked by the tree, and all."""
    allocator = tree.token_to_kv_pool_allocator
    return {
        "capacity": int(allocator.size),
        "free": int(allocator.available_size()),
        "evictable": int(tree.evictable_size()),
        "locked": int(tree.protected_size()),
    }


def free_tokens(tree: Any) -> int:
    """Return how many slots of a tree's pool hold nothing."""
    return int(tree.token_to_kv_pool_allocator.available_size())


def stored_tokens(tree: Any) -> int:
    """Return how many tokens a tree holds; locks do not change it."""
    return int(tree.evictable_size() + tree.protected_size())


def evictable_tokens(tree: Any) -> int:
    """Return how many tokens a tree could evict."""
    return int(tree.evictable_size())


# --- requests -----------------------------------------------------------------------------------


def client_salt(request: Any) -> str | None:
    """Return the namespace that a client's request names.

    Args:
        request: SGLang's GenerateReqInput or TokenizedGenerateReqInput.
    """
    name = "cache_salt" if features().keys_have_salt else "extra_key"
    salt: str | None = getattr(request, name, None)
    return salt


def set_salt(request: Any, salt: str | None) -> None:
    """Move a TokenizedGenerateReqInput to another namespace."""
    setattr(request, "cache_salt" if features().keys_have_salt else "extra_key", salt)


def request_class(request: Any) -> str | None:
    """Return what sets a TokenizedGenerateReqInput apart from others beside its salt."""
    extra_key: str | None = request.extra_key if features().keys_have_salt else None
    return extra_key


def new_prefill_request(
    rid: str,
    token_ids: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    vocab_size: int,
    priority: int | None,
) -> Any:
    """Make a request that prefills token_ids into a namespace and ends at once."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    sampling.normalize(None)
    namespace = (
        {"extra_key": extra_key, "cache_salt": salt}
        if features().keys_have_salt
        else {"extra_key": salt}
    )
    return Req(
        rid,
        "",
        token_ids,
        sampling,
        vocab_size=vocab_size,
        priority=priority,
        eos_token_ids=set(),
        **namespace,
    )


def continue_verdict() -> Any:
    """Return what tells the scheduler to go on with the next request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def stop_verdict() -> Any:
    """Return what tells the scheduler to close the batch."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def is_out_of_memory(verdict: Any) -> bool:
    """Tell whether a request was refused because the pool cannot hold it."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return bool(verdict == AddReqResult.NO_TOKEN)


def fill_ids(req: Any) -> array[int]:
    """Return prompt and generated tokens, as the scheduler prefills them."""
    tokens: array[int] = req.full_untruncated_fill_ids
    return tokens


def prefix_length(req: Any) -> int:
    """Return how many tokens the radix tree gives the request."""
    return len(req.prefix_indices) if features().match_has_slots else int(req.prefix_len)


def set_prefix(req: Any, found: TreeMatch) -> None:
    """Give a request that is not admitted yet another prefix of the tree."""
    if features().match_has_slots:
        req.prefix_indices = found.slots
    else:
        req.prefix_len = len(found)
    req.last_node = req.last_host_node = req.best_match_node = found.node
    req.host_hit_length = 0
    owner = req.kv if features().kv_has_owner else req
    owner.cache_protected_len = len(found)


def step_range(req: Any) -> tuple[int, int]:
    """Return the positions [start, stop) of the prefill step that was admitted."""
    if features().extend_is_range:
        return req.extend_range.start, req.extend_range.end
    return req.prefix_len, req.extend_end


def holds_kv(req: Any) -> bool:
    """Tell whether a request owns slots of the pool."""
    if features().kv_has_owner:
        return bool(req.kv.holds_kv)
    return req.req_pool_idx is not None


def was_aborted(req: Any) -> bool:
    """Tell whether a finished request was ended from outside."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(req.finished_reason, FINISH_ABORT)


def was_admitted(req: Any, adder: Any) -> bool:
    """Tell whether the request is the last that joined the batch."""
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def refund(adder: Any, num_tokens: int) -> Any:
    """Give compute budget back to a batch that is being put together.

    Nothing is given back once a request of the batch is cut: SGLang cuts one at a time.

    Args:
        adder: SGLang's PrefillAdder.
        num_tokens: Rows that will be computed in too few layers to count.

    Returns:
        SGLang's verdict for the next request.
    """
    if adder.new_chunked_req is None:
        adder.rem_input_tokens += num_tokens
        if adder.rem_chunk_tokens is not None:
            adder.rem_chunk_tokens += num_tokens
    return adder.budget_state()


def is_alone(adder: Any) -> bool:
    """Tell whether nothing else holds memory that could come free: no batch, nothing decoding."""
    running = adder.running_batch
    return not adder.can_run_list and (running is None or running.is_empty())


def fits_whole(req: Any, adder: Any) -> bool:
    """Tell whether what is left of the batch's chunk budget holds the request's whole prefill."""
    left, page = adder.rem_chunk_tokens, adder.page_size
    pages = -(-(len(req.origin_input_ids) - prefix_length(req)) // page)
    return left is None or pages * page <= left


def rank_group() -> Any:
    """Return SGLang's group of tensor-parallel ranks."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()

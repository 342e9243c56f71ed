"""Everything that knows how SGLang spells things: one place to change when SGLang moves.

Nothing here decides anything. Types of SGLang are Any to the type checker, so what crosses this
module's boundary is typed by our own classes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import LayerPools
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.upload import to_device

TESTED_VERSIONS = ("0.5.17", "0.5.21", "0.5.23")


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


@dataclass(frozen=True, slots=True)
class TreeMatch:
    """A stored path: its KV slots and the node it ends at.

    Attributes:
        slots: int64 [num_tokens], device slots of the longest stored prefix of the key.
        node: The tree's handle of the last node, to be locked while the slots are read.
    """

    slots: torch.Tensor
    node: Any

    def __len__(self) -> int:
        return int(self.slots.shape[0])


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
    """Find the longest prefix of token_ids stored on the device in one namespace."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    if features().keys_have_salt:
        key = RadixKey(token_ids, extra_key=extra_key, limit=limit, cache_salt=salt or None)
    else:
        key = RadixKey(token_ids, extra_key=salt or None, limit=limit)
    result = tree.match_prefix(MatchPrefixParams(key=key))
    node = result.last_device_node
    if features().match_has_slots:
        return TreeMatch(result.device_indices, node)
    return TreeMatch(tree.path_device_indices(node)[: result.device_prefix_len], node)


def lock(tree: Any, node: Any) -> TreeLock:
    """Keep a node and its ancestors from being evicted."""
    return TreeLock(node, tree.inc_lock_ref(node).to_dec_params())


def unlock(tree: Any, held: TreeLock) -> None:
    """Give a lock back."""
    tree.dec_lock_ref(held.node, held.receipt)


def eviction_targets() -> list[str]:
    """Return the methods through which SGLang's trees evict; the first argument but self says what."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    unified = "_evict" if hasattr(UnifiedRadixCache, "_evict") else "evict"
    return [
        f"sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.{unified}",
        "sglang.srt.mem_cache.radix_cache.RadixCache.evict",
    ]


def pool_use(tree: Any) -> dict[str, int]:
    """Return how many slots of the KV pool are free, evictable and locked by the tree, and all."""
    allocator = tree.token_to_kv_pool_allocator
    return {
        "capacity": int(allocator.size),
        "free": int(allocator.available_size()),
        "evictable": int(tree.evictable_size()),
        "locked": int(tree.protected_size()),
    }


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
    left = adder.rem_chunk_tokens
    return left is None or len(req.origin_input_ids) - prefix_length(req) <= left


def rank_group() -> Any:
    """Return SGLang's group of tensor-parallel ranks."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()


# --- model and forward --------------------------------------------------------------------------


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers of a causal language model.

    Raises:
        UnsupportedError: The model cannot be run layer by layer.
    """
    kind = type(model).__name__
    if not hasattr(model, "forward_split_prefill"):
        raise UnsupportedError(f"enable_blend: {kind} cannot be run layer by layer in this SGLang")
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not layers:
        raise UnsupportedError(f"enable_blend: {kind} has no decoder layers at model.layers")
    return list(layers)


def linear_modules(layer: Any) -> list[tuple[Any, int]]:
    """Return the linear modules of a decoder layer, each with the width of its input on this rank."""
    from sglang.srt.layers.linear import LinearBase

    return [
        (module, int(getattr(module, "input_size_per_partition", module.input_size)))
        for module in layer.modules()
        if isinstance(module, LinearBase)
    ]


@contextmanager
def forward_with(backend: Any, batch: Any) -> Iterator[None]:
    """Let RadixAttention of this batch's forward call the given backend."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    more = {"forward_batch": batch} if features().context_takes_batch else {}
    with forward_context(ForwardContext(attn_backend=backend), **more):
        yield


def copy_batch(forward_batch: Any) -> Any:
    """Copy a ForwardBatch, so that rows can be taken out without the sampler noticing."""
    batch = copy.copy(forward_batch)
    if batch.forward_mode.is_mixed():
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch.forward_mode = ForwardMode.EXTEND
    batch.split_index = 0
    return batch


def take_rows(batch: Any, rows: torch.Tensor, rows_per_request: list[int]) -> None:
    """Keep only some token rows of a batch, in place.

    Args:
        batch: A ForwardBatch from copy_batch.
        rows: int64, ascending, at least one row of every request.
        rows_per_request: How many of them belong to each request.
    """
    removed = [
        old - new for old, new in zip(batch.extend_seq_lens_cpu, rows_per_request, strict=True)
    ]
    device = batch.input_ids.device
    batch.input_ids, batch.positions, batch.out_cache_loc = compact_rows(
        rows, [batch.input_ids, batch.positions, batch.out_cache_loc]
    )
    batch.extend_seq_lens_cpu = rows_per_request
    batch.extend_seq_lens = to_device(torch.tensor(rows_per_request, dtype=torch.int32), device)
    batch.extend_start_loc = to_device(
        torch.tensor(first_rows(rows_per_request), dtype=torch.int32), device
    )
    batch.extend_num_tokens = sum(rows_per_request)
    _set_num_tokens(batch)
    if batch.extend_logprob_start_lens_cpu is not None:
        # Removed rows lie before every row whose logprob is wanted (BlendPlan.computed_from).
        batch.extend_logprob_start_lens_cpu = [
            max(0, start - gone)
            for start, gone in zip(batch.extend_logprob_start_lens_cpu, removed, strict=True)
        ]


def advance_prefix(batch: Any, tokens: list[int]) -> None:
    """Declare that the first tokens of each request's step are in the pool already, in place."""
    prefix = [old + more for old, more in zip(batch.extend_prefix_lens_cpu, tokens, strict=True)]
    batch.extend_prefix_lens_cpu = prefix
    batch.extend_prefix_lens = to_device(
        torch.tensor(prefix, dtype=torch.int32), batch.input_ids.device
    )


@contextmanager
def residual_rows(layer: Any, kept_rows: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Let a decoder layer's residual follow an attention that returns fewer rows than it got.

    All supported models add the residual in the norm between attention and MLP, wherever they keep
    it until then.

    Args:
        layer: One of decoder_layers.
        kept_rows: Called when the attention has returned: the rows it kept.

    Raises:
        RuntimeError: The layer did not call its norm; its hidden states are of no use.
    """
    met = False

    def follow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal met
        hidden, residual, *more = args
        rows = kept_rows()
        assert hidden.shape[0] == rows.shape[0], "the attention selects"
        met = True
        return (hidden, compact_rows(rows, [residual])[0], *more), kwargs

    handle = layer.post_attention_layernorm.register_forward_pre_hook(follow, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not met:
        raise RuntimeError("sgl-blend: the norm behind attention was not called as a module")


@contextmanager
def entering(module: Any, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run every call of a module inside a context of its own, for the time of a with block."""
    with ExitStack() as calls:

        def enter(*call: Any) -> None:
            calls.enter_context(context())

        def leave(*call: Any) -> None:
            calls.pop_all().close()

        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def take_requests(forward_batch: Any, indices: list[int]) -> Any:
    """Copy a ForwardBatch with only some of its requests."""
    batch = copy.copy(forward_batch)
    lengths = forward_batch.extend_seq_lens_cpu
    starts = first_rows(lengths)
    device = forward_batch.input_ids.device
    row_runs = [torch.arange(starts[i], starts[i] + lengths[i]) for i in indices]
    rows = to_device(torch.cat(row_runs), device)
    chosen = to_device(torch.tensor(indices), device)
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(batch, name, getattr(forward_batch, name).index_select(0, rows))
    for name in (
        "req_pool_indices",
        "seq_lens",
        "orig_seq_lens",
        "extend_seq_lens",
        "extend_prefix_lens",
    ):
        value = getattr(forward_batch, name, None)
        if value is not None:
            setattr(batch, name, value.index_select(0, chosen))
    for name in ("seq_lens_cpu", "req_pool_indices_cpu"):
        value = getattr(forward_batch, name, None)
        if value is not None:
            setattr(batch, name, value[indices])
    for name in (
        "extend_seq_lens_cpu",
        "extend_prefix_lens_cpu",
        "extend_logprob_start_lens_cpu",
        "rids",
        "lora_ids",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "mm_inputs",
    ):
        value = getattr(forward_batch, name, None)
        if value is not None:
            setattr(batch, name, [value[i] for i in indices])
    batch.batch_size = len(indices)
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.extend_start_loc = to_device(
        torch.tensor(first_rows([lengths[i] for i in indices]), dtype=torch.int32), device
    )
    batch.extend_num_tokens = int(rows.shape[0])
    _set_num_tokens(batch)
    return batch


def _set_num_tokens(batch: Any) -> None:
    for name in ("global_num_token_non_padded_cpu", "num_token_non_padded_cpu"):
        if hasattr(batch, name):
            setattr(batch, name, batch.extend_num_tokens)


def join_outputs(outputs: list[tuple[list[int], Any]]) -> Any:
    """Put the outputs of several forwards of one batch back into one.

    Args:
        outputs: Per forward the requests it ran and its ModelRunnerOutput. Only one of them may
            carry input logprobs; building requests have none.
    """
    _, first = max(outputs, key=lambda item: item[1].logits_output.input_token_logprobs is not None)
    rows: dict[int, torch.Tensor] = {}
    for indices, output in outputs:
        logits = output.logits_output.next_token_logits
        rows.update({index: logits[i] for i, index in enumerate(indices)})
    first.logits_output.next_token_logits = torch.stack([rows[i] for i in sorted(rows)])
    first.can_run_graph = False
    return first


def model_output(logits_output: Any) -> Any:
    """Wrap logits as ModelRunner._forward_raw returns them."""
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    return ModelRunnerOutput(logits_output=logits_output, can_run_graph=False)


def layer_pools(runner: Any) -> LayerPools:
    """Return the KV pools of all layers of a model runner."""
    pool = runner.token_to_kv_pool
    numbers = range(len(decoder_layers(runner.model)))
    return LayerPools(
        k=tuple(pool.get_key_buffer(number) for number in numbers),
        v=tuple(pool.get_value_buffer(number) for number in numbers),
    )


def write_kv(pool: Any, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write fresh KV rows of one layer into the pool, as stock backends do."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)


def kv_slots_of_requests(batch: Any, req_to_token: torch.Tensor) -> list[torch.Tensor]:
    """Return each request's pool slots, int64 [seq_len], in token order."""
    lengths = batch.seq_lens_cpu.tolist()
    table = req_to_token[:, : max(lengths)].index_select(0, batch.req_pool_indices)
    return [table[i, :length].to(torch.int64) for i, length in enumerate(lengths)]

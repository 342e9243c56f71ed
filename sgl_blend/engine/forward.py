"""How SGLang spells a model, a batch and its forward; the other half of adapter.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from sgl_blend.engine.adapter import features
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import LayerPools
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.upload import to_device


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


def has_embeddings(batch: Any) -> bool:
    """Tell whether some request of a batch brings embeddings, which a run layer by layer ignores."""
    return batch.input_embeds is not None or batch.replace_embeds is not None


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


@contextmanager
def borrowed_slots(scheduler: Any, lengths: Sequence[int]) -> Iterator[list[torch.Tensor] | None]:
    """Take free slots of the KV pool for the time of a with block.

    Args:
        scheduler: SGLang's, idle.
        lengths: How many tokens each of some requests has.

    Yields:
        Per length, int64 [length], slots that begin at a page; None if the pool has too few.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    page = scheduler.page_size
    padded = [-(-length // page) * page for length in lengths]
    slots = allocator.alloc(sum(padded)) if allocator.available_size() >= sum(padded) else None
    if slots is None:
        yield None
        return
    try:
        wholes = slots.to(torch.int64).split(padded)
        yield [whole[:length] for whole, length in zip(wholes, lengths, strict=True)]
    finally:
        allocator.free(slots)


@contextmanager
def prefill_batch(scheduler: Any, slots: torch.Tensor) -> Iterator[Any]:
    """Make a ForwardBatch that prefills one prompt of made-up tokens, for the time of a with block.

    SGLang makes its own the same way where it captures graphs: there is no request behind it.

    Args:
        scheduler: SGLang's, idle.
        slots: int64 [num_tokens], where its KV goes.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    runner = scheduler.tp_worker.model_runner
    rows = runner.req_to_token_pool
    number, length, device = rows.free_slots[0], slots.numel(), slots.device

    def of_one(value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.arange(length, device=device) % runner.model_config.vocab_size,
        req_pool_indices=of_one(number, torch.int64),
        seq_lens=of_one(length, torch.int64),
        seq_lens_cpu=torch.tensor([length]),
        seq_lens_sum=length,
        orig_seq_lens=of_one(length, torch.int32),
        out_cache_loc=slots,
        positions=torch.arange(length, device=device),
        extend_num_tokens=length,
        extend_seq_lens=of_one(length, torch.int32),
        extend_prefix_lens=of_one(0, torch.int32),
        extend_start_loc=of_one(0, torch.int32),
        extend_seq_lens_cpu=[length],
        extend_prefix_lens_cpu=[0],
        extend_logprob_start_lens_cpu=[length],
        top_logprobs_nums=[0],
        token_ids_logprobs=[None],
        mm_inputs=[None],
        lora_ids=[None],
        rids=["sgl-blend-trial"],
        spec_algorithm=scheduler.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        is_extend_in_batch=True,
    )
    _set_num_tokens(batch)
    before = rows.req_to_token[number, :length].clone()
    rows.req_to_token[number, :length] = slots.to(rows.req_to_token.dtype)
    try:
        yield batch
    finally:
        rows.req_to_token[number, :length] = before


def write_kv(pool: Any, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write fresh KV rows of one layer into the pool, as stock backends do."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)


def kv_slots_of_requests(batch: Any, req_to_token: torch.Tensor) -> list[torch.Tensor]:
    """Return each request's pool slots, int64 [seq_len], in token order."""
    lengths = batch.seq_lens_cpu.tolist()
    table = req_to_token[:, : max(lengths)].index_select(0, batch.req_pool_indices)
    return [table[i, :length].to(torch.int64) for i, length in enumerate(lengths)]

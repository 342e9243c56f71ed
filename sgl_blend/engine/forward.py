"""One forward: the tensors of its batch, what is taken out of them, and its output."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_blend.engine.adapters import RowFollower, row_follower
from sgl_blend.engine.kv_scales import write_scales
from sgl_blend.engine.objects import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ModelOutput,
    ModelRunner,
)
from sgl_blend.engine.versions import features
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.upload import to_device


def request_ids(batch: ForwardBatch) -> list[str]:
    """Return the ids of a batch's requests."""
    return batch.rids


def step_starts(batch: ForwardBatch) -> list[int]:
    """Return per request how many of its tokens are in the pool before the forward."""
    return batch.extend_prefix_lens_cpu


def step_lengths(batch: ForwardBatch) -> list[int]:
    """Return per request how many rows the forward computes."""
    return batch.extend_seq_lens_cpu


def rows_with_logits(batch: ForwardBatch) -> list[int]:
    """Return per request how many rows, its last ones, the logits are wanted of; at least one."""
    lengths, starts = batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu
    if starts is None:
        return [1] * len(lengths)
    return [max(1, length - start) for length, start in zip(lengths, starts, strict=True)]


def row_positions(batch: ForwardBatch) -> torch.Tensor:
    """Return per row its position in its request, int64 [rows]."""
    return batch.positions


def row_slots(batch: ForwardBatch) -> torch.Tensor:
    """Return per row the slot that its KV goes to, int64 [rows]."""
    return batch.out_cache_loc


def batch_device(batch: ForwardBatch) -> torch.device:
    """Return where a batch's tensors lie."""
    return batch.input_ids.device


def prepare(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Do what SGLang does to a batch before it runs without a graph."""
    runner._prepare_eager_forward_batch(batch)


def run_layers(runner: ModelRunner, batch: ForwardBatch, count: int) -> Any:
    """Run the next layers of a batch; return the logits after the last one."""
    return runner.forward_split_prefill(batch, forward_count=count) if count else None


@contextmanager
def forward_with(backend: object, batch: ForwardBatch) -> Iterator[None]:
    """Let RadixAttention of this batch's forward call the given backend."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    more = {"forward_batch": batch} if features().context_takes_batch else {}
    with forward_context(ForwardContext(attn_backend=backend), **more):
        yield


def copy_batch(forward_batch: ForwardBatch) -> ForwardBatch:
    """Copy a ForwardBatch, so that rows can be taken out without the sampler noticing."""
    batch = copy.copy(forward_batch)
    if batch.forward_mode.is_mixed():
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch.forward_mode = ForwardMode.EXTEND
    batch.split_index = 0
    return batch


def has_embeddings(batch: ForwardBatch) -> bool:
    """Tell whether some request of a batch brings embeddings, which a run layer by layer ignores."""
    if batch.input_embeds is not None or batch.replace_embeds is not None:
        return True
    return any(images is not None for images in batch.mm_inputs or ())


def take_rows(
    batch: ForwardBatch,
    rows: torch.Tensor,
    rows_per_request: list[int],
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    follow_rows: RowFollower | None,
) -> None:
    """Keep only some token rows of a batch, in place.

    Args:
        batch: A ForwardBatch from copy_batch.
        rows: int64, ascending, at least one row of every request.
        rows_per_request: How many of them belong to each request.
        seq_lens: The same, int32 on the device.
        starts: Which of them is the first of each request, int32 on the device.
        follow_rows: The runner's row_follower.
    """
    removed = [
        old - new for old, new in zip(batch.extend_seq_lens_cpu, rows_per_request, strict=True)
    ]
    batch.input_ids, batch.positions, batch.out_cache_loc = compact_rows(
        rows, [batch.input_ids, batch.positions, batch.out_cache_loc]
    )
    batch.extend_seq_lens_cpu = rows_per_request
    batch.extend_seq_lens = seq_lens
    batch.extend_start_loc = starts
    batch.extend_num_tokens = sum(rows_per_request)
    set_num_tokens(batch)
    if batch.extend_logprob_start_lens_cpu is not None:
        # Removed rows lie before every row whose logprob is wanted (BlendPlan.computed_from).
        batch.extend_logprob_start_lens_cpu = [
            max(0, start - gone)
            for start, gone in zip(batch.extend_logprob_start_lens_cpu, removed, strict=True)
        ]
    if follow_rows is not None:
        follow_rows(batch)


def set_prefix(batch: ForwardBatch, tokens: list[int], on_device: torch.Tensor) -> None:
    """Declare how many tokens of each request are in the pool already, in place.

    Args:
        batch: A ForwardBatch from copy_batch.
        tokens: Tokens of each request.
        on_device: The same, int32 on the device.
    """
    batch.extend_prefix_lens_cpu = tokens
    batch.extend_prefix_lens = on_device


def take_requests(
    runner: ModelRunner, forward_batch: ForwardBatch, indices: list[int]
) -> ForwardBatch:
    """Copy a ForwardBatch with only some of its requests, which run next."""
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
    set_num_tokens(batch)
    if (follow := row_follower(runner)) is not None:
        follow(batch)
    return batch


def set_num_tokens(batch: ForwardBatch) -> None:
    """Make a batch's other counts of rows agree with its own."""
    for name in ("global_num_token_non_padded_cpu", "num_token_non_padded_cpu"):
        if hasattr(batch, name):
            setattr(batch, name, batch.extend_num_tokens)


def join_outputs(outputs: list[tuple[list[int], ModelOutput]]) -> ModelOutput:
    """Put the outputs of several forwards of one batch back into one.

    Args:
        outputs: Per forward the requests it ran and its ModelRunnerOutput. Only one of them may
            carry input logprobs; building requests have none.
    """
    _, first = max(outputs, key=lambda item: item[1].logits_output.input_token_logprobs is not None)
    rows: dict[int, torch.Tensor] = {}
    for indices, output in outputs:
        logits = output.logits_output.next_token_logits
        dtype = first.logits_output.next_token_logits.dtype
        rows.update({index: logits[i].to(dtype) for i, index in enumerate(indices)})
    first.logits_output.next_token_logits = torch.stack([rows[i] for i in sorted(rows)])
    first.can_run_graph = False
    return first


def model_output(logits_output: Any) -> ModelOutput:
    """Wrap logits as ModelRunner._forward_raw returns them."""
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    output: ModelOutput = ModelRunnerOutput(logits_output=logits_output, can_run_graph=False)
    return output


def empty_output(runner: ModelRunner, batch: ForwardBatch) -> ModelOutput:
    """Return an output for requests of which nobody wants a token: all logits are zero."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    size = (batch.batch_size, int(runner.model_config.vocab_size))
    logits = torch.zeros(size, device=batch_device(batch))
    return model_output(LogitsProcessorOutput(next_token_logits=logits))


def next_token_logits(output: ModelOutput) -> torch.Tensor:
    """Return the logits that first tokens are sampled from, [requests, vocab_size]."""
    logits: torch.Tensor = output.logits_output.next_token_logits
    return logits


def attend(backend: AttentionBackend, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attend as the server itself does; the arguments are those of its backend's forward."""
    return backend.forward(*args, **kwargs)


def write_kv(
    backend: AttentionBackend,
    layer: AttentionLayer,
    batch: ForwardBatch,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write fresh KV of a batch's rows into one layer of the pool, as stock backends do.

    Where the layer has scales, SGLang divides k and v themselves: what they hold afterwards is stored,
    not fresh.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    scales = write_scales(backend, layer)
    place = KVWriteLoc(batch.out_cache_loc, None)
    backend.token_to_kv_pool.set_kv_buffer(layer, place, k, v, *scales)


def kv_lengths(batch: ForwardBatch) -> list[int]:
    """Return per request how many of its tokens are in the pool after the forward."""
    lengths: list[int] = batch.seq_lens_cpu.tolist()
    return lengths


def kv_slots_of_requests(batch: ForwardBatch, backend: AttentionBackend) -> list[torch.Tensor]:
    """Return each request's pool slots, int64 [seq_len], in token order."""
    lengths = kv_lengths(batch)
    req_to_token: torch.Tensor = backend.req_to_token_pool.req_to_token
    table = req_to_token[:, : max(lengths)].index_select(0, batch.req_pool_indices).long()
    return [table[i, :length] for i, length in enumerate(lengths)]


def layer_kv(backend: AttentionBackend, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K and V pool of one layer, each [slots, heads, head_dim]."""
    pool = backend.token_to_kv_pool
    return pool.get_key_buffer(number), pool.get_value_buffer(number)

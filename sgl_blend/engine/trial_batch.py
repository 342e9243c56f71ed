"""A forward that no request stands for, on an idle server: made-up tokens in borrowed slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sgl_blend.engine.adapters import row_follower
from sgl_blend.engine.forward import set_num_tokens
from sgl_blend.engine.models import runner_of
from sgl_blend.engine.objects import ForwardBatch, Scheduler


@contextmanager
def borrowed_slots(
    scheduler: Scheduler, lengths: Sequence[int]
) -> Iterator[list[torch.Tensor] | None]:
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
def prefill_batch(scheduler: Scheduler, slots: torch.Tensor) -> Iterator[ForwardBatch]:
    """Make a ForwardBatch that prefills one prompt of made-up tokens, for the time of a with block.

    SGLang makes its own the same way where it captures graphs: there is no request behind it.

    Args:
        scheduler: SGLang's, idle.
        slots: int64 [num_tokens], where its KV goes.
    """
    rows = runner_of(scheduler).req_to_token_pool
    number, length = rows.free_slots[0], slots.numel()
    positions = torch.arange(length, device=slots.device)
    batch = made_up_batch(scheduler, positions=positions, slots=slots, number=number)
    before = rows.req_to_token[number, :length].clone()
    rows.req_to_token[number, :length] = slots.to(rows.req_to_token.dtype)
    try:
        yield batch
    finally:
        rows.req_to_token[number, :length] = before


def made_up_batch(
    scheduler: Scheduler, *, positions: torch.Tensor, slots: torch.Tensor, number: int
) -> ForwardBatch:
    """Make a ForwardBatch of one request that nobody sent.

    Args:
        scheduler: SGLang's.
        positions: int64 [rows]; the batch keeps this very tensor.
        slots: int64 [rows], where the KV of the rows goes; likewise.
        number: Row of the request in SGLang's table of slots.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardMode,
    )
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch as SGLangBatch

    length, device = slots.numel(), slots.device

    def of_one(value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    vocab_size = runner_of(scheduler).model_config.vocab_size
    batch: ForwardBatch = SGLangBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.arange(length, device=device) % vocab_size,
        req_pool_indices=of_one(number, torch.int64),
        seq_lens=of_one(length, torch.int64),
        seq_lens_cpu=torch.tensor([length]),
        seq_lens_sum=length,
        orig_seq_lens=of_one(length, torch.int32),
        out_cache_loc=slots,
        positions=positions,
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
    set_num_tokens(batch)
    if (follow := row_follower(runner_of(scheduler))) is not None:
        follow(batch)
    return batch

"""A range of layers of a forward, from hidden states that somebody else puts there."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sgl_blend.engine.models import text_model
from sgl_blend.engine.objects import AttentionBackend, ForwardBatch, ModelRunner


def run_range(runner: ModelRunner, batch: ForwardBatch, layers: range) -> None:
    """Run layers of a batch, below the last one; the forward's own timer takes no note of it."""
    text_model(runner).forward_split_prefill(
        batch.input_ids, batch.positions, batch, (layers.start, layers.stop)
    )
    batch.split_index = layers.stop


def between_layers(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a layer has left to the next one: hidden states and residual, each [rows, hidden].

    Since 0.5.21 some models, and since 0.5.23 all, keep the residual in an object that also holds the
    hidden states and what is still owed to them. With tensor parallelism that is their sum over the
    ranks; it is paid here.
    """
    stream: Any = getattr(batch, "residual_stream", None)
    if stream is None:
        return batch.hidden_states, batch.residual
    batch.hidden_states = stream.complete(batch.hidden_states)
    return batch.hidden_states, stream.residual


def put_between_layers(batch: ForwardBatch, hidden: torch.Tensor, residual: torch.Tensor) -> None:
    """Let the next layer find other hidden states and another residual, of as many rows as it likes.

    Args:
        batch: One of whose layers some have run; how a residual is to be added is taken from there.
        hidden: [rows, hidden], as between_layers returns it.
        residual: [rows, hidden], likewise.
    """
    stream: Any = getattr(batch, "residual_stream", None)
    if stream is None:
        batch.hidden_states, batch.residual = hidden, residual
        return
    # Copies: the next layer empties what it takes, and others may hold it too.
    stream = copy.copy(stream)
    stream.pending = copy.copy(stream.pending)
    stream.pending.value, stream.pending.owed, stream.residual = hidden, None, residual
    batch.hidden_states, batch.residual_stream = hidden, stream


def copy_of(batch: ForwardBatch) -> ForwardBatch:
    """Copy a batch with the tensors that it has."""
    return copy.copy(batch)


def finish_range(batch: ForwardBatch, stop: int) -> None:
    """Note that the layers before this one have run."""
    batch.split_index = stop


def slot_table(backend: AttentionBackend) -> torch.Tensor:
    """Return the slots of all requests, int32 [requests, longest]; it stays where it is."""
    table: torch.Tensor = backend.req_to_token_pool.req_to_token
    return table


def table_rows(batch: ForwardBatch) -> torch.Tensor:
    """Return which rows of the slot table a batch's requests have, integers [requests]."""
    return batch.req_pool_indices


def weight_addresses(runner: ModelRunner) -> list[int]:
    """Return where the weights and buffers of the model lie."""
    model: torch.nn.Module = runner.model
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

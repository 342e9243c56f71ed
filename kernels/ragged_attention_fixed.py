"""Attention of scattered queries from buffers that keep their addresses, for graphs that are captured.

What is computed is drawn in ragged_attention.py. A graph is captured once and replayed for batches of
other shapes, so nothing here may depend on a batch but what is in the buffers:

    rows        | request 0 | request 1 | ... | padding |      a fixed number
    requests    how many rows each has, 0 for those that are not there
    slots       read straight from the server's table of all requests, where each has a row of its own

Rows of padding belong to no request. Their result is 0.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_blend.kernels.checks import check_rows, check_tensor
from sgl_blend.kernels.ragged_attention import plan_ragged, ragged_attention
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.upload import upload

MAX_REQUESTS = 16
"""Requests of a batch at most: the smallest block of request_block, so the search in it is cheap."""


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Where the rows of a batch stand and where their KV lies; the tensors stay, their values change.

    Attributes:
        positions: int32 [R], absolute position of every row, ascending within a request.
        bounds: int64 [3, MAX_REQUESTS + 1]: where the rows of each request begin, where its slots begin
            in the table, and how many positions it has (last column of the second and third unused).
            64 bits, because a table of many long requests has more entries than 32 bits count.
        table: int32 [n], the slots of all requests of the server.
    """

    positions: torch.Tensor
    bounds: torch.Tensor
    table: torch.Tensor

    def first(self, num_rows: int) -> "FixedRows":
        """Return the same buffers for fewer rows."""
        return FixedRows(self.positions[:num_rows], self.bounds, self.table)


def write_bounds(
    bounds: torch.Tensor, num_rows: Sequence[int], lengths: Sequence[int], starts: torch.Tensor
) -> None:
    """Describe the requests of a batch, without waiting for the device.

    Args:
        bounds: Of a FixedRows.
        num_rows: Rows of each request, at most MAX_REQUESTS.
        lengths: Positions of each request.
        starts: int64 [requests], where the slots of each begin in the table; on the device.
    """
    absent = MAX_REQUESTS - len(num_rows)
    rows = [*first_rows(num_rows), *[sum(num_rows)] * (absent + 1)]
    zeros = [0] * (MAX_REQUESTS + 1)
    told = [rows, zeros, [*lengths, *[0] * (absent + 1)]]
    bounds.copy_(upload(told, torch.int64, bounds.device))
    bounds[1, : len(num_rows)].copy_(starts)


class FixedKernel(Protocol):
    """A way to attend from fixed buffers.

    Attributes:
        can_be_captured: Whether it asks nothing of the device, so that a graph can hold it.
    """

    can_be_captured: bool

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        rows: FixedRows,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attend in one layer; arguments and result as ragged_attention_fixed."""


class TorchFixed:
    """In plain torch; it reads the bounds."""

    can_be_captured = False

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        rows: FixedRows,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attend in one layer."""
        return ragged_attention_fixed(q, k_pool, v_pool, rows, scale=scale)


def check_fixed(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: FixedRows
) -> None:
    """Raise unless tensors fit each other.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_tensor("positions", rows.positions, shape=(q.shape[0],), dtype=torch.int32)
    check_tensor("bounds", rows.bounds, shape=(3, MAX_REQUESTS + 1), dtype=torch.int64)
    check_tensor("table", rows.table, shape=(None,), dtype=torch.int32)
    check_tensor("k_pool", k_pool, shape=(None, v_pool.shape[1], q.shape[2]))
    for name, tensor in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        check_rows(name, tensor)


def ragged_attention_fixed(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: FixedRows,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend each query to the KV at or before its position; the definition, in torch.

    Args:
        q: [R, num_heads, head_dim], requests one after another, then padding.
        k_pool: [num_slots, num_kv_heads, head_dim], one layer of the paged pool.
        v_pool: [num_slots, num_kv_heads, v_head_dim].
        rows: Positions and slots of the rows.
        scale: Factor on the scores before the softmax.

    Returns:
        [R, num_heads, v_head_dim], q's dtype; of rows that stand in no request 0.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_fixed(q, k_pool, v_pool, rows)
    first, starts, lengths = rows.bounds.tolist()
    counts = [stop - start for start, stop in itertools.pairwise(first)]
    total = first[-1]
    slots = [
        rows.table[start : start + length].long()
        for start, length in zip(starts, lengths[:-1], strict=False)
    ]
    batch = plan_ragged(rows.positions[:total].long(), counts, slots, q.dtype)
    out = q.new_zeros(q.shape[0], q.shape[1], v_pool.shape[-1])
    out[:total] = ragged_attention(q[:total], k_pool, v_pool, batch, scale=scale)
    return out

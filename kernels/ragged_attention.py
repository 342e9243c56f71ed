"""Attention of scattered queries: every row sees all KV up to its own position, itself included.

After selection the rows of a request are no longer neighbours, so neither a suffix mask nor a
bottom-right causal mask is right. Row i, at absolute position p, attends to KV at positions <= p:

    positions 0 1 2 3 4 5 6 7          row at 2:  x x x . . . . .
    kept rows     2     5   7          row at 5:  x x x x x x . .
                                       row at 7:  x x x x x x x x
"""

from dataclasses import dataclass

import torch

_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Where the rows of a batch stand and where the KV they attend to lies.

    Attributes:
        positions: int64 [num_rows], absolute position of every row, ascending within a request.
        num_rows: Rows of each request, known on the host.
        kv_slots: Per request int64 [seq_len], the pool slot of every position, in order.
    """

    positions: torch.Tensor
    num_rows: list[int]
    kv_slots: list[torch.Tensor]


def ragged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend each query to the KV at or before its position.

    Args:
        q: [num_rows, num_heads, head_dim], requests one after another.
        k_pool: [num_slots, num_kv_heads, head_dim], one layer of the paged pool; num_heads is a
            multiple of num_kv_heads.
        v_pool: [num_slots, num_kv_heads, v_head_dim].
        batch: Positions and slots of the rows.
        scale: Factor on the scores before the softmax.

    Returns:
        [num_rows, num_heads, v_head_dim], q's dtype. No row reads KV behind its position: changing
        such KV leaves the row bit-identical, as long as scores stay finite.

    Raises:
        ValueError: The rows of the requests do not add up to the rows of q.
    """
    if sum(batch.num_rows) != q.shape[0]:
        raise ValueError(f"num_rows: expected a sum of {q.shape[0]}, got {sum(batch.num_rows)}")
    outputs = []
    first = 0
    for num_rows, slots in zip(batch.num_rows, batch.kv_slots, strict=True):
        rows = slice(first, first + num_rows)
        first += num_rows
        keys, values = k_pool[slots].to(q.dtype), v_pool[slots].to(q.dtype)
        for start in range(rows.start, rows.stop, _TILE_ROWS):
            tile = slice(start, min(start + _TILE_ROWS, rows.stop))
            outputs.append(_attend(q[tile], keys, values, batch.positions[tile], scale))
    return torch.cat(outputs) if outputs else q.new_empty(0, q.shape[1], v_pool.shape[-1])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    # Rows ascend, so KV behind the last row of the tile is masked for all of them. Reading that
    # bound is free on the host and would stall a GPU, where the mask alone does the work.
    bound = k.shape[0] if q.is_cuda else int(positions[-1]) + 1
    visible = torch.arange(bound, device=q.device)[None, :] <= positions[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[:bound].transpose(0, 1)[None],
        v[:bound].transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)

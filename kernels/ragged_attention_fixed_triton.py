"""Attention from fixed buffers in Triton: the kernels of ragged_attention_triton.py on a fixed grid.

The grid covers the most tiles that so many rows can be cut into; programs beyond the tiles that there
are return at once. Nothing is asked of the device, and nothing is allocated that a graph's own pool
could not hold.
"""

import torch

from sgl_blend.kernels.ragged_attention_fixed import MAX_REQUESTS, FixedRows, check_fixed
from sgl_blend.kernels.ragged_attention_tiles import (
    TileShape,
    choose_splits,
    choose_tile,
    padded_dim,
    request_block,
)
from sgl_blend.kernels.ragged_attention_triton import (
    LOG2_E,
    _merge_splits,
    _ragged_attention,
)

_POSITIONS_PER_ROW = 8
"""How long the text is taken to be to which the rows of a batch attend, when the KV is cut into shares.
The default ratio keeps about every seventh row. With longer texts the result is the same, later."""


class TritonFixed:
    """The FixedKernel of CUDA devices."""

    can_be_captured = True

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
        return ragged_attention_fixed_triton(q, k_pool, v_pool, rows, scale=scale)


def most_tiles(num_rows: int, tile_rows: int) -> int:
    """Return into how many tiles the rows of at most MAX_REQUESTS requests can be cut."""
    requests = min(MAX_REQUESTS, num_rows)
    return requests + (num_rows - requests) // tile_rows


def ragged_attention_fixed_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: FixedRows,
    *,
    scale: float,
    tile: TileShape | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend; arguments and result as ragged_attention_fixed.

    Args:
        q: See there; so are the four after it.
        k_pool: See there.
        v_pool: See there.
        rows: See there.
        scale: See there.
        tile: Other than choose_tile's.
        num_splits: Shares of the KV; None decides by how many programs fill the device.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_fixed(q, k_pool, v_pool, rows)
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, v_head_dim = v_pool.shape
    tile = tile or choose_tile(max(head_dim, v_head_dim), q.dtype)
    group = num_heads // num_kv_heads
    if group * num_kv_heads != num_heads or group > tile.block_m:
        raise ValueError(f"q: {num_heads} heads do not pack over {num_kv_heads} KV heads")
    tile_rows = tile.block_m // group
    programs = -(-num_rows // tile_rows) * num_kv_heads
    splits = num_splits or choose_splits(q.device, programs, _POSITIONS_PER_ROW * num_rows)
    # Nothing else writes the rows of padding, and what is no number there could meet other rows where
    # a quantised layer takes one scale for all.
    out = q.new_zeros(num_rows, num_heads, v_head_dim)
    partial, log_sum = out, q
    if splits > 1:
        partial = q.new_empty(splits, num_rows, num_heads, v_head_dim, dtype=torch.float32)
        log_sum = q.new_empty(splits, num_rows, num_heads, dtype=torch.float32)
    _ragged_attention[(most_tiles(num_rows, tile_rows), num_kv_heads, splits)](
        q, k_pool, v_pool, partial, log_sum, rows.positions, rows.bounds, rows.table,
        MAX_REQUESTS, num_rows, scale * LOG2_E, 1.0,
        q.stride(0), k_pool.stride(0), v_pool.stride(0),
        PAGED=True, SPLIT=splits > 1, GROUP=group, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        BLOCK_D=padded_dim(head_dim), BLOCK_DV=padded_dim(v_head_dim),
        BLOCK_B=request_block(MAX_REQUESTS), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(num_rows * num_heads,)](
            partial, log_sum, out, rows.bounds, MAX_REQUESTS, num_heads, num_rows * num_heads, splits,
            1.0, V_HEAD_DIM=v_head_dim, BLOCK_DV=padded_dim(v_head_dim), num_warps=1,
        )  # fmt: skip
    return out

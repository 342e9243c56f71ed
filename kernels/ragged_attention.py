"""Attention of scattered queries: every row sees all KV up to its own position, itself included.

After selection the rows of a request are no longer neighbours, so neither a suffix mask nor a
bottom-right causal mask is right. Row i, at absolute position p, attends to KV at positions <= p:

    positions 0 1 2 3 4 5 6 7          row at 2:  x x x . . . . .
    kept rows     2     5   7          row at 5:  x x x x x x . .
                                       row at 7:  x x x x x x x x

A RaggedKernel is one way to compute it; ragged_kernel chooses one for a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.kernels.row_partition import first_rows

_CPU_TILE_ROWS = 64
_GPU_TILE_ROWS = 256
_KEPT_MASK_BYTES = 256 << 20


class RaggedKernel(Protocol):
    """A way to compute ragged attention.

    Attributes:
        name: What it is called in settings and reports.
    """

    name: str

    def host_counts(
        self, num_rows: Sequence[int], lengths: Sequence[int]
    ) -> NDArray[np.int32] | None:
        """Return what a plan needs on the device of counts alone; None if it needs nothing there.

        It can be sent long before the plan is made, with other things.

        Args:
            num_rows: Rows of each request.
            lengths: Positions of each request.
        """

    def plan(
        self,
        positions: torch.Tensor,
        num_rows: Sequence[int],
        kv_slots: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        counts: torch.Tensor | None = None,
    ) -> Any:
        """Prepare a batch, once for all layers; arguments as plan_ragged.

        Counts are those of host_counts on the device, or None if the plan is to send them itself.
        """

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        plan: Any,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attend in one layer; arguments and result as ragged_attention, plan from this kernel."""


class TorchRagged:
    """Ragged attention in plain torch, on any device."""

    name = "torch"

    def host_counts(self, num_rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Need nothing; see RaggedKernel."""

    def plan(
        self,
        positions: torch.Tensor,
        num_rows: Sequence[int],
        kv_slots: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        counts: torch.Tensor | None = None,
    ) -> "RaggedBatch":
        """Prepare a batch; see plan_ragged."""
        return plan_ragged(positions, num_rows, kv_slots, dtype)

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        plan: "RaggedBatch",
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attend in one layer; see ragged_attention."""
        return ragged_attention(q, k_pool, v_pool, plan, scale=scale)


def ragged_kernel(device: torch.device) -> RaggedKernel:
    """Return the kernel for a device: Triton's on CUDA, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchRagged()
    from sgl_blend.kernels.ragged_attention_triton import TritonRagged

    return TritonRagged()


@dataclass(frozen=True, slots=True)
class RowTile:
    """Rows of one request that are attended together.

    Attributes:
        rows: Their place in the batch.
        num_visible: No row of the tile sees KV at this position or after it.
        mask: [num rows, num_visible], 0 where a row sees KV and -inf where not.
    """

    rows: slice
    num_visible: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Where the rows of a batch stand and where the KV they attend to lies; the same in all layers.

    Attributes:
        num_rows: Rows of the batch.
        kv_slots: Per request int64 [seq_len], the pool slot of every position, in order.
        tiles: Per request its rows, cut into tiles.
    """

    num_rows: int
    kv_slots: tuple[torch.Tensor, ...]
    tiles: tuple[tuple[RowTile, ...], ...]
    _grouped: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def grouped_mask(self, tile: RowTile, group: int) -> torch.Tensor:
        """Return a tile's mask once for each head of a group, [group * rows, num_visible].

        All layers take the same one, unless the masks of the batch are too large to be kept.
        """
        key = tile.rows.start, group
        if key in self._grouped:
            return self._grouped[key]
        mask = tile.mask.repeat(group, 1)
        size = sum(tile.mask.nbytes for tiles in self.tiles for tile in tiles)
        if group * size <= _KEPT_MASK_BYTES:
            self._grouped[key] = mask
        return mask


def plan_ragged(
    positions: torch.Tensor,
    num_rows: Sequence[int],
    kv_slots: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> RaggedBatch:
    """Prepare a batch for ragged_attention, once for all layers.

    Args:
        positions: int64 [sum(num_rows)], absolute position of every row, requests one after another,
            ascending within a request.
        num_rows: Rows of each request, known on the host.
        kv_slots: Per request int64 [seq_len], the pool slot of every position, in order.
        dtype: Type of the queries.

    Raises:
        ValueError: The rows of the requests do not add up to the positions.
    """
    if sum(num_rows) != positions.shape[0]:
        raise ValueError(f"num_rows: expected a sum of {positions.shape[0]}, got {sum(num_rows)}")
    size = _GPU_TILE_ROWS if positions.is_cuda else _CPU_TILE_ROWS
    tiles = []
    for first, count, slots in zip(first_rows(num_rows), num_rows, kv_slots, strict=True):
        starts = range(first, first + count, size)
        cuts = [slice(start, min(start + size, first + count)) for start in starts]
        tiles.append(tuple(_tile(rows, positions[rows], slots.shape[0], dtype) for rows in cuts))
    return RaggedBatch(positions.shape[0], tuple(kv_slots), tuple(tiles))


def _tile(rows: slice, positions: torch.Tensor, seq_len: int, dtype: torch.dtype) -> RowTile:
    # Rows ascend, so KV after the last row of the tile is masked for all of them. Reading that
    # bound is free on the host and would stall a GPU, where the mask alone does the work.
    num_visible = seq_len if positions.is_cuda else int(positions[-1]) + 1
    hidden = torch.arange(num_visible, device=positions.device)[None, :] > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return RowTile(rows, num_visible, mask.masked_fill_(hidden, float("-inf")))


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
        q: [num_rows, num_heads, head_dim], requests one after another, in the planned dtype.
        k_pool: [num_slots, num_kv_heads, head_dim], one layer of the paged pool; num_heads is a
            multiple of num_kv_heads.
        v_pool: [num_slots, num_kv_heads, v_head_dim].
        batch: Positions and slots of the rows, from plan_ragged.
        scale: Factor on the scores before the softmax.

    Returns:
        [num_rows, num_heads, v_head_dim], q's dtype. No row reads KV after its position: changing
        such KV leaves the row bit-identical, as long as scores stay finite.

    Raises:
        ValueError: The batch was planned for another number of rows.
    """
    if batch.num_rows != q.shape[0]:
        raise ValueError(f"q: expected {batch.num_rows} rows, got {q.shape[0]}")
    num_heads, num_kv_heads = q.shape[1], k_pool.shape[1]
    group = num_heads // num_kv_heads
    out = q.new_empty(q.shape[0], num_heads, v_pool.shape[-1])
    for slots, tiles in zip(batch.kv_slots, batch.tiles, strict=True):
        # [1, num_kv_heads, seq_len, head_dim]
        keys = k_pool.index_select(0, slots).to(q.dtype).transpose(0, 1)[None]
        values = v_pool.index_select(0, slots).to(q.dtype).transpose(0, 1)[None]
        for tile in tiles:
            # The heads that share keys are rows beside each other: few large products are faster.
            own = q[tile.rows].reshape(-1, num_kv_heads, group, q.shape[2]).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(
                own.flatten(1, 2)[None],  # [1, num_kv_heads, group * rows, head_dim]
                keys[:, :, : tile.num_visible],
                values[:, :, : tile.num_visible],
                attn_mask=batch.grouped_mask(tile, group),
                scale=scale,
            )
            each = attended.reshape(num_kv_heads, group, -1, out.shape[2])
            out[tile.rows] = each.permute(2, 0, 1, 3).flatten(1, 2)
    return out

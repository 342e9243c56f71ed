"""The attention backend of one blended forward: wraps the server's own, layer by layer.

Layers up to the check layer run on the server's backend, unchanged, and write fresh KV of every row.
At the check layer the rows to keep are selected. Above it the KV of the dropped rows is copied from
their chunks, and the kept rows, no longer neighbours, attend through ragged_attention.
"""

from dataclasses import dataclass
from typing import Any

import torch

from sgl_blend import sglang_adapter as sglang
from sgl_blend.kernels.delta_rope import copy_rotated, rotate_keys
from sgl_blend.kernels.kv_deviation import kv_deviation
from sgl_blend.kernels.ragged_attention import RaggedBatch, plan_ragged, ragged_attention
from sgl_blend.kernels.row_partition import complement
from sgl_blend.policies import POLICIES, Score


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one request whose KV can be reused.

    Attributes:
        rows: int64 [n], row numbers in the batch, ascending.
        chunk_lengths: Rows of each chunk, in order; they add up to n.
        source_slots: int64 [n], where the stored KV lies.
        cos: float32 [n, rotary_dim / 2], rotation from the stored position to this one.
        sin: float32, same shape.
        num_recomputed: How many rows are selected.
        policy: Name of the policy that selects.
        chosen: int64 [num_recomputed], what it selects if that needs no score; else None.
    """

    rows: torch.Tensor
    chunk_lengths: list[int]
    source_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    num_recomputed: int
    policy: str
    chosen: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """KV copied as it is in every layer: int64 [n] source slots and the slots it goes to."""

    source_slots: torch.Tensor
    dest_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that end at the check layer and where their KV comes from in the layers above."""

    source_slots: torch.Tensor
    dest_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class BlendAttention:
    """Attention backend of one forward; everything it does not define is the wrapped backend's.

    Owned by the thread that runs the forward and thrown away with it. Phases in order: full layers,
    selection (at the check layer), ragged layers (after ``enter_ragged``).
    """

    def __init__(
        self,
        inner: Any,
        *,
        check_layer: int,
        neox: bool,
        head: HeadCopy | None,
        candidates: list[Candidates],
        out_slots: torch.Tensor,
    ) -> None:
        self.inner = inner
        self.kept_rows: torch.Tensor | None = None
        self._check_layer = check_layer
        self._neox = neox
        self._head = head
        self._candidates = candidates
        self._out_slots = out_slots
        self._dropped: Dropped | None = None
        self._ragged: RaggedBatch | None = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names this class does not define: pools, metadata, flags.
        return getattr(self.inner, name)

    def enter_ragged(self, batch: Any) -> None:
        """Prepare the layers above the check layer; batch holds the kept rows only."""
        slots = sglang.kv_slots_of_requests(batch, self.inner.req_to_token_pool.req_to_token)
        self._out_slots = batch.out_cache_loc
        self._ragged = plan_ragged(
            batch.positions, batch.extend_seq_lens_cpu, slots, batch.hidden_states.dtype
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend as the wrapped backend would, or to scattered rows; signature is SGLang's."""
        pool = self.inner.token_to_kv_pool
        layer_id = layer.layer_id
        k_pool, v_pool = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        if self._head is not None:
            k_pool[self._head.dest_slots] = k_pool[self._head.source_slots]
            v_pool[self._head.dest_slots] = v_pool[self._head.source_slots]
        if self._ragged is None:
            out: torch.Tensor = self.inner.forward(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
            if layer_id == self._check_layer and self._candidates:
                self._select(k, v, k_pool, v_pool)
            return out
        assert self._dropped is not None, "ragged layers follow selection"
        copy_rotated(
            k_pool,
            v_pool,
            self._dropped.source_slots,
            self._dropped.dest_slots,
            self._dropped.cos,
            self._dropped.sin,
            neox=self._neox,
        )
        if save_kv_cache:
            sglang.write_kv(pool, layer, self._out_slots, k, v)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        mixed = ragged_attention(heads, k_pool, v_pool, self._ragged, scale=layer.scaling)
        return mixed.reshape(q.shape[0], -1)

    def _select(
        self, k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
    ) -> None:
        parts: list[Dropped] = []
        dropped_rows = []
        for group in self._candidates:
            chosen = group.chosen
            if chosen is None:
                scores = self._score(group, k, v, k_pool, v_pool)
                select = POLICIES[group.policy].select
                chosen = select(scores, group.chunk_lengths, group.num_recomputed)
            dropped = complement(chosen, group.rows.numel())
            rows = group.rows[dropped]
            dropped_rows.append(rows)
            parts.append(
                Dropped(
                    group.source_slots[dropped],
                    self._out_slots[rows],
                    group.cos[dropped],
                    group.sin[dropped],
                )
            )
        self._dropped = Dropped(
            torch.cat([part.source_slots for part in parts]),
            torch.cat([part.dest_slots for part in parts]),
            torch.cat([part.cos for part in parts]),
            torch.cat([part.sin for part in parts]),
        )
        self.kept_rows = complement(torch.cat(dropped_rows), k.shape[0])

    def _score(
        self,
        group: Candidates,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> torch.Tensor:
        if POLICIES[group.policy].score is Score.V:
            return kv_deviation(v[group.rows], v_pool[group.source_slots])
        moved = rotate_keys(k_pool[group.source_slots], group.cos, group.sin, neox=self._neox)
        return kv_deviation(k[group.rows], moved)

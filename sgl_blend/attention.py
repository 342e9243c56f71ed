"""The attention backend of one blended forward: wraps the server's own, layer by layer.

Layers up to the check layer run on the server's backend, unchanged, and write fresh KV of every row.
At the check layer the rows to keep are selected. Above it the KV of the dropped rows is copied from
their chunks, and the kept rows, no longer neighbours, attend through ragged_attention. A gradual
policy selects again in layers above, among the rows that are left.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from sgl_blend import sglang_adapter as sglang
from sgl_blend.kernels.delta_rope import copy_rotated, rotate_keys
from sgl_blend.kernels.kv_deviation import kv_deviation
from sgl_blend.kernels.query_attention import query_attention
from sgl_blend.kernels.ragged_attention import RaggedBatch, plan_ragged, ragged_attention
from sgl_blend.kernels.row_partition import complement
from sgl_blend.policies import POLICIES, Score
from sgl_blend.ranks import Ranks

_MAX_QUESTION_ROWS = 128
"""A query-aware policy asks the last so many rows of a long question."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one request whose KV can be reused and that are still computed.

    Attributes:
        request: Number of the request in the batch.
        rows: int64 [n], row numbers in the batch, ascending.
        positions: int64 [n], positions in the request.
        chunk_lengths: Rows of each chunk, in order; they add up to n.
        source_slots: int64 [n], where the stored KV lies.
        cos: float32 [n, rotary_dim / 2], rotation from the stored position to this one.
        sin: float32, same shape.
        policy: Name of the policy that selects.
        schedule: How many are computed in each layer above the check layer, never rising.
        question: Rows behind the last chunk, before any row was taken out of the batch.
        chosen: int64 [schedule[0]], what the policy selects if that needs no score; else None.
    """

    request: int
    rows: torch.Tensor
    positions: torch.Tensor
    chunk_lengths: list[int]
    source_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    policy: str
    schedule: list[int]
    question: range
    chosen: torch.Tensor | None = None

    def take(self, chosen: torch.Tensor) -> "Candidates":
        """Return only some of the rows; which chunk they are of is not known any more."""
        return replace(
            self,
            rows=self.rows[chosen],
            positions=self.positions[chosen],
            chunk_lengths=[chosen.numel()],
            source_slots=self.source_slots[chosen],
            cos=self.cos[chosen],
            sin=self.sin[chosen],
            chosen=None,
        )


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """KV copied as it is in every layer: int64 [n] source slots and the slots it goes to."""

    source_slots: torch.Tensor
    dest_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that are computed no further and where their KV comes from in the layers above."""

    source_slots: torch.Tensor
    dest_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class _LayerKV:
    """What one layer has just computed, by row, and its part of the pool, by slot."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    scale: float


class BlendAttention:
    """Attention backend of one forward; everything it does not define is the wrapped backend's.

    Owned by the thread that runs the forward and thrown away with it. Phases in order: full layers,
    selection (in the layer that ``select_at`` names), ragged layers (after ``enter_ragged``); the
    last two may come again.
    """

    def __init__(
        self,
        inner: Any,
        *,
        check_layer: int,
        neox: bool,
        head: HeadCopy | None,
        candidates: list[Candidates],
        batch: Any,
        ranks: Ranks,
    ) -> None:
        self.inner = inner
        self._ranks = ranks
        self.kept_rows: torch.Tensor | None = None
        self._check_layer = check_layer
        self._neox = neox
        self._head = head
        self._candidates = candidates
        self._out_slots = batch.out_cache_loc
        self._select_layer: int | None = None
        self._dropped: list[Dropped] = []
        self._ragged: RaggedBatch | None = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names this class does not define: pools, metadata, flags.
        return getattr(self.inner, name)

    def select_at(self, layer_id: int) -> None:
        """Choose, in the layer of this number, which rows the layers above compute."""
        self._select_layer = layer_id

    def enter_ragged(self, batch: Any) -> None:
        """Prepare the layers above the selection; batch holds the kept rows only."""
        slots = sglang.kv_slots_of_requests(batch, self.inner.req_to_token_pool.req_to_token)
        self._out_slots = batch.out_cache_loc
        self._dropped = [
            Dropped(
                torch.cat([part.source_slots for part in self._dropped]),
                torch.cat([part.dest_slots for part in self._dropped]),
                torch.cat([part.cos for part in self._dropped]),
                torch.cat([part.sin for part in self._dropped]),
            )
        ]
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
        else:
            out = self._attend_ragged(q, k, v, layer, k_pool, v_pool, save_kv_cache)
        if layer_id == self._select_layer:
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            fresh = _LayerKV(heads, k, v, k_pool, v_pool, layer.scaling)
            self._select(layer_id, fresh, forward_batch)
        return out

    def _attend_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        assert self._ragged is not None
        for part in self._dropped:
            copy_rotated(
                k_pool,
                v_pool,
                part.source_slots,
                part.dest_slots,
                part.cos,
                part.sin,
                neox=self._neox,
            )
        if save_kv_cache:
            sglang.write_kv(self.inner.token_to_kv_pool, layer, self._out_slots, k, v)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        mixed = ragged_attention(heads, k_pool, v_pool, self._ragged, scale=layer.scaling)
        return mixed.reshape(q.shape[0], -1)

    def _select(self, layer_id: int, fresh: _LayerKV, forward_batch: Any) -> None:
        dropped_rows = []
        survivors = []
        for group in self._candidates:
            budget = group.schedule[layer_id - self._check_layer]
            if budget == group.rows.numel():
                survivors.append(group)
                continue
            chosen = group.chosen
            if chosen is None:
                scores = self._ranks.sum(self._score(group, fresh, forward_batch))
                chosen = POLICIES[group.policy].select(scores, group.chunk_lengths, budget)
            dropped = group.take(complement(chosen, group.rows.numel()))
            dropped_rows.append(dropped.rows)
            self._dropped.append(
                Dropped(
                    dropped.source_slots, self._out_slots[dropped.rows], dropped.cos, dropped.sin
                )
            )
            survivors.append(group.take(chosen))
        num_rows = fresh.k.shape[0]
        self.kept_rows = complement(torch.cat(dropped_rows), num_rows)
        place = torch.empty(num_rows, dtype=torch.int64, device=self.kept_rows.device)
        place[self.kept_rows] = torch.arange(self.kept_rows.numel(), device=place.device)
        self._candidates = [replace(group, rows=place[group.rows]) for group in survivors]

    def _score(self, group: Candidates, fresh: _LayerKV, forward_batch: Any) -> torch.Tensor:
        score = POLICIES[group.policy].score
        if score is Score.V:
            return kv_deviation(fresh.v[group.rows], fresh.v_pool[group.source_slots])
        if score is Score.QUERY:
            return self._query_score(group, fresh, forward_batch)
        assert score is Score.K, f"{score} is known before the forward"
        stored = fresh.k_pool[group.source_slots]
        moved = rotate_keys(stored, group.cos, group.sin, neox=self._neox)
        return kv_deviation(fresh.k[group.rows], moved)

    def _query_score(self, group: Candidates, fresh: _LayerKV, forward_batch: Any) -> torch.Tensor:
        table = self.inner.req_to_token_pool.req_to_token
        slots = sglang.kv_slots_of_requests(forward_batch, table)[group.request]
        rows = group.question[-_MAX_QUESTION_ROWS:]
        attention = query_attention(
            fresh.q[rows.start : rows.stop],
            fresh.k_pool[slots],
            slots.numel() - len(rows),
            scale=fresh.scale,
        )
        return attention[group.positions]

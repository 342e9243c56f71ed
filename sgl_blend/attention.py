"""The attention backend of one blended forward: wraps the server's own, layer by layer.

Layers below the check layer run on the server's backend, unchanged, and write fresh KV of every row.
The check layer writes fresh KV of every row too, but selects before it attends: its attention and MLP,
and all layers above it, run for the kept rows only, which are no neighbours any more and attend
through ragged_attention. A gradual policy selects again in layers above, among the rows that are left.
What the dropped rows would have written lies in the pool already, copied from their chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from sgl_blend import sglang_adapter as sglang
from sgl_blend.kernels.delta_rope import rotate_keys
from sgl_blend.kernels.kv_deviation import kv_deviation
from sgl_blend.kernels.query_attention import query_attention
from sgl_blend.kernels.ragged_attention import RaggedBatch, plan_ragged, ragged_attention
from sgl_blend.kernels.row_partition import complement
from sgl_blend.phases import Phase, phase
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
        question: Rows behind the last chunk, numbered as they are in the batch now.
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

    Owned by the thread that runs the forward and thrown away with it. It takes rows out of the batch
    between writing the KV of a selecting layer and attending in it, so that rows, positions and
    counts of the batch fit the hidden states again when that layer returns.

    Attributes:
        kept_rows: Rows that the last selection kept, numbered as before it.
    """

    def __init__(
        self,
        inner: Any,
        *,
        check_layer: int,
        neox: bool,
        candidates: list[Candidates],
        batch: Any,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        self.inner = inner
        self.kept_rows = torch.empty(0, dtype=torch.int64)
        self._ranks = ranks
        self._check_layer = check_layer
        self._neox = neox
        self._candidates = candidates
        self._batch = batch
        self._dtype = dtype
        self._select_layer: int | None = None
        self._ragged: RaggedBatch | None = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names this class does not define: pools, metadata, flags.
        return getattr(self.inner, name)

    def select_at(self, layer_id: int) -> None:
        """Choose, in the layer of this number, which rows go on."""
        self._select_layer = layer_id

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
        """Attend as the wrapped backend would, or to scattered rows; signature is SGLang's.

        Returns:
            [rows, heads * v_head_dim]; where rows are selected, of the kept rows only.
        """
        layer_id = layer.layer_id
        selects = layer_id == self._select_layer
        if self._ragged is None and not selects:
            out: torch.Tensor = self.inner.forward(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
            return out
        pool = self.inner.token_to_kv_pool
        k_pool, v_pool = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        if save_kv_cache:
            sglang.write_kv(pool, layer, self._batch.out_cache_loc, k, v)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if selects:
            with phase(Phase.SELECTION):
                self._select(layer_id, _LayerKV(heads, k, v, k_pool, v_pool, layer.scaling))
                heads = heads.index_select(0, self.kept_rows)
        assert self._ragged is not None, "planned with the selection"
        mixed = ragged_attention(heads, k_pool, v_pool, self._ragged, scale=layer.scaling)
        return mixed.reshape(heads.shape[0], -1)

    def drop_chosen(self) -> None:
        """Drop rows before the first layer: of requests whose policy needs to see no layer."""
        early = [POLICIES[group.policy].skips_full_layers for group in self._candidates]
        self._keep(
            [
                group.chosen if at_once else None
                for group, at_once in zip(self._candidates, early, strict=True)
            ],
        )

    def _select(self, layer_id: int, fresh: _LayerKV) -> None:
        choices: list[torch.Tensor | None] = []
        for group in self._candidates:
            budget = group.schedule[layer_id - self._check_layer]
            chosen = None
            if budget < group.rows.numel():
                chosen = group.chosen
                if chosen is None:
                    scores = self._ranks.sum(self._score(group, fresh))
                    chosen = POLICIES[group.policy].select(scores, group.chunk_lengths, budget)
            choices.append(chosen)
        self._keep(choices)

    def _keep(self, choices: list[torch.Tensor | None]) -> None:
        """Take rows out of the batch: all candidates of a group that are not chosen; None keeps all."""
        counts = list(self._batch.extend_seq_lens_cpu)
        dropped_rows, left = [], []
        num_dropped = 0  # of this request and those before it, which come first in the batch
        for group, chosen in zip(self._candidates, choices, strict=True):
            if chosen is not None:
                dropped_rows.append(group.rows[complement(chosen, group.rows.numel())])
                counts[group.request] -= group.rows.numel() - chosen.numel()
                num_dropped += group.rows.numel() - chosen.numel()
                group = group.take(chosen)
            first, last = group.question.start - num_dropped, group.question.stop - num_dropped
            left.append(replace(group, question=range(first, last)))
        num_rows = self._batch.positions.shape[0]
        kept = complement(torch.cat(dropped_rows), num_rows)
        place = torch.empty(num_rows, dtype=torch.int64, device=kept.device)
        place[kept] = torch.arange(kept.numel(), device=kept.device)
        self._candidates = [replace(group, rows=place[group.rows]) for group in left]
        self.kept_rows = kept
        sglang.take_rows(self._batch, kept, counts)
        self._ragged = plan_ragged(self._batch.positions, counts, self._kv_slots(), self._dtype)

    def _score(self, group: Candidates, fresh: _LayerKV) -> torch.Tensor:
        score = POLICIES[group.policy].score
        if score is Score.V:
            return kv_deviation(fresh.v[group.rows], fresh.v_pool[group.source_slots])
        if score is Score.QUERY:
            return self._query_score(group, fresh)
        assert score is Score.K, f"{score} is known before the forward"
        stored = fresh.k_pool[group.source_slots]
        moved = rotate_keys(stored, group.cos, group.sin, neox=self._neox)
        return kv_deviation(fresh.k[group.rows], moved)

    def _query_score(self, group: Candidates, fresh: _LayerKV) -> torch.Tensor:
        slots = self._kv_slots()[group.request]
        rows = group.question[-_MAX_QUESTION_ROWS:]
        attention = query_attention(
            fresh.q[rows.start : rows.stop],
            fresh.k_pool[slots],
            slots.numel() - len(rows),
            scale=fresh.scale,
        )
        return attention[group.positions]

    def _kv_slots(self) -> list[torch.Tensor]:
        return sglang.kv_slots_of_requests(self._batch, self.inner.req_to_token_pool.req_to_token)

"""The attention backend of one blended forward: wraps the server's own, layer by layer.

Layers below the check layer run on the server's backend, unchanged, and write fresh KV of every row.
The check layer writes fresh KV of every row too, but selects before it attends: its attention and MLP,
and all layers above it, run for the kept rows only, which are no neighbours any more and attend
through ragged_attention. A gradual policy selects again in layers above, among the rows that are left.
What the dropped rows would have written lies in the pool already, copied from their chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_blend.engine.adapters import RowFollower
from sgl_blend.engine.forward import (
    attend,
    kv_slots_of_requests,
    layer_kv,
    row_positions,
    row_slots,
    take_rows,
    write_kv,
)
from sgl_blend.engine.kv_scales import KVScale, kv_scale, times
from sgl_blend.engine.models import layer_number, softmax_scale, split_heads
from sgl_blend.engine.objects import AttentionBackend, AttentionLayer, ForwardBatch
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.host_plan import Group, LastRows, Reduction, RowCounts
from sgl_blend.fusion.phases import Phase, phase
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.kernels.rounding import Rounding
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.segmented_topk import select_rows
from sgl_blend.policies import POLICIES
from sgl_blend.policies.spec import LayerView, Sees


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of a batch whose KV can be reused and that are still computed, on the device.

    They are those of HostPlan.groups, one group after another.

    Attributes:
        rows: int64 [n], row numbers in the batch, ascending.
        positions: int64 [n], positions in the request.
        source_slots: int64 [n], where the stored KV lies.
        cos: float32 [n, rotary_dim / 2], rotation from the stored position to this one.
        sin: float32, same shape.
        priorities: float32 [n], by which policies select that need no layer for it; None if there is
            no such policy in the batch.
        decided: float32 [n], NaN for rows that go on whatever their priority is, else 0; None if
            there are none.
        rounded: float32 [n], 1 for rows whose stored KV came in few bits, else 0; None if there are
            none.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    source_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    priorities: torch.Tensor | None = None
    decided: torch.Tensor | None = None
    rounded: torch.Tensor | None = None

    def take(self, chosen: torch.Tensor, rows: torch.Tensor) -> "Candidates":
        """Return only some of them, and what their rows are called now."""
        tensors = [self.positions, self.source_slots, self.cos, self.sin]
        positions, source_slots, cos, sin = compact_rows(chosen, tensors)
        marks = (self.priorities, self.decided, self.rounded)
        optional = [tensor for tensor in marks if tensor is not None]
        taken = iter(compact_rows(chosen, optional) if optional else [])
        return Candidates(
            rows,
            positions,
            source_slots,
            cos,
            sin,
            priorities=None if self.priorities is None else next(taken),
            decided=None if self.decided is None else next(taken),
            rounded=None if self.rounded is None else next(taken),
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
    stored: KVScale
    number: int


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
        inner: AttentionBackend,
        *,
        neox: bool,
        candidates: Candidates | None,
        batch: ForwardBatch,
        dtype: torch.dtype,
        tp_group: TPGroup,
        kernel: RaggedKernel,
        before_layer: Callable[[int], None] | None = None,
        follow_rows: RowFollower | None = None,
        half_bins: torch.Tensor | None = None,
    ) -> None:
        self.inner = inner
        self._half_bins = half_bins
        self._before_layer = before_layer
        self._follow_rows = follow_rows
        self.kept_rows = torch.empty(0, dtype=torch.int64)
        self._tp_group = tp_group
        self._neox = neox
        self._candidates = candidates
        self._batch = batch
        self._dtype = dtype
        self._leaves_at: int | None = None
        self._leaving: Reduction | LastRows | None = None
        self._kernel = kernel
        self._plan: object = None
        self._slots: list[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names this class does not define: pools, metadata, flags.
        return getattr(self.inner, name)

    def select_at(self, layer_id: int, reduction: Reduction) -> None:
        """Choose, in the layer of this number, which candidates go on."""
        self._leaves_at, self._leaving = layer_id, reduction

    def keep_last_at(self, layer_id: int, last: LastRows) -> None:
        """Let only rows whose logits are wanted go on in the last layer, which has this number."""
        self._leaves_at, self._leaving = layer_id, last

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend as the wrapped backend would, or to scattered rows; signature is SGLang's.

        Returns:
            [rows, heads * v_head_dim]; where rows are selected, of the kept rows only.
        """
        layer_id = layer_number(layer)
        if self._before_layer is not None:
            self._before_layer(layer_id)
        leaving = self._leaving if layer_id == self._leaves_at else None
        if self._plan is None and leaving is None:
            return attend(self.inner, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        k_pool, v_pool = layer_kv(self.inner, layer_id)
        if save_kv_cache:
            write_kv(self.inner, layer, self._batch, k, v)
        heads, stored = split_heads(q, layer), kv_scale(self.inner, layer)
        scale = softmax_scale(layer) * stored.k
        if leaving is not None:
            with phase(Phase.SELECTION):
                if isinstance(leaving, LastRows):
                    self._keep_last(leaving)
                else:
                    pools = k_pool, v_pool
                    self._select(leaving, _LayerKV(heads, k, v, *pools, scale, stored, layer_id))
                (heads,) = compact_rows(self.kept_rows, [heads])
        mixed = self._kernel.run(heads, k_pool, v_pool, self._plan, scale=scale)
        return times(mixed, stored.v).reshape(heads.shape[0], -1)

    def drop_early(self, reduction: Reduction, scores: torch.Tensor) -> None:
        """Drop rows before the first layer: of requests whose policy needs to see no layer for it.

        Args:
            reduction: What leaves.
            scores: float32 [candidates], by which they are dropped.
        """
        self._reduce(reduction, scores)

    def _select(self, reduction: Reduction, fresh: _LayerKV) -> None:
        self._reduce(reduction, self._priorities(reduction, fresh))

    def _keep_last(self, last: LastRows) -> None:
        """Take the rows out of the batch whose KV was all that is wanted of them."""
        self.kept_rows = last.rows.tensor
        self._take_kept(last.after)

    def _priorities(self, reduction: Reduction, fresh: _LayerKV) -> torch.Tensor:
        """Return the priority of each candidate, float32; a group that keeps all has any."""
        assert self._candidates is not None, "there is something to select from"
        groups = list(zip(reduction.groups, reduction.budgets, reduction.selecting, strict=True))
        scores = self._scores([g for g, _, selects in groups if selects and _is_scored(g)], fresh)
        pieces = []
        for group, budget, selects in groups:
            if not selects:
                pieces.append(fresh.k.new_empty(group.count, dtype=torch.float32))
            elif _is_scored(group):
                policy = POLICIES[group.policy]
                own = policy.prioritise(scores[group.request], group.chunk_lengths, budget)
                pieces.append(own)
            else:
                assert self._candidates.priorities is not None, "they are known before the forward"
                pieces.append(self._candidates.priorities[group.slice])
        priorities = joined(pieces)
        decided = self._candidates.decided
        return priorities if decided is None else priorities + decided

    def _scores(self, groups: Sequence[Group], fresh: _LayerKV) -> dict[int, torch.Tensor]:
        """Measure candidates; return the scores of each group by its request."""
        found = []
        for group in groups:
            score = POLICIES[group.policy].score
            assert score is not None, "it sees a layer"
            found.append(score(self._view(group, fresh)))
        if not found:
            return {}
        total = self._tp_group.sum(joined(found))
        parts = torch.split(total, [group.count for group in groups])
        return {group.request: part for group, part in zip(groups, parts, strict=True)}

    def _reduce(self, reduction: Reduction, scores: torch.Tensor) -> None:
        """Take rows out of the batch; of each group stay as many as its budget, by score."""
        candidates = self._candidates
        assert candidates is not None, "there is something to select from"
        chosen = select_rows(scores, candidates.rows, reduction.segments, reduction.bounds.tensor)
        self.kept_rows = chosen.kept
        if not reduction.is_last:
            self._candidates = candidates.take(chosen.taken, chosen.places)
        self._take_kept(reduction.after)

    def _take_kept(self, after: RowCounts) -> None:
        take_rows(
            self._batch,
            self.kept_rows,
            after.rows,
            after.seq_lens.tensor,
            after.starts.tensor,
            self._follow_rows,
        )
        self._plan = self._kernel.plan(
            row_positions(self._batch),
            after.rows,
            self._kv_slots(),
            self._dtype,
            counts=None if after.attention is None else after.attention.tensor,
        )

    def _view(self, group: Group, fresh: _LayerKV) -> LayerView:
        candidates = self._candidates
        assert candidates is not None, "there is something to look at"
        own = group.slice
        k, v, rows = fresh.k, fresh.v, candidates.rows[own]
        if v.dtype != fresh.v_pool.dtype:  # else the rounding of what is stored would count
            k, v, rows = fresh.k_pool, fresh.v_pool, row_slots(self._batch)[rows]
        return LayerView(
            q=fresh.q,
            k=k,
            v=v,
            k_pool=fresh.k_pool,
            v_pool=fresh.v_pool,
            rows=rows,
            stored_slots=candidates.source_slots[own],
            rotation=(candidates.cos[own], candidates.sin[own], self._neox),
            positions=candidates.positions[own],
            question=group.question,
            own_slots=lambda: self._kv_slots()[group.request],
            scale=fresh.scale,
            k_scale=fresh.stored.k,
            v_scale=fresh.stored.v,
            v_rounding=self._rounding(own, fresh.number),
        )

    def _rounding(self, own: slice, layer: int) -> Rounding | None:
        """Return how far coding may have moved the stored V of candidates; None if it did not."""
        marks = None if self._candidates is None else self._candidates.rounded
        if marks is None or self._half_bins is None:
            return None
        return Rounding(marks[own], self._half_bins[layer])

    def _kv_slots(self) -> list[torch.Tensor]:
        if self._slots is None:  # the same in all layers
            self._slots = kv_slots_of_requests(self._batch, self.inner)
        return self._slots


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor after another; a single one as it is, without a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _is_scored(group: Group) -> bool:
    """Tell whether a group's priorities come from the layer that selects."""
    return POLICIES[group.policy].sees is Sees.LAYER

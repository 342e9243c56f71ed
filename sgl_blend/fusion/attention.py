"""The attention backend of one blended forward: wraps the server's own, layer by layer.

Layers below the check layer run on the server's backend, unchanged, and write fresh KV of every row.
The check layer writes fresh KV of every row too, but selects before it attends: its attention and MLP,
and all layers above it, run for the kept rows only, which are no neighbours any more and attend
through ragged_attention. A gradual policy selects again in layers above, among the rows that are left.
What the dropped rows would have written lies in the pool already, copied from their chunks.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from sgl_blend.engine.forward import (
    attend,
    batch_device,
    kv_slots_of_requests,
    layer_kv,
    row_positions,
    rows_with_logits,
    step_lengths,
    take_rows,
    write_kv,
)
from sgl_blend.engine.models import layer_number, softmax_scale, split_heads
from sgl_blend.engine.objects import AttentionBackend, AttentionLayer, ForwardBatch
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.phases import Phase, phase
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.segmented_topk import segmented_topk
from sgl_blend.kernels.upload import to_device
from sgl_blend.policies import POLICIES
from sgl_blend.policies.spec import LayerView


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
        question: Rows after the last chunk, numbered as they are in the batch now.
        num_early: How many are computed up to the check layer.
        priorities: float32 [n], by which the policy selects if that needs no layer; else None.
        early: float32 [n], by which rows are dropped before the first layer; None if none is.
        decided: bool [n], rows that go on whatever their priority is; None if there are none.
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
    num_early: int
    priorities: torch.Tensor | None = None
    early: torch.Tensor | None = None
    decided: torch.Tensor | None = None

    @property
    def selects_late(self) -> bool:
        """Whether rows that were computed up to the check layer are dropped there or above."""
        return self.schedule[-1] < self.num_early

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
            priorities=None if self.priorities is None else self.priorities[chosen],
            early=None,
            decided=None if self.decided is None else self.decided[chosen],
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
        inner: AttentionBackend,
        *,
        check_layer: int,
        neox: bool,
        candidates: list[Candidates],
        batch: ForwardBatch,
        dtype: torch.dtype,
        tp_group: TPGroup,
        kernel: RaggedKernel,
    ) -> None:
        self.inner = inner
        self.kept_rows = torch.empty(0, dtype=torch.int64)
        self._tp_group = tp_group
        self._check_layer = check_layer
        self._neox = neox
        self._candidates = candidates
        self._batch = batch
        self._dtype = dtype
        self._select_layer: int | None = None
        self._last_layer: int | None = None
        self._kernel = kernel
        self._plan: object = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names this class does not define: pools, metadata, flags.
        return getattr(self.inner, name)

    @property
    def has_dropped(self) -> bool:
        """Whether rows were taken out of the batch, so that it attends through our kernel."""
        return self._plan is not None

    def select_at(self, layer_id: int) -> None:
        """Choose, in the layer of this number, which rows go on."""
        self._select_layer = layer_id

    def keep_last_at(self, layer_id: int) -> None:
        """Let only rows whose logits are wanted go on in the last layer, which has this number."""
        self._last_layer = layer_id

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
        selects = layer_id in (self._select_layer, self._last_layer)
        if self._plan is None and not selects:
            return attend(self.inner, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        k_pool, v_pool = layer_kv(self.inner, layer_id)
        if save_kv_cache:
            write_kv(self.inner, layer, self._batch, k, v)
        heads, scale = split_heads(q, layer), softmax_scale(layer)
        if selects:
            with phase(Phase.SELECTION):
                if layer_id == self._last_layer:
                    self._keep_last()
                else:
                    self._select(layer_id, _LayerKV(heads, k, v, k_pool, v_pool, scale))
                (heads,) = compact_rows(self.kept_rows, [heads])
        mixed = self._kernel.run(heads, k_pool, v_pool, self._plan, scale=scale)
        return mixed.reshape(heads.shape[0], -1)

    def drop_early(self) -> None:
        """Drop rows before the first layer: of requests whose policy needs to see no layer for it."""
        self._reduce(
            [
                (group, group.num_early, group.early)
                for group in self._candidates
                if group.early is not None
            ]
        )

    def _select(self, layer_id: int, fresh: _LayerKV) -> None:
        selecting = []
        for group in self._candidates:
            budget = group.schedule[layer_id - self._check_layer]
            if budget < group.rows.numel():
                priorities = group.priorities
                if priorities is None:
                    priorities = self._prioritise(group, budget, fresh)
                selecting.append((group, budget, priorities))
        self._reduce(selecting)

    def _keep_last(self) -> None:
        """Take the rows out of the batch whose KV was all that is wanted of them."""
        counts, left = step_lengths(self._batch), rows_with_logits(self._batch)
        stops = itertools.accumulate(counts)
        rows = [torch.arange(stop - n, stop) for stop, n in zip(stops, left, strict=True)]
        self.kept_rows = to_device(torch.cat(rows), batch_device(self._batch))
        self._take_kept(left)

    def _prioritise(self, group: Candidates, budget: int, fresh: _LayerKV) -> torch.Tensor:
        policy = POLICIES[group.policy]
        assert policy.score is not None, "its priorities are known before the forward"
        scores = self._tp_group.sum(policy.score(self._view(group, fresh)))
        priorities = policy.prioritise(scores, group.chunk_lengths, budget)
        if group.decided is not None:
            priorities = priorities.masked_fill(group.decided, torch.inf)
        return priorities

    def _reduce(self, selecting: list[tuple[Candidates, int, torch.Tensor]]) -> None:
        """Take rows out of the batch; of each group stay as many as its budget, by priority."""
        selecting = [
            (group, budget, own.nan_to_num(nan=torch.inf, posinf=torch.inf))
            for group, budget, own in selecting
        ]
        counts = list(step_lengths(self._batch))
        left = list(counts)
        # Above infinity, segmented_topk knows nothing but NaN: rows that nobody may drop.
        priorities = torch.full([sum(counts)], torch.nan, device=batch_device(self._batch))
        for group, budget, own in selecting:
            priorities[group.rows] = own
            left[group.request] -= group.rows.numel() - budget
        self.kept_rows, _ = segmented_topk(priorities, counts, left)
        self._candidates = self._renumber(
            selecting, [a - b for a, b in zip(counts, left, strict=True)]
        )
        self._take_kept(left)

    def _take_kept(self, left: list[int]) -> None:
        take_rows(self._batch, self.kept_rows, left)
        self._plan = self._kernel.plan(
            row_positions(self._batch), left, self._kv_slots(), self._dtype
        )

    def _renumber(
        self, selecting: list[tuple[Candidates, int, torch.Tensor]], num_dropped: list[int]
    ) -> list[Candidates]:
        """Return the groups that will select later, with the numbers that their rows have now."""
        chosen = {}
        for group, budget, own in selecting:
            if group.schedule[-1] < budget:
                chosen[group.request] = segmented_topk(own, [len(own)], [budget])[0]
        done = {group.request for group, _, _ in selecting} - set(chosen)
        waiting = [group for group in self._candidates if group.request not in done]
        if not waiting:
            return []
        place = torch.empty(
            row_positions(self._batch).shape[0], dtype=torch.int64, device=self.kept_rows.device
        )
        place[self.kept_rows] = torch.arange(self.kept_rows.numel(), device=place.device)
        groups = []
        for group in waiting:
            taken = chosen.get(group.request)
            stays = group if taken is None else group.take(taken)
            gone = sum(num_dropped[: group.request + 1])
            question = range(group.question.start - gone, group.question.stop - gone)
            groups.append(replace(stays, rows=place[stays.rows], question=question))
        return groups

    def _view(self, group: Candidates, fresh: _LayerKV) -> LayerView:
        return LayerView(
            q=fresh.q,
            k=fresh.k,
            v=fresh.v,
            k_pool=fresh.k_pool,
            v_pool=fresh.v_pool,
            rows=group.rows,
            stored_slots=group.source_slots,
            rotation=(group.cos, group.sin, self._neox),
            positions=group.positions,
            question=group.question,
            own_slots=lambda: self._kv_slots()[group.request],
            scale=fresh.scale,
        )

    def _kv_slots(self) -> list[torch.Tensor]:
        return kv_slots_of_requests(self._batch, self.inner)

"""The fusor: one forward in which some rows take their KV from the cache (CacheBlend §5.3).

    rows of the step        head    | chunks and everything else
    not computed            copied  |
    layers [0, check]               | all rows, stock layers
    selection                       | candidates lose those that deviate least
    layers (check, last]            | kept rows; dropped rows' KV is copied and rotated
                                    | gradual policies: selection again, among the kept rows
    norm, logits                    | stock

Every count is known on the host before the forward; which rows are kept is known to the device only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sgl_blend import sglang_adapter as sglang
from sgl_blend.attention import BlendAttention, Candidates, HeadCopy
from sgl_blend.kernels.kv_deviation import kv_deviation
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.plan import LayerSplit, Window
from sgl_blend.policies import POLICIES, Score
from sgl_blend.ranks import Ranks
from sgl_blend.rope import Rotation


class Fusor:
    """Runs blended forwards on one model runner; holds nothing between two of them.

    Attributes:
        layers: The model's layers and which of them selects.
    """

    def __init__(self, runner: Any, rotation: Rotation, layers: LayerSplit, ranks: Ranks) -> None:
        self.layers = layers
        self._runner = runner
        self._rotation = rotation
        self._ranks = ranks

    def run(self, forward_batch: Any, windows: Sequence[Window | None]) -> Any:
        """Run one extend batch.

        Args:
            forward_batch: SGLang's ForwardBatch in an extend mode; it is not changed.
            windows: Per request what it reuses, None for a plain prefill. Each window spans
                exactly the request's rows in this batch.

        Returns:
            SGLang's ModelRunnerOutput. KV of every row is in the pool.
        """
        runner = self._runner
        runner._prepare_eager_forward_batch(forward_batch)
        batch = sglang.copy_batch(forward_batch)
        head = _take_heads(batch, windows)
        candidates = self._candidates(batch, windows)
        if any(POLICIES[group.policy].score is Score.FULL for group in candidates):
            candidates = self._choose_by_full_prefill(batch, head, candidates)
        backend = self._backend(batch, head, candidates)
        num_rows = list(batch.extend_seq_lens_cpu)
        with sglang.forward_with(backend, batch):
            done = 0
            for layer in _selecting_layers(candidates, self.layers.check):
                backend.select_at(layer)
                runner.forward_split_prefill(batch, forward_count=layer + 1 - done)
                done = layer + 1
                assert backend.kept_rows is not None, "the layer selects"
                sglang.take_hidden_rows(batch, backend.kept_rows)
                kept = _rows_above(layer - self.layers.check, num_rows, candidates)
                sglang.take_rows(batch, backend.kept_rows, kept)
                backend.enter_ragged(batch)
            logits = runner.forward_split_prefill(batch, forward_count=self.layers.total)
        return sglang.model_output(logits)

    def _backend(
        self, batch: Any, head: HeadCopy | None, candidates: list[Candidates]
    ) -> BlendAttention:
        return BlendAttention(
            self._runner.attn_backend,
            check_layer=self.layers.check,
            neox=self._rotation.neox,
            head=head,
            candidates=candidates,
            batch=batch,
            ranks=self._ranks,
        )

    def _choose_by_full_prefill(
        self, batch: Any, head: HeadCopy | None, candidates: list[Candidates]
    ) -> list[Candidates]:
        """Prefill in full first and let oracle policies choose by what it finds."""
        full = sglang.copy_batch(batch)
        with sglang.forward_with(self._backend(full, head, []), full):
            self._runner.forward_split_prefill(full, forward_count=self.layers.total)
        return [
            replace(group, chosen=self._choose_truly_deviating(batch, group))
            if POLICIES[group.policy].score is Score.FULL
            else group
            for group in candidates
        ]

    def _choose_truly_deviating(self, batch: Any, group: Candidates) -> torch.Tensor:
        pool = self._runner.token_to_kv_pool
        true_slots = batch.out_cache_loc[group.rows]
        scores = torch.zeros(group.rows.numel(), device=group.rows.device)
        for layer in range(self.layers.check + 1, self.layers.total):
            v_pool = pool.get_value_buffer(layer)
            deviation = self._ranks.sum(
                kv_deviation(v_pool[true_slots], v_pool[group.source_slots])
            )
            scores += deviation / deviation.mean().clamp(min=1e-30)  # layers differ in scale
        return POLICIES[group.policy].select(scores, group.chunk_lengths, group.schedule[0])

    def _candidates(self, batch: Any, windows: Sequence[Window | None]) -> list[Candidates]:
        """Collect, per request that drops rows, what selection and copying need."""
        device = batch.input_ids.device
        found = []
        first_row = 0
        for request, (length, window) in enumerate(
            zip(batch.extend_seq_lens_cpu, windows, strict=True)
        ):
            if window is not None and window.num_dropped > 0:
                found.append(self._candidates_of(window, request, first_row, device))
            first_row += length
        return found

    def _candidates_of(
        self, window: Window, request: int, first_row: int, device: torch.device
    ) -> Candidates:
        lengths = [len(span) for span in window.spans]
        host = torch.stack(
            [
                torch.cat([_range(span.start, len(span)) for span in window.spans]),
                torch.cat([_range(span.source_start, len(span)) for span in window.spans]),
            ]
        )
        positions, stored = sglang.to_device(host, device)
        cos, sin = self._rotation.between(stored, positions)
        policy = POLICIES[window.policy]
        schedule = window.schedule(self.layers)
        chosen = None
        if policy.score is Score.NOTHING:
            chosen = sglang.to_device(policy.select(None, lengths, schedule[0]), device)
        to_row = first_row - window.head_stop
        return Candidates(
            request=request,
            rows=positions + to_row,
            positions=positions,
            chunk_lengths=lengths,
            source_slots=torch.cat([span.slots for span in window.spans]),
            cos=cos,
            sin=sin,
            policy=window.policy,
            schedule=schedule,
            question=range(window.spans[-1].stop + to_row, window.stop + to_row),
            chosen=chosen,
        )


def _selecting_layers(candidates: list[Candidates], check_layer: int) -> list[int]:
    """Return the layers behind which some request computes fewer rows."""
    layers: set[int] = set()
    for group in candidates:
        before = [group.rows.numel(), *group.schedule]
        layers.update(
            check_layer + index
            for index, (old, new) in enumerate(zip(before, group.schedule, strict=False))
            if new < old
        )
    return sorted(layers)


def _rows_above(index: int, num_rows: list[int], candidates: list[Candidates]) -> list[int]:
    """Return how many rows of each request are computed in the index-th layer above the check."""
    rows = list(num_rows)
    for group in candidates:
        rows[group.request] -= group.rows.numel() - group.schedule[index]
    return rows


def _take_heads(batch: Any, windows: Sequence[Window | None]) -> HeadCopy | None:
    """Remove the rows of exact heads from the batch and say what to copy in their place."""
    lengths = batch.extend_seq_lens_cpu
    heads = [0 if window is None else window.head_stop - window.start for window in windows]
    if not any(heads):
        return None
    starts = first_rows(lengths)
    device = batch.input_ids.device
    head_rows = torch.cat([_range(s, h) for s, h in zip(starts, heads, strict=True)])
    body_rows = torch.cat(
        [_range(s + h, n - h) for s, h, n in zip(starts, heads, lengths, strict=True)]
    )
    copy = HeadCopy(
        source_slots=torch.cat(
            [window.head.slots for window in windows if window is not None and window.head]
        ),
        dest_slots=batch.out_cache_loc[sglang.to_device(head_rows, device)],
    )
    sglang.advance_prefix(batch, heads)
    body = [length - head for length, head in zip(lengths, heads, strict=True)]
    sglang.take_rows(batch, sglang.to_device(body_rows, device), body)
    return copy


def _range(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length, dtype=torch.int64)

"""The fusor: one forward in which some rows take their KV from the cache (CacheBlend §5.3).

    rows of the step        head    | chunks and everything else
    not computed            copied  |
    layers [0, check]               | all rows, stock layers
    selection                       | candidates lose those that deviate least
    layers (check, last]            | kept rows; dropped rows' KV is copied and rotated
    norm, logits                    | stock

Every count is known on the host before the forward; which rows are kept is known to the device only.
"""

from collections.abc import Sequence
from typing import Any

import torch

from sgl_blend import sglang_adapter as sglang
from sgl_blend.attention import BlendAttention, Candidates, HeadCopy
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.plan import Window
from sgl_blend.policies import POLICIES, Score
from sgl_blend.rope import Rotation


class Fusor:
    """Runs blended forwards on one model runner; holds nothing between two of them."""

    def __init__(self, runner: Any, rotation: Rotation, check_layer: int) -> None:
        self._runner = runner
        self._rotation = rotation
        self._check_layer = check_layer
        self._num_layers = runner.model_config.num_hidden_layers

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
        backend = BlendAttention(
            runner.attn_backend,
            check_layer=self._check_layer,
            neox=self._rotation.neox,
            head=head,
            candidates=candidates,
            out_slots=batch.out_cache_loc,
        )
        with sglang.forward_with(backend):
            if not candidates:
                logits = runner.forward_split_prefill(batch, forward_count=self._num_layers)
                return sglang.model_output(logits)
            runner.forward_split_prefill(batch, forward_count=self._check_layer + 1)
            assert backend.kept_rows is not None, "the check layer selects"
            sglang.take_hidden_rows(batch, backend.kept_rows)
            kept = [
                length - (0 if window is None else window.num_dropped)
                for length, window in zip(batch.extend_seq_lens_cpu, windows, strict=True)
            ]
            sglang.take_rows(batch, backend.kept_rows, kept)
            backend.enter_ragged(batch)
            logits = runner.forward_split_prefill(batch, forward_count=self._num_layers)
        return sglang.model_output(logits)

    def _candidates(self, batch: Any, windows: Sequence[Window | None]) -> list[Candidates]:
        """Collect, per request that drops rows, what selection and copying need."""
        device = batch.input_ids.device
        found = []
        first_row = 0
        for length, window in zip(batch.extend_seq_lens_cpu, windows, strict=True):
            if window is not None and window.num_dropped > 0:
                found.append(self._candidates_of(window, first_row, device))
            first_row += length
        return found

    def _candidates_of(self, window: Window, first_row: int, device: torch.device) -> Candidates:
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
        chosen = None
        if policy.score is Score.NOTHING:
            picked = policy.select(None, lengths, window.num_recomputed)
            chosen = sglang.to_device(picked, device)
        return Candidates(
            rows=positions - window.head_stop + first_row,
            chunk_lengths=lengths,
            source_slots=torch.cat([span.slots for span in window.spans]),
            cos=cos,
            sin=sin,
            num_recomputed=window.num_recomputed,
            policy=window.policy,
            chosen=chosen,
        )


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

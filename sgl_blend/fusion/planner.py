"""Makes a HostPlan: counts on the host, and the one upload of a blended forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.fusion.host_plan import (
    BatchShape,
    ExactPrefixes,
    Group,
    HostPlan,
    LastRows,
    Reduction,
    RowCounts,
)
from sgl_blend.fusion.plan import LayerSplit, ReusedSpan, StepPlan
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.segmented_topk import Segments
from sgl_blend.kernels.upload import Staged, Staging
from sgl_blend.policies import POLICIES
from sgl_blend.policies.spec import Sees


class Planner:
    """Plans one forward, and puts on one staging what the device must know.

    Args:
        batch: The batch's shape.
        layers: The model's layers.
        kernel: Attends for scattered rows.
    """

    def __init__(self, batch: BatchShape, layers: LayerSplit, kernel: RaggedKernel) -> None:
        self._batch = batch
        self._layers = layers
        self._kernel = kernel
        self._staging = Staging()

    def plan(self, steps: Sequence[StepPlan | None], device: torch.device) -> HostPlan:
        """Return the plan of a batch, sent to the device.

        Args:
            steps: Per request what it reuses, None for a plain prefill.
            device: The batch's.
        """
        batch = self._batch
        lengths = [0 if step is None else step.exact_stop - step.start for step in steps]
        body = [rows - length for rows, length in zip(batch.lengths, lengths, strict=True)]
        exact = self._exact(steps, lengths, body)
        blended = [
            (request, step)
            for request, step in enumerate(steps)
            if step is not None and step.num_dropped > 0
        ]
        groups = self._groups(blended, body)
        spans = tuple(span for _, step in blended for span in step.spans)
        positions, stored = _positions(spans)
        shifts = [first - batch.prefix[i] for i, first in enumerate(first_rows(batch.lengths))]
        own = np.repeat([group.request for group in groups], [group.count for group in groups])
        in_batch = positions + np.take(shifts, own) if groups else positions
        # Of the rows in front of a row, those of all exact prefixes up to its own request are gone.
        rows = in_batch - np.take(np.cumsum(lengths), own) if groups else positions
        early, late, left = self._reductions(groups, body)
        unknown, decided = self._marks(blended)
        plan = HostPlan(
            exact=exact,
            groups=groups,
            spans=spans,
            moved_rows=self._stage(
                np.concatenate([_ranges(first_rows(batch.lengths), lengths), in_batch])
            ),
            rows=self._stage(rows),
            positions=self._stage(positions),
            stored_positions=self._stage(stored),
            priorities=self._priorities(groups),
            places=self._places(blended),
            unknown=unknown,
            decided=decided,
            rounded=self._rounded(spans),
            early=early,
            late=late,
            last=self._last(left, self._batch.wanted) if early is not None or late else None,
        )
        self._staging.send(device)
        return plan

    def plan_probe(self, device: torch.device) -> LastRows:
        """Return the last row of each request, sent to the device; nobody wants logits."""
        lengths = self._batch.lengths
        last = self._last(lengths, [1] * len(lengths))
        self._staging.send(device)
        return last

    def _exact(
        self, steps: Sequence[StepPlan | None], lengths: list[int], body: list[int]
    ) -> ExactPrefixes | None:
        if not any(lengths):
            return None
        starts = first_rows(self._batch.lengths)
        prefix = [old + length for old, length in zip(self._batch.prefix, lengths, strict=True)]
        return ExactPrefixes(
            spans=tuple(
                step.exact_prefix
                for step in steps
                if step is not None and step.exact_prefix is not None
            ),
            total=sum(lengths),
            body_rows=self._stage(
                _ranges(
                    [first + length for first, length in zip(starts, lengths, strict=True)], body
                )
            ),
            body=self._counts(body),
            prefix=prefix,
            prefix_lens=self._stage(np.array(prefix, dtype=np.int32)),
        )

    def _groups(
        self, blended: Sequence[tuple[int, StepPlan]], body: list[int]
    ) -> tuple[Group, ...]:
        groups, first = [], 0
        starts = first_rows(body)
        for request, step in blended:
            policy = POLICIES[step.policy]
            to_row = starts[request] - step.exact_stop
            groups.append(
                Group(
                    request=request,
                    policy=step.policy,
                    first=first,
                    count=step.num_candidates,
                    chunk_lengths=[len(span) for span in step.spans],
                    schedule=step.schedule(self._layers),
                    num_early=step.num_early,
                    drops_early=policy.skips_full_layers
                    or (policy.trusts_memory and step.num_early < step.num_candidates),
                    question=range(step.spans[-1].stop + to_row, step.stop + to_row),
                )
            )
            first += groups[-1].count
        return tuple(groups)

    def _reductions(
        self, groups: tuple[Group, ...], rows: list[int]
    ) -> tuple[Reduction | None, dict[int, Reduction], list[int]]:
        """Return what leaves before the first layer and in each layer, and the rows left then."""
        selecting_layers = _selecting_layers(groups, self._layers.check)
        early = None
        if any(group.drops_early for group in groups):
            budgets = [g.num_early if g.drops_early else None for g in groups]
            early = self._reduction(groups, budgets, rows, is_last=not selecting_layers)
            groups, rows = _after(early), early.after.rows
        late = {}
        for layer in selecting_layers:
            above = layer - self._layers.check
            budgets = [g.schedule[above] if g.schedule[above] < g.count else None for g in groups]
            is_last = layer == selecting_layers[-1]
            late[layer] = self._reduction(groups, budgets, rows, is_last=is_last)
            groups, rows = _after(late[layer]), late[layer].after.rows
        return early, late, rows

    def _reduction(
        self,
        groups: tuple[Group, ...],
        budgets: Sequence[int | None],
        rows: list[int],
        *,
        is_last: bool,
    ) -> Reduction:
        """Return one reduction; a group without a budget keeps what it has."""
        candidates, taken = [0] * len(rows), [0] * len(rows)
        for group, budget in zip(groups, budgets, strict=True):
            candidates[group.request] = group.count
            taken[group.request] = group.count if budget is None else int(budget)
        segments = Segments(tuple(rows), tuple(candidates), tuple(taken))
        counts = zip(rows, candidates, taken, strict=True)
        return Reduction(
            groups=groups,
            budgets=tuple(taken[group.request] for group in groups),
            selecting=tuple(budget is not None for budget in budgets),
            segments=segments,
            bounds=self._stage(segments.bounds()),
            after=self._counts([all_rows - some + kept for all_rows, some, kept in counts]),
            is_last=is_last,
        )

    def _last(self, rows: list[int], wanted: list[int]) -> LastRows:
        wanted = [min(n, some) for n, some in zip(rows, wanted, strict=True)]
        stops = itertools.accumulate(rows)
        firsts = [stop - n for stop, n in zip(stops, wanted, strict=True)]
        return LastRows(self._stage(_ranges(firsts, wanted)), self._counts(wanted))

    def _counts(self, rows: list[int]) -> RowCounts:
        attention = self._kernel.host_counts(rows, self._batch.kv_lengths)
        return RowCounts(
            rows=rows,
            seq_lens=self._stage(np.array(rows, dtype=np.int32)),
            starts=self._stage(np.array(first_rows(rows), dtype=np.int32)),
            attention=None if attention is None else self._stage(attention),
        )

    def _priorities(self, groups: tuple[Group, ...]) -> Staged | None:
        found = {
            group.first: POLICIES[group.policy].prioritise(
                None, group.chunk_lengths, group.schedule[0]
            )
            for group in groups
            if POLICIES[group.policy].sees is Sees.NOTHING
        }
        if not found:
            return None
        priorities = np.zeros(sum(group.count for group in groups), dtype=np.float32)
        for first, values in found.items():
            priorities[first : first + len(values)] = values.numpy()
        return self._stage(priorities)

    def _places(self, blended: Sequence[tuple[int, StepPlan]]) -> Staged | None:
        if not any(POLICIES[step.policy].trusts_memory for _, step in blended):
            return None
        spans = [span for _, step in blended for span in step.spans]
        places = _ranges([span.place or 0 for span in spans], [len(span) for span in spans])
        known = np.repeat([span.remembered for span in spans], [len(span) for span in spans])
        return self._stage(np.where(known, places, 0))

    def _marks(
        self, blended: Sequence[tuple[int, StepPlan]]
    ) -> tuple[Staged | None, Staged | None]:
        """Return the marks of tokens without a memory, and of those that go on by theirs."""
        unknown: list[NDArray[np.float32]] = []
        decided: list[NDArray[np.float32]] = []
        for _, step in blended:
            spans = step.spans
            known = np.repeat([span.remembered for span in spans], [len(span) for span in spans])
            trusts = POLICIES[step.policy].trusts_memory and not known.all()
            unknown.append(np.where(trusts & ~known, np.nan, 0).astype(np.float32))
            decides = trusts and step.decides_early
            decided.append(np.where(decides & known, np.nan, 0).astype(np.float32))
        return self._stage_marks(unknown), self._stage_marks(decided)

    def _rounded(self, spans: Sequence[ReusedSpan]) -> Staged | None:
        if not any(span.is_rounded for span in spans):
            return None
        marks = np.array([span.is_rounded for span in spans], dtype=np.float32)
        return self._stage(np.repeat(marks, [len(span) for span in spans]))

    def _stage_marks(self, marks: list[NDArray[np.float32]]) -> Staged | None:
        if not any(part.any() for part in marks):
            return None
        return self._stage(np.concatenate(marks))

    def _stage(self, array: NDArray[np.generic]) -> Staged:
        return self._staging.add(array)


def _after(reduction: Reduction) -> tuple[Group, ...]:
    """Return the groups of a reduction as they are after it."""
    segments = reduction.segments
    gone = list(
        itertools.accumulate(
            some - taken for some, taken in zip(segments.candidates, segments.taken, strict=True)
        )
    )
    groups, first = [], 0
    for group, budget, selects in zip(
        reduction.groups, reduction.budgets, reduction.selecting, strict=True
    ):
        before = gone[group.request]
        groups.append(
            replace(
                group,
                first=first,
                count=budget,
                # Which chunk a row is of is not known any more.
                chunk_lengths=[budget] if selects else group.chunk_lengths,
                question=range(group.question.start - before, group.question.stop - before),
            )
        )
        first += budget
    return tuple(groups)


def _selecting_layers(groups: Iterable[Group], check_layer: int) -> list[int]:
    """Return the layers in which some request computes fewer rows than below."""
    layers: set[int] = set()
    for group in groups:
        if not group.selects_late:
            continue
        before = [group.num_early, *group.schedule]
        layers.update(
            check_layer + index
            for index, (old, new) in enumerate(zip(before, group.schedule, strict=False))
            if new < old
        )
    return sorted(layers)


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of several runs, one run after another."""
    counts = np.array(lengths, dtype=np.int64)
    before = np.cumsum(counts) - counts
    total = int(counts.sum())
    runs = np.repeat(np.array(starts, dtype=np.int64) - before, counts)
    return runs + np.arange(total, dtype=np.int64)


def _positions(spans: Sequence[ReusedSpan]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of spans, and those their keys were rotated for."""
    lengths = [len(span) for span in spans]
    return (
        _ranges([span.start for span in spans], lengths),
        _ranges([span.source_start for span in spans], lengths),
    )

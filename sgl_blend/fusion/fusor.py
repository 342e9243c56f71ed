"""The fusor: one forward in which some rows take their KV from the cache (CacheBlend §5.3).

    rows of the step        exact   | chunks and everything else
    not computed            copied  |
                                    | some policies: selection, by position or by memory
    layers below check              | all rows that are left, stock layers
    check layer                     | fresh KV of all rows; selection; attention and MLP of kept rows
    layers above                    | kept rows
                                    | gradual policies: selection again, among the kept rows
    last layer                      | fresh KV of kept rows; the rest for rows whose logits are wanted
    norm, logits                    | stock

Whatever is copied is copied before the first layer, for all layers in which a row may be dropped; a
row that is kept after all writes its fresh KV over the copy.
Every count is known on the host before the forward; which rows are kept is known to the device only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sgl_blend.engine.forward import (
    advance_prefix,
    batch_device,
    copy_batch,
    empty_output,
    forward_with,
    kv_slots_of_requests,
    model_output,
    prepare,
    row_slots,
    run_layers,
    step_lengths,
    take_rows,
)
from sgl_blend.engine.models import (
    around_logits,
    attention_backend,
    decoder_layers,
    model_dtype,
    residual_rows,
)
from sgl_blend.engine.objects import ForwardBatch, ModelOutput, ModelRunner
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.attention import BlendAttention, Candidates
from sgl_blend.fusion.graphs import RowBucketGraphs
from sgl_blend.fusion.kv_copier import KVCopier
from sgl_blend.fusion.layouts.base import Copy, KVLayout
from sgl_blend.fusion.memory import DeviationMemory
from sgl_blend.fusion.phases import Phase, phase
from sgl_blend.fusion.plan import LayerSplit, StepPlan
from sgl_blend.fusion.rotation import Rotation
from sgl_blend.kernels.kv_deviation import kv_deviation_at
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.upload import to_device
from sgl_blend.policies import POLICIES
from sgl_blend.policies.spec import LayerView, Sees


@dataclass(frozen=True, slots=True)
class Probed:
    """A stored chunk that was prefilled once more after another text.

    Attributes:
        stored_slots: int64 [n], where its KV lies.
        begin: Where it begins in the request that prefills it.
        first: Whether nothing is remembered of it yet.
    """

    stored_slots: torch.Tensor
    begin: int
    first: bool


class Fusor:
    """Runs blended forwards on one model runner; holds nothing between two of them.

    Attributes:
        layers: The model's layers and which of them selects.
        graphs: Of the layers above the check layer; None if they are launched kernel by kernel.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rotation: Rotation,
        layers: LayerSplit,
        layout: KVLayout,
        kernel: RaggedKernel,
        tp_group: TPGroup,
        memory: DeviationMemory,
        graphs: RowBucketGraphs | None = None,
    ) -> None:
        self.layers = layers
        self.graphs = graphs
        self._memory = memory
        self._runner = runner
        self._modules = decoder_layers(runner)
        self._rotation = rotation
        self._layout = layout
        self._copier = KVCopier(layout)
        self._kernel = kernel
        self._tp_group = tp_group

    def run(self, forward_batch: ForwardBatch, steps: Sequence[StepPlan | None]) -> ModelOutput:
        """Run one extend batch.

        Args:
            forward_batch: SGLang's ForwardBatch in an extend mode; it is not changed.
            steps: Per request what it reuses, None for a plain prefill. Each step spans
                exactly the request's rows in this batch.

        Returns:
            SGLang's ModelRunnerOutput. KV of every row is in the pool.
        """
        runner = self._runner
        prepare(runner, forward_batch)
        batch = copy_batch(forward_batch)
        with phase(Phase.PLAN):
            exact_lengths = self._take_exact_prefixes(batch, steps)
            candidates = self._candidates(batch, steps)
        with phase(Phase.COPY):
            self._copier.copy(exact_lengths)
        if any(POLICIES[group.policy].prefills_first for group in candidates):
            candidates = self._prefill_first(batch, candidates)
        early = [group for group in candidates if group.early is not None]
        late = [group for group in candidates if group.selects_late]
        above = self.layers.check + 1
        copies = self._copies(candidates, range(above, self.layers.total), batch)
        with phase(Phase.COPY):
            self._copier.copy(self._copies(early, range(above), batch))
            self._copier.start(copies)
        backend = self._backend(batch, candidates)
        with forward_with(backend, batch):
            if early:
                backend.drop_early()
            done = 0
            for layer in _selecting_layers(late, self.layers.check):
                is_first = layer == self.layers.check
                if not is_first:  # rows kept so far write above the check layer, over the copies
                    self._copier.wait()
                with phase(Phase.FULL_LAYERS if is_first else Phase.SHRUNK_LAYERS):
                    run_layers(runner, batch, layer - done)
                with phase(Phase.CHECK_LAYER):
                    backend.select_at(layer)
                    with residual_rows(self._modules[layer], lambda: backend.kept_rows):
                        run_layers(runner, batch, 1)
                    self._copier.wait()
                done = layer + 1
            with phase(Phase.FULL_LAYERS):
                run_layers(runner, batch, max(0, above - done))
                done = max(above, done)
            self._copier.wait()
            with (
                phase(Phase.SHRUNK_LAYERS),
                around_logits(runner, lambda: phase(Phase.LOGITS)),
            ):
                logits = self._run_rest(batch, backend, done)
        return model_output(logits)

    def probe(self, forward_batch: ForwardBatch, seen: Probed | None) -> ModelOutput:
        """Prefill one request up to the KV of the check layer, and remember how much of it deviates.

        Args:
            forward_batch: SGLang's ForwardBatch of one request; it is not changed.
            seen: A stored chunk that stands at the end of the request, all of it computed when this
                forward ends; None if the chunk is not at its end yet.

        Returns:
            SGLang's ModelRunnerOutput, with logits that mean nothing. The KV of the check layer and
            below is in the pool; what lies above means nothing.
        """
        runner, check = self._runner, self.layers.check
        prepare(runner, forward_batch)
        batch = copy_batch(forward_batch)
        backend = self._backend(batch, [])
        with forward_with(backend, batch):
            run_layers(runner, batch, check)
            backend.keep_last_at(check)  # its KV is all that is wanted of the check layer
            with residual_rows(self._modules[check], lambda: backend.kept_rows):
                run_layers(runner, batch, 1)
        if seen is not None:
            own = kv_slots_of_requests(batch, attention_backend(runner))[0][seen.begin :]
            own = own[: seen.stored_slots.numel()]
            _, v_pool = self._layout.layer(check)
            squared = self._tp_group.sum(kv_deviation_at(v_pool, own, v_pool, seen.stored_slots))
            self._memory.write(seen.stored_slots, squared, first=seen.first)
        return empty_output(runner, forward_batch)

    def _run_rest(self, batch: ForwardBatch, backend: BlendAttention, done: int) -> object:
        """Run the layers that select no more; return the logits."""
        last = self.layers.total - 1
        graphs, scattered = self.graphs, backend.has_dropped
        if graphs is None or not graphs.run(batch, done, scattered=scattered):
            run_layers(self._runner, batch, last - done)
        if not backend.has_dropped:
            return run_layers(self._runner, batch, 1)
        backend.keep_last_at(last)
        with residual_rows(self._modules[last], lambda: backend.kept_rows):
            return run_layers(self._runner, batch, 1)

    def _backend(self, batch: ForwardBatch, candidates: list[Candidates]) -> BlendAttention:
        return BlendAttention(
            attention_backend(self._runner),
            check_layer=self.layers.check,
            neox=self._rotation.neox,
            candidates=candidates,
            batch=batch,
            dtype=model_dtype(self._runner),
            tp_group=self._tp_group,
            kernel=self._kernel,
        )

    def _prefill_first(self, batch: ForwardBatch, candidates: list[Candidates]) -> list[Candidates]:
        """Prefill in full first; oracle policies choose by what it finds, exact ones keep its KV.

        What the blended forward has to write itself is zero again when it begins.
        """
        full = copy_batch(batch)
        with forward_with(self._backend(full, []), full):
            run_layers(self._runner, full, self.layers.total)
        own_slots = row_slots(batch)
        computed = torch.ones_like(own_slots, dtype=torch.bool)
        computed[torch.cat([group.rows for group in candidates])] = False
        self._layout.clear(own_slots[computed])
        return [
            replace(group, priorities=self._true_priorities(batch, group))
            if POLICIES[group.policy].sees is Sees.PREFILL
            else group
            for group in candidates
        ]

    def _true_priorities(self, batch: ForwardBatch, group: Candidates) -> torch.Tensor:
        policy = POLICIES[group.policy]
        assert policy.score is not None, "a policy that sees a prefill has a score"
        own_slots = row_slots(batch)
        scores = torch.zeros(group.rows.numel(), device=group.rows.device)
        for layer in range(self.layers.check + 1, self.layers.total):
            k_pool, v_pool = self._layout.layer(layer)
            view = LayerView(
                q=k_pool[:0],
                k=k_pool,
                v=v_pool,
                k_pool=k_pool,
                v_pool=v_pool,
                rows=own_slots[group.rows],
                stored_slots=group.source_slots,
                rotation=(group.cos, group.sin, self._rotation.neox),
                positions=group.positions,
                question=group.question,
                own_slots=lambda: own_slots,
                scale=1.0,
            )
            deviation = self._tp_group.sum(policy.score(view))
            scores += deviation / deviation.mean().clamp(min=1e-30)  # layers differ in scale
        return policy.prioritise(scores, group.chunk_lengths, group.schedule[0])

    def _take_exact_prefixes(
        self, batch: ForwardBatch, steps: Sequence[StepPlan | None]
    ) -> list[Copy]:
        """Take the rows of exact prefixes out of the batch; return the copies that stand for them."""
        lengths = step_lengths(batch)
        exact_lengths = [0 if step is None else step.exact_stop - step.start for step in steps]
        if not any(exact_lengths):
            return []
        starts = first_rows(lengths)
        device = batch_device(batch)
        exact_rows = torch.cat([_range(s, h) for s, h in zip(starts, exact_lengths, strict=True)])
        body_rows = torch.cat(
            [_range(s + h, n - h) for s, h, n in zip(starts, exact_lengths, lengths, strict=True)]
        )
        cos, sin = self._rotation.none(sum(exact_lengths))  # an exact prefix stays where it was
        copy = Copy(
            layers=range(self.layers.total),
            source_slots=torch.cat(
                [
                    step.exact_prefix.slots
                    for step in steps
                    if step is not None and step.exact_prefix
                ]
            ),
            dest_slots=row_slots(batch)[to_device(exact_rows, device)],
            cos=cos,
            sin=sin,
        )
        advance_prefix(batch, exact_lengths)
        body = [length - exact for length, exact in zip(lengths, exact_lengths, strict=True)]
        take_rows(batch, to_device(body_rows, device), body)
        return [copy]

    def _copies(self, groups: list[Candidates], layers: range, batch: ForwardBatch) -> list[Copy]:
        """Return the copies of all rows of some groups, in some layers."""
        return [
            Copy(
                layers=layers,
                source_slots=group.source_slots,
                dest_slots=row_slots(batch)[group.rows],
                cos=group.cos,
                sin=group.sin,
            )
            for group in groups
            if not POLICIES[group.policy].true_kv
        ]

    def _candidates(
        self, batch: ForwardBatch, steps: Sequence[StepPlan | None]
    ) -> list[Candidates]:
        """Collect, per request that drops rows, what selection and copying need."""
        device = batch_device(batch)
        found = []
        first_row = 0
        for request, (length, step) in enumerate(zip(step_lengths(batch), steps, strict=True)):
            if step is not None and step.num_dropped > 0:
                found.append(self._candidates_of(step, request, first_row, device))
            first_row += length
        return found

    def _candidates_of(
        self, step: StepPlan, request: int, first_row: int, device: torch.device
    ) -> Candidates:
        lengths = [len(span) for span in step.spans]
        host = torch.stack(
            [
                torch.cat([_range(span.start, len(span)) for span in step.spans]),
                torch.cat([_range(span.source_start, len(span)) for span in step.spans]),
            ]
        )
        positions, stored = to_device(host, device)
        cos, sin = self._rotation.between(stored, positions)
        policy = POLICIES[step.policy]
        schedule = step.schedule(self.layers)
        source_slots = torch.cat([span.slots for span in step.spans])
        priorities, early, decided = None, None, None
        if policy.sees is Sees.NOTHING:
            priorities = to_device(policy.prioritise(None, lengths, schedule[0]), device)
        if policy.skips_full_layers:
            early, priorities = priorities, None
        elif policy.trusts_memory and step.num_early < step.num_candidates:
            early, decided = self._remember(step, source_slots)
        to_row = first_row - step.exact_stop
        return Candidates(
            request=request,
            rows=positions + to_row,
            positions=positions,
            chunk_lengths=lengths,
            source_slots=source_slots,
            cos=cos,
            sin=sin,
            policy=step.policy,
            schedule=schedule,
            num_early=step.num_early,
            question=range(step.spans[-1].stop + to_row, step.stop + to_row),
            priorities=priorities,
            early=early,
            decided=decided,
        )

    def _remember(
        self, step: StepPlan, source_slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return by what rows are dropped before the first layer, and which of the others stay.

        Rows without a memory pass to where they can be compared. The others stay, if they are already
        as few as are recomputed.
        """
        early = self._memory.read(source_slots)
        if all(span.remembered for span in step.spans):
            return early, None
        marks = torch.cat([torch.full((len(span),), span.remembered) for span in step.spans])
        known = to_device(marks, source_slots.device)
        early = early.masked_fill(~known, torch.inf)
        return early, known if step.decides_early else None


def _selecting_layers(candidates: list[Candidates], check_layer: int) -> list[int]:
    """Return the layers after which some request computes fewer rows."""
    layers: set[int] = set()
    for group in candidates:
        before = [group.num_early, *group.schedule]
        layers.update(
            check_layer + index
            for index, (old, new) in enumerate(zip(before, group.schedule, strict=False))
            if new < old
        )
    return sorted(layers)


def _range(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length, dtype=torch.int64)

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
from dataclasses import replace

import torch

from sgl_blend.engine.adapters import row_follower
from sgl_blend.engine.forward import (
    batch_device,
    copy_batch,
    empty_output,
    forward_with,
    kv_lengths,
    kv_slots_of_requests,
    model_output,
    prepare,
    row_slots,
    rows_with_logits,
    run_layers,
    set_prefix,
    step_lengths,
    step_starts,
    take_rows,
)
from sgl_blend.engine.kv_scales import layer_scales
from sgl_blend.engine.models import (
    around_logits,
    attention_backend,
    decoder_layers,
    model_dtype,
    residual_rows,
)
from sgl_blend.engine.objects import ForwardBatch, ModelOutput, ModelRunner
from sgl_blend.engine.tiers import LayerLoads, loads_beside
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.attention import BlendAttention, Candidates, joined
from sgl_blend.fusion.graphs import RowBucketGraphs
from sgl_blend.fusion.host_plan import BatchShape, Group, HostPlan, Reduction
from sgl_blend.fusion.kv_copier import FollowingCopies, KVCopier
from sgl_blend.fusion.layouts.base import Copy, KVLayout
from sgl_blend.fusion.memory import DeviationMemory, Probed
from sgl_blend.fusion.moved_rows import MovedRows
from sgl_blend.fusion.phases import Phase, phase
from sgl_blend.fusion.plan import LayerSplit, StepPlan
from sgl_blend.fusion.planner import Planner
from sgl_blend.fusion.rotation import Rotation
from sgl_blend.kernels.kv_deviation import in_units, kv_deviation_at
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.policies import POLICIES
from sgl_blend.policies.spec import LayerView, Sees


class Fusor:
    """Runs blended forwards on one model runner; holds nothing between two of them but the graphs.

    Attributes:
        layers: The model's layers and which of them selects.
        graphs: Of the layers above the check layer; None if they are launched kernel by kernel.
        half_bins: float32 [layers, KV heads, head_dim], how far coding may have moved V that came
            from storage in few bits; None if none does.
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
        self.half_bins: torch.Tensor | None = None
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
            plan = self._plan(batch, steps)
            moved = MovedRows.of(batch, plan)
            self._take_exact_prefixes(batch, plan)
            candidates = self._candidates(plan, moved) if plan.groups else None
        loads = loads_beside(runner)
        prefixes = moved.of_exact(range(self.layers.total), self._rotation)
        prefills = any(POLICIES[group.policy].prefills_first for group in plan.groups)
        if loads is not None and prefills:
            loads.wait_for_all()
            loads = None
        if loads is None:
            with phase(Phase.COPY):
                self._copier.copy(prefixes)
            prefixes = []
        if candidates is not None and prefills:
            candidates = self._prefill_first(batch, plan, candidates)
        following = self._start_copies(prefixes, plan, moved, candidates, loads)
        above = self.layers.check + 1
        backend = self._backend(batch, candidates, following)
        with forward_with(backend, batch):
            if plan.early is not None and candidates is not None:
                backend.drop_early(plan.early, self._early_scores(plan.early, plan, candidates))
            done = self._run_selecting(batch, backend, plan)
            with phase(Phase.FULL_LAYERS):
                run_layers(runner, batch, max(0, above - done))
                done = max(above, done)
            self._copier.wait()
            with (
                phase(Phase.SHRUNK_LAYERS),
                around_logits(runner, lambda: phase(Phase.LOGITS)),
            ):
                logits = self._run_rest(batch, backend, plan, done, whole=following is None)
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
        if (loads := loads_beside(runner)) is not None:  # it does not pass the layers that wait
            loads.wait_for_all()
        prepare(runner, forward_batch)
        batch = copy_batch(forward_batch)
        last = self._planner(batch).plan_probe(batch_device(batch))
        backend = self._backend(batch, None)
        with forward_with(backend, batch):
            run_layers(runner, batch, check)
            backend.keep_last_at(check, last)  # its KV is all that is wanted of the check layer
            with residual_rows(self._modules[check], lambda: backend.kept_rows):
                run_layers(runner, batch, 1)
        if seen is not None:
            own = kv_slots_of_requests(batch, attention_backend(runner))[0][seen.begin :]
            own = own[: seen.stored_slots.numel()]
            _, v_pool = self._layout.layer(check)
            squared = self._tp_group.sum(kv_deviation_at(v_pool, own, v_pool, seen.stored_slots))
            squared = in_units(squared, layer_scales(runner)[check].v)
            self._memory.write(seen.place, squared, first=seen.first)
        return empty_output(runner, forward_batch)

    def _run_selecting(self, batch: ForwardBatch, backend: BlendAttention, plan: HostPlan) -> int:
        """Run the layers up to the last one that selects; return how many they are."""
        done = 0
        for layer, reduction in plan.late.items():
            is_first = layer == self.layers.check
            if not is_first:  # rows kept so far write above the check layer, over the copies
                self._copier.wait()
            with phase(Phase.FULL_LAYERS if is_first else Phase.SHRUNK_LAYERS):
                run_layers(self._runner, batch, layer - done)
            with phase(Phase.CHECK_LAYER):
                backend.select_at(layer, reduction)
                with residual_rows(self._modules[layer], lambda: backend.kept_rows):
                    run_layers(self._runner, batch, 1)
                self._copier.wait()
            done = layer + 1
        return done

    def _run_rest(
        self,
        batch: ForwardBatch,
        backend: BlendAttention,
        plan: HostPlan,
        done: int,
        *,
        whole: bool,
    ) -> object:
        """Run the layers that select no more; return the logits.

        While KV is still being loaded each layer waits for its own, so they are not run as a whole.
        """
        last = self.layers.total - 1
        graphs = self.graphs if whole else None
        scattered = plan.last is not None  # then rows were dropped
        if graphs is None or not graphs.run(batch, done, scattered=scattered):
            run_layers(self._runner, batch, last - done)
        if plan.last is None:
            return run_layers(self._runner, batch, 1)
        backend.keep_last_at(last, plan.last)
        with residual_rows(self._modules[last], lambda: backend.kept_rows):
            return run_layers(self._runner, batch, 1)

    def _backend(
        self,
        batch: ForwardBatch,
        candidates: Candidates | None,
        following: FollowingCopies | None = None,
    ) -> BlendAttention:
        return BlendAttention(
            attention_backend(self._runner),
            neox=self._rotation.neox,
            candidates=candidates,
            batch=batch,
            dtype=model_dtype(self._runner),
            tp_group=self._tp_group,
            kernel=self._kernel,
            before_layer=None if following is None else following.wait,
            follow_rows=row_follower(self._runner),
            half_bins=self.half_bins,
        )

    def _plan(self, batch: ForwardBatch, steps: Sequence[StepPlan | None]) -> HostPlan:
        return self._planner(batch).plan(steps, batch_device(batch))

    def _planner(self, batch: ForwardBatch) -> Planner:
        shape = BatchShape(
            step_lengths(batch), step_starts(batch), kv_lengths(batch), rows_with_logits(batch)
        )
        return Planner(shape, self.layers, self._kernel)

    def _take_exact_prefixes(self, batch: ForwardBatch, plan: HostPlan) -> None:
        """Take the rows of exact prefixes out of the batch."""
        exact = plan.exact
        if exact is not None:
            body = exact.body
            set_prefix(batch, exact.prefix, exact.prefix_lens.tensor)
            counts = body.rows, body.seq_lens.tensor, body.starts.tensor
            take_rows(batch, exact.body_rows.tensor, *counts, row_follower(self._runner))

    def _candidates(self, plan: HostPlan, moved: MovedRows) -> Candidates:
        positions = plan.positions.tensor
        cos, sin = self._rotation.between(plan.stored_positions.tensor, positions)
        return Candidates(
            rows=plan.rows.tensor,
            positions=positions,
            source_slots=moved.source_slots[plan.num_exact :],
            cos=cos,
            sin=sin,
            priorities=None if plan.priorities is None else plan.priorities.tensor,
            decided=None if plan.decided is None else plan.decided.tensor,
            rounded=None if plan.rounded is None else plan.rounded.tensor,
        )

    def _start_copies(
        self,
        prefixes: list[Copy],
        plan: HostPlan,
        moved: MovedRows,
        candidates: Candidates | None,
        loads: LayerLoads | None,
    ) -> FollowingCopies | None:
        """Copy what the first layers need, and begin to copy the rest.

        Args:
            prefixes: Copies of exact prefixes that are still to be made.
            plan: What the host knows of the forward.
            moved: Where KV is copied from and to.
            candidates: Rows that may be dropped.
            loads: What is still being loaded.

        Returns:
            What each layer has to wait for, if KV is still being loaded.
        """
        above = self.layers.check + 1
        early = [group for group in plan.groups if group.drops_early]
        first = [*prefixes, *moved.of_groups(early, range(above), candidates)]
        rest = moved.of_groups(plan.groups, range(above, self.layers.total), candidates)
        with phase(Phase.COPY):
            if loads is not None:
                return self._copier.follow([*first, *rest], loads)
            self._copier.copy(first)
            self._copier.start(rest)
        return None

    def _early_scores(
        self, reduction: Reduction, plan: HostPlan, candidates: Candidates
    ) -> torch.Tensor:
        """Return by what candidates are dropped before the first layer, float32 [candidates].

        Rows without a memory pass to where they can be compared. Of a group that drops none here the
        scores mean nothing.
        """
        selecting = [
            POLICIES[group.policy].trusts_memory
            for group, selects in zip(reduction.groups, reduction.selecting, strict=True)
            if selects
        ]
        remembered = given = candidates.priorities
        if any(selecting):
            assert plan.places is not None, "a policy here trusts a memory"
            remembered = self._memory.read(plan.places.tensor)
            if plan.unknown is not None:
                remembered = remembered + plan.unknown.tensor
        assert remembered is not None, "what skips full layers has priorities"
        if all(selecting) or given is None:
            return remembered
        return joined(
            [
                (remembered if POLICIES[group.policy].trusts_memory else given)[group.slice]
                for group in reduction.groups
            ]
        )

    def _prefill_first(
        self, batch: ForwardBatch, plan: HostPlan, candidates: Candidates
    ) -> Candidates:
        """Prefill in full first; oracle policies choose by what it finds, exact ones keep its KV.

        What the blended forward has to write itself is zero again when it begins.
        """
        full = copy_batch(batch)
        with forward_with(self._backend(full, None), full):
            run_layers(self._runner, full, self.layers.total)
        own_slots = row_slots(batch)
        computed = torch.ones_like(own_slots, dtype=torch.bool)
        computed[candidates.rows] = False
        self._layout.clear(own_slots[computed])
        for group in plan.groups:
            if POLICIES[group.policy].turned:
                part = group.slice
                slots = own_slots[candidates.rows[part]]
                self._layout.turn_back_and_forth(slots, candidates.cos[part], candidates.sin[part])
        given = candidates.priorities
        if given is None:
            given = torch.zeros(len(candidates.rows), device=own_slots.device)
        return replace(
            candidates,
            priorities=joined(
                [
                    self._true_priorities(batch, group, candidates)
                    if POLICIES[group.policy].sees is Sees.PREFILL
                    else given[group.slice]
                    for group in plan.groups
                ]
            ),
        )

    def _true_priorities(
        self, batch: ForwardBatch, group: Group, candidates: Candidates
    ) -> torch.Tensor:
        policy, own = POLICIES[group.policy], group.slice
        assert policy.score is not None, "a policy that sees a prefill has a score"
        own_slots = row_slots(batch)
        scores = torch.zeros(group.count, device=own_slots.device)
        scales = layer_scales(self._runner)
        for layer in range(self.layers.check + 1, self.layers.total):
            k_pool, v_pool = self._layout.layer(layer)
            view = LayerView(
                q=k_pool[:0],
                k=k_pool,
                v=v_pool,
                k_pool=k_pool,
                v_pool=v_pool,
                rows=own_slots[candidates.rows[own]],
                stored_slots=candidates.source_slots[own],
                rotation=(candidates.cos[own], candidates.sin[own], self._rotation.neox),
                positions=candidates.positions[own],
                question=group.question,
                own_slots=lambda: own_slots,
                scale=scales[layer].k,
                k_scale=scales[layer].k,
                v_scale=scales[layer].v,
            )
            deviation = self._tp_group.sum(policy.score(view))
            scores += deviation / deviation.mean().clamp(min=1e-30)  # layers differ in scale
        return policy.prioritise(scores, group.chunk_lengths, group.schedule[0])

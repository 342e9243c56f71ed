"""Forwards that hold blended requests, builds or probes: each build runs alone, all others together."""

from collections.abc import Mapping, Sequence

from sgl_blend.engine.forward import (
    has_embeddings,
    join_outputs,
    request_ids,
    step_lengths,
    step_starts,
    take_requests,
)
from sgl_blend.engine.objects import Call, ForwardBatch, ModelOutput, ModelRunner, Req, Stock
from sgl_blend.engine.requests import count_cached
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.plan import StepPlan
from sgl_blend.scheduler.builds import ChunkBuilder
from sgl_blend.scheduler.probes import Memories, run_probe
from sgl_blend.scheduler.request_state import RequestState


class Forwards:
    """Runs the forwards of one scheduler; owned by the thread that runs them.

    Args:
        fusor: Runs blended ones.
        memories: What probes are for.
        builders: Whose steps run alone.
        prober: Of them, the one whose steps are probes.
        planned: Requests that have a plan, by id.
    """

    def __init__(
        self,
        fusor: Fusor,
        memories: Memories,
        builders: Sequence[ChunkBuilder],
        prober: ChunkBuilder,
        planned: Mapping[str, tuple[Req, RequestState]],
    ) -> None:
        self._fusor = fusor
        self._memories = memories
        self._builders = tuple(builders)
        self._prober = prober
        self._planned = planned

    def run(self, orig: Stock, runner: ModelRunner, batch: ForwardBatch, args: Call) -> ModelOutput:
        """Run builds one by one and everything else together."""
        rids = request_ids(batch)
        running = [builder.in_flight for builder in self._builders]
        builds = [i for i, rid in enumerate(rids) if any(rid in each for each in running)]
        if builds and len(rids) > 1:
            others = [i for i in range(len(rids)) if i not in builds]
            groups = [[i] for i in builds] + ([others] if others else [])
            outputs = [
                (group, self._run_group(orig, runner, take_requests(runner, batch, group), args))
                for group in groups
            ]
            return join_outputs(outputs)
        return self._run_group(orig, runner, batch, args)

    def _run_group(
        self, orig: Stock, runner: ModelRunner, batch: ForwardBatch, args: Call
    ) -> ModelOutput:
        rids = request_ids(batch)
        if len(rids) == 1 and (probe := self._prober.in_flight.get(rids[0])) is not None:
            return run_probe(self._fusor, self._memories, batch, probe)
        steps = self._step_plans(batch)
        if any(steps) and has_embeddings(batch):
            for rid, step in zip(request_ids(batch), steps, strict=True):
                if step is not None:
                    req, state = self._planned[rid]
                    state.count_whole(step, layers=self._fusor.layers)
                    count_cached(req, state.take_untold())
            steps = []
        if not any(steps):
            output: ModelOutput = orig(runner, batch, *args[0], **args[1])
            return output
        return self._fusor.run(batch, steps)

    def _step_plans(self, batch: ForwardBatch) -> list[StepPlan | None]:
        steps: list[StepPlan | None] = []
        for rid, start, length in zip(
            request_ids(batch), step_starts(batch), step_lengths(batch), strict=True
        ):
            planned = self._planned.get(rid)
            step = None if planned is None else planned[1].steps.get(start)
            assert step is None or step.stop == start + length, "a step runs as it was admitted"
            steps.append(step)
        return steps

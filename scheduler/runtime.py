"""The scheduler process's side of the plugin: its parts, and the life of a request through them."""

import logging
from functools import partial
from typing import Any

from sgl_blend.engine.admission import (
    admitted,
    continue_verdict,
    cut_by_budget_alone,
    has_preempted,
    stop_verdict,
    was_admitted,
)
from sgl_blend.engine.forward import (
    request_ids,
)
from sgl_blend.engine.objects import (
    Call,
    ForwardBatch,
    ModelOutput,
    ModelRunner,
    PrefillAdder,
    Req,
    ScheduleBatch,
    Scheduler,
    Stock,
    Tree,
    Verdict,
)
from sgl_blend.engine.requests import (
    count_cached,
    fill_ids,
    has_finished,
    is_health_check,
    match_again,
    prefix_length,
    prompt_ids,
    rid_of,
    step_range,
    tell_client,
)
from sgl_blend.engine.rounds import (
    drop_queued,
    put_back_preempted,
    requests_of,
    settle_last_batch,
)
from sgl_blend.engine.tiers import finish_copies
from sgl_blend.engine.tree import pool_use, unlock_node
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.plan import StepPlan
from sgl_blend.metrics import BlendMetrics, FindingMetrics
from sgl_blend.radix_ext.fair_share import FairShare
from sgl_blend.radix_ext.probation import Probation
from sgl_blend.scheduler.admission import Admission
from sgl_blend.scheduler.attempt import AdmissionAttempt
from sgl_blend.scheduler.builds import ChunkBuilder
from sgl_blend.scheduler.canary import Canary
from sgl_blend.scheduler.compute_budget import Allowance
from sgl_blend.scheduler.finder import Finder
from sgl_blend.scheduler.forwards import Forwards
from sgl_blend.scheduler.intake import Intake
from sgl_blend.scheduler.internal_requests import is_internal, keeps_apart
from sgl_blend.scheduler.learner import Learner
from sgl_blend.scheduler.level_choice import LevelChoice
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.probes import Memories
from sgl_blend.scheduler.request_state import RequestState, state_of
from sgl_blend.scheduler.rounds import Rounds
from sgl_blend.scheduler.storage_tier import StorageTier
from sgl_blend.scheduler.weight_orders import WeightOrders

logger = logging.getLogger(__name__)


class BlendRuntime:
    """What one scheduler holds of sgl-blend; owned by the scheduler thread.

    A request is read on arrival, planned at admission, fused in its prefill steps and released when the
    result of the last step is in, or when SGLang gives up its memory.

    Attributes:
        intake: Reads requests.
        admission: Plans them.
        rounds: Gives background work its turns.
        builder: Builds missing chunks.
        prober: Runs their probes.
        canary: Compares answers with full prefill; None unless asked for.
        storage: Asks storage for chunks.
        probation: What the tree evicts first.
        weight_orders: Tells when weights have changed.
        finder: Finds chunks in text without marks; None if only marks count.
        learner: Makes chunks of text that comes again; None unless asked for.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        admission: Admission,
        rounds: Rounds,
        builder: ChunkBuilder,
        prober: ChunkBuilder,
        memories: Memories,
        canary: Canary | None,
        storage: StorageTier,
        levels: LevelChoice | None,
        model: LoadedModel,
        fusor: Fusor,
        metrics: BlendMetrics,
        finding_metrics: FindingMetrics,
        shares: FairShare,
        probation: Probation,
        finder: Finder | None,
        learner: Learner | None,
        scheduler: Scheduler,
        tree: Tree,
        description: dict[str, Any],
    ) -> None:
        self.intake = intake
        self.rounds = rounds
        self.builder = builder
        self.prober = prober
        self._memories = memories
        self.canary = canary
        self.storage = storage
        self._levels = levels
        self.admission = admission
        self._model = model
        self._fusor = fusor
        self._metrics = metrics
        self._finding_metrics = finding_metrics
        self._shares = shares
        self.probation = probation
        self._scheduler = scheduler
        self._tree = tree
        self._description = description
        self.finder = finder
        self.learner = learner
        self._planned: dict[str, tuple[Req, RequestState]] = {}
        self._chunk_builders = [builder, *([] if learner is None else [learner.builder])]
        builders = [*self._chunk_builders, prober]
        self._forwards = Forwards(fusor, memories, builders, prober, self._planned)
        self.weight_orders = WeightOrders(model.tp_group, self.weights_changed)

    # --- admission ---

    def add_one_req(self, orig: Stock, adder: PrefillAdder, req: Req, args: Call) -> Verdict:
        """Admit a request; called in place of PrefillAdder.add_one_req, which is orig."""

        def add_stock(candidate: Req) -> Verdict:
            verdict: Verdict = orig(adder, candidate, *args[0], **args[1])
            return verdict

        def add(candidate: Req) -> Verdict:
            if not is_internal(candidate):
                is_taken = any(map(keeps_apart, admitted(adder)))
                return stop_verdict() if is_taken else add_stock(candidate)
            if candidate is not req:  # SGLang has prepared the request that it asks for itself
                match_again(candidate, self._tree)
            return self.rounds.admit(candidate, adder, add_stock)

        state = state_of(req)
        if state is None:
            verdict = add(req)
            return verdict if was_admitted(req, adder) else self._make_room(adder, None, verdict)
        attempt = AdmissionAttempt(req, state, adder, add)
        verdict = self.admission.add(attempt)
        if not attempt.succeeded:
            return self._make_room(adder, state, verdict)
        self.probation.used(req)
        self._count_step(req, state, attempt.step)
        return verdict

    def _make_room(
        self, adder: PrefillAdder, state: RequestState | None, verdict: Verdict
    ) -> Verdict:
        """Keep the room for a request that others were preempted for, and that is not admitted yet.

        It may wait for its builds. Those that made room for it would take it back at once, be preempted
        again for the next build, and prefill anew each time.
        """
        if has_preempted(adder):
            if state is not None:
                state.has_preempted = True
            if not admitted(adder):
                put_back_preempted(self._scheduler, adder)
                return stop_verdict()
        if state is not None and state.has_preempted and verdict == continue_verdict():
            return stop_verdict()
        return verdict

    def waits_for_builds(self, req: Req) -> bool:
        """Tell whether a request is not admitted because builds that it waits for are running."""
        state = state_of(req)
        return state is not None and self.admission.waits_for_builds(state)

    def add_chunked_req(self, orig: Stock, adder: PrefillAdder, req: Req, args: Call) -> Any:
        """Admit a further step of a chunked prefill; called in place of PrefillAdder's, which is orig.

        Returns:
            What SGLang does: the request if it is cut again, else None.
        """
        state = state_of(req)
        if state is None or state.plan is None:
            result = orig(adder, req, *args[0], **args[1])
            if state is not None and req in admitted(adder):
                self._count_step(req, state, None)
            return result
        if self.admission.cuts_as_alone(state):
            cut_by_budget_alone(adder)
        allowance = Allowance.grant(adder, state.plan, prefix_length(req), len(fill_ids(req)))
        result = orig(adder, req, *args[0], **args[1])
        if req not in admitted(adder):
            allowance.withdraw()
            return result
        start, stop = step_range(req)
        step = state.plan.step(start, stop)
        allowance.settle(step, stop - start, is_cut=result is not None)
        self._count_step(req, state, step)
        return result

    def _count_step(self, req: Req, state: RequestState, step: StepPlan | None) -> None:
        start, stop = step_range(req)
        last = stop >= len(fill_ids(req))
        state.count_step(start, stop, step, layers=self._fusor.layers, last=last)
        if state.plan is not None:
            self._planned[rid_of(req)] = req, state
        self._shares.admit(stop - start)
        if self.canary is not None and last and not state.counted:
            self._consider(self.canary, req, state)
        tell_client(req, "sgl_blend", state.told)
        count_cached(req, state.take_untold())

    def _consider(self, canary: Canary, req: Req, state: RequestState) -> None:
        """Let the canary pick a request that one model has prefilled, from its first row on."""
        if state.model != self._model.fingerprint:
            return
        salt = state.client_salt
        if self.admission.holds_old_weights:
            salt = self._model.shadow_namespace(salt)
        canary.consider(req, state, salt=salt)

    # --- forward ---

    def forward(
        self, orig: Stock, runner: ModelRunner, batch: ForwardBatch, args: Call
    ) -> ModelOutput:
        """Run one forward; called in place of ModelRunner._forward_raw, which is orig."""
        output = self._forwards.run(orig, runner, batch, args)
        if self.canary is not None:
            self.canary.capture(request_ids(batch), output)
        return output

    @property
    def has_work(self) -> bool:
        """Whether any forward could concern this plugin."""
        return bool(self._planned) or any(job.is_running for job in self.rounds.jobs)

    # --- release ---

    def finish_step(self, batch: ScheduleBatch) -> None:
        """Release what the requests of a processed prefill batch no longer need."""
        if not all(is_internal(req) for req in requests_of(batch)):
            self.rounds.prefill_ended()
        for req in requests_of(batch):
            state = state_of(req)
            if state is None or state.unprocessed_steps == 0:
                continue
            state.unprocessed_steps -= 1
            if state.unprocessed_steps > 0:
                continue
            state.retired.clear()
            if state.all_steps_admitted:
                if not state.counted:  # a retracted request is prefilled again
                    if not is_health_check(req):
                        self._metrics.add(state.report)
                        if self._levels is not None:
                            self._levels.prefilled(state)
                        if self.finder is not None:
                            self._learn(self.finder, state, req)
                    state.counted = True
                self.release(req)

    def release(self, req: Req) -> None:
        """Give back the locks of a request and forget its plan; harmless if it has none."""
        state = state_of(req)
        if state is None:
            return
        self._planned.pop(rid_of(req), None)
        self._drop_plan(state)

    def _drop_plan(self, state: RequestState) -> None:
        for held in state.locks:
            unlock_node(self._tree, held)
        state.locks = []
        state.retire_plan()

    def before_evict(self, num_tokens: int) -> None:
        """Note that the tree is about to evict."""
        self.admission.before_evict()
        self._shares.before_evict(num_tokens)
        if self.finder is not None:
            self.finder.evicted(num_tokens)

    def before_reset(self) -> None:
        """Note that the tree is about to forget everything."""
        self.admission.before_reset()
        self._model.tree_was_reset()
        self.probation.clear()
        if self.finder is not None:
            self.finder.clear()
            self.finder.forget_heads()
        if self.learner is not None:
            self.learner.clear()

    # --- what an operator does ---

    def forget_pending(self) -> None:
        """Drop pending background work: a flushed cache is not refilled with what was there."""
        self.rounds.forget()
        self._shares.clear()

    def step_aside(self, scheduler: Scheduler, *, finish_writes: bool = True) -> None:
        """Process what was launched last if no client waits for it, so that the scheduler is idle.

        Called between rounds, before an order is carried out. SGLang does the same at the end of its
        next round and loses nothing if it finds it done. With the overlap schedule a client's request
        that has just ended decodes once more. Copies to a host tier keep SGLang busy, too. A step that
        was retracted is not run again: it would write into a namespace of the weights that it began
        with, and hold locks on a tree that is reset.
        """
        drop_queued(scheduler, is_internal)
        if any(map(is_internal, settle_last_batch(scheduler, _is_over))):
            self.rounds.interrupt()
        self.rounds.collect()  # also of a step whose result was looked at in the round before
        if finish_writes:
            finish_copies(self._tree)

    def weights_changed(self) -> None:
        """Never use KV of the old weights again, and compare no answer of theirs with a new one.

        A request in the middle of its prefill goes on without what it has not copied yet.
        """
        self._model.renew()
        self.storage.weights_changed()
        if self._fusor.graphs is not None:
            self._fusor.graphs.weights_changed()
        self.admission.weights_changed()
        if self.finder is not None:
            self.finder.clear()
        self.forget_pending()
        for _, state in self._planned.values():
            self._drop_plan(state)
        self._planned.clear()

    # --- what operators see ---

    def describe(self) -> dict[str, Any]:
        """Return settings and totals for /server_info."""
        graphs = self._fusor.graphs
        return {
            **self._description,
            "cuda_graph_rows": [] if graphs is None else list(graphs.buckets),
            "model_fingerprint": self._model.fingerprint,
            "weight_updates": self._model.num_updates,
            "quality": self._model.quality,
            **self._metrics.totals,
            "fallbacks": dict(self._metrics.fallbacks),
            "chunks_built": sum(builder.num_built for builder in self._chunk_builders),
            "chunks_pending": sum(builder.num_unfinished for builder in self._chunk_builders),
            "build_steps": sum(builder.num_steps for builder in self._chunk_builders),
            "probes_run": self.prober.num_built,
            "probes_pending": self.prober.num_unfinished,
            "chunks_remembered": self._memories.num_chunks,
            "build_step_tokens": self.builder.step_tokens,
            "pool": pool_use(self._tree),
            "storage": self.storage.describe(),
            "chunks_protected": self._shares.num_chunks,
            "finding": None if self.finder is None else self._describe_finding(self.finder),
            "canary": None if self.canary is None else self.canary.describe(),
        }

    def _learn(self, finder: Finder, state: RequestState, req: Req) -> None:
        if self.learner is not None:
            self.learner.finished(state, prompt_ids(req))
        self._finding_metrics.update(partial(self._describe_finding, finder))

    def _describe_finding(self, finder: Finder) -> dict[str, int]:
        learner = {} if self.learner is None else self.learner.describe()
        return {**finder.describe(), **learner}


def _is_over(req: Req) -> bool:
    """Tell whether nobody waits for what a request of a launched batch computes."""
    return is_internal(req) or has_finished(req)

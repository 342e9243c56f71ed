"""Admission: what of a request is stored, and the plan that reuses it.

Runs inside the scheduler's own admission of a request, on the scheduler thread. Locks on chunk nodes
are taken before SGLang counts free memory, so that a plan can never make an allocation fail: if the
request does not fit beside its locked chunks, the locks go back and it is admitted without a plan.
"""

from collections.abc import Callable
from dataclasses import replace

from sgl_blend.engine.admission import (
    admitted,
    is_cut,
    is_out_of_memory,
    stop_verdict,
    verdict_now,
)
from sgl_blend.engine.objects import Req, Verdict
from sgl_blend.engine.requests import (
    brings_embeddings,
    fill_ids,
    host_hit_length,
    is_beam,
    is_being_aborted,
    logprobs_from,
    prefix_length,
    prompt_ids,
    rid_of,
    set_salt,
    step_range,
)
from sgl_blend.engine.tiers import copies_in_flight
from sgl_blend.engine.tree import tree_of
from sgl_blend.fallback import FallbackReason
from sgl_blend.fusion.phases import Phase, phase
from sgl_blend.fusion.plan import BlendPlan, ReusedSpan
from sgl_blend.fusion.row_sizes import RowSizes
from sgl_blend.policies import POLICIES
from sgl_blend.radix_ext.chunk_store import ChunkHit, ChunkStore
from sgl_blend.radix_ext.fair_share import FairShare
from sgl_blend.scheduler.attempt import AdmissionAttempt
from sgl_blend.scheduler.builds import ChunkBuilder
from sgl_blend.scheduler.compute_budget import Allowance
from sgl_blend.scheduler.foreground import ForegroundBuilds, waiting_verdict
from sgl_blend.scheduler.host_tier import HostTier
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.loading_controller import LoadingController
from sgl_blend.scheduler.lookup import Lookup, Lookups
from sgl_blend.scheduler.probes import Memories
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.scheduler.storage_tier import StorageTier
from sgl_blend.tuning.cost_model import CostModel

PlaceOf = Callable[[ChunkHit], int | None]
"""Tells where the memory of a stored chunk is, None if there is none."""


class Admission:
    """Decides for each request whether it is blended, and from what."""

    def __init__(
        self,
        store: ChunkStore,
        builder: ChunkBuilder,
        prober: ChunkBuilder,
        memories: Memories,
        shares: FairShare,
        lookups: Lookups,
        storage: StorageTier,
        controller: LoadingController | None,
        *,
        capacity: int,
        cost_model: CostModel | None,
        build_first: bool,
        model: LoadedModel,
        sizes: RowSizes,
    ) -> None:
        self._sizes = sizes
        self._storage = storage
        self._model = model
        self._store = store
        self._shares = shares
        self._builder = builder
        self._prober = prober
        self._memories = memories
        self._foreground = ForegroundBuilds(store, capacity, builder, prober, memories)
        self._cost_model = cost_model
        self._build_first = build_first
        self._lookups = lookups
        self._host: HostTier | None = None
        if store.has_host_tier:
            self._host = HostTier(
                store, self._lookups, build_first=build_first, controller=controller
            )

    def add(self, attempt: AdmissionAttempt) -> Verdict:
        """Admit a request with whatever plan it can have; return SGLang's verdict."""
        req, state = attempt.req, attempt.state
        if state.model not in (None, self._model.fingerprint):
            self._follow_model(req, state)
        else:
            state.follow_search(self._model)
        reason = state.fallback or _why_not(req, state)
        if reason is not None:
            return _add_plain(attempt, reason)
        if self.waits_for_builds(state):
            return waiting_verdict(state)  # and it is not looked up meanwhile
        with phase(Phase.MATCH):
            lookup = self._lookups.look_up(req, state)
            if self._host is not None:
                lookup = self._host.bring_back(attempt, lookup)
        place_of = self._place_of(state)
        if self._waits_for_room(attempt, lookup):
            return stop_verdict()
        if self._build_first and (missing := self._foreground.missing(state, lookup)):
            verdict = self._foreground.build(attempt, missing, lookup)
            if verdict is not None:
                return verdict
            # A plan of what happens to be stored would make the answer depend on the cache.
            if lookup.missing:
                return _add_plain(attempt, FallbackReason.BUILD_NOT_ADMITTED, lookup)
            place_of = _nowhere  # no room for a probe, though by the lengths there should be
        return self._add_looked_up(attempt, lookup, place_of)

    def _add_looked_up(
        self, attempt: AdmissionAttempt, lookup: Lookup, place_of: PlaceOf
    ) -> Verdict:
        req, state = attempt.req, attempt.state
        reason: FallbackReason | None = None
        plan = _make_plan(req, state, lookup, place_of, self._sizes)
        if plan is None or not plan.spans:
            reason = _why_nothing_is_reused(req, state, lookup, self._store.page_size)
        elif not self._is_worth_it(attempt, plan):
            reason = FallbackReason.NOT_FASTER
            plan = None if plan.exact is None else replace(plan, spans=())
        lookup = replace(lookup, hits=_hits_in_use(lookup, plan))
        if plan is not None:
            verdict = self._add_planned(attempt, plan, lookup, reason)
        else:
            assert reason is not None, "a request without a plan has a reason"
            verdict = _add_plain(attempt, reason, lookup)
        if attempt.succeeded and not self._build_first:
            self._build_later(req, state, lookup)
        return verdict

    def _waits_for_room(self, attempt: AdmissionAttempt, lookup: Lookup) -> bool:
        """Tell whether a request only lacks room for chunks in host memory, and some may come free."""
        on_host, missing = attempt.state.on_host, set(lookup.missing)
        is_all_there = self._build_first and bool(missing) and missing <= on_host
        return is_all_there and not self._foreground.is_alone(attempt.adder)

    def _place_of(self, state: RequestState) -> PlaceOf:
        """Return what tells where the memory of a chunk is."""
        if self._build_first and not self._foreground.may_probe(state):
            return _nowhere
        return self._memories.place_of

    def _build_later(self, req: Req, state: RequestState, lookup: Lookup) -> None:
        """Build what a request lacked in the background, for those that come after it."""
        coming = self._storage.keys_coming(rid_of(req))
        wanted = state.marked  # what was found and is gone was perhaps a part of a chunk
        self._builder.enqueue(key for key in lookup.missing if key in wanted and key not in coming)
        if POLICIES[state.policy].trusts_memory:
            place_of = self._memories.place_of
            unknown = [hit.stored_key for hit in lookup.hits if place_of(hit) is None]
            self._prober.enqueue(self._memories.keys_of([*unknown, *lookup.missing]))

    def _follow_model(self, req: Req, state: RequestState) -> None:
        """Move a request that arrived under other weights to the namespaces of the present ones."""
        state.follow_model(self._model)
        set_salt(req, state.blended_namespace(self._model))
        self._store.match_again(req)

    def plan(self, req: Req, state: RequestState) -> BlendPlan | None:
        """Look a request up and return the plan it would get now; locks nothing."""
        return _make_plan(
            req, state, self._lookups.look_up(req, state), self._place_of(state), self._sizes
        )

    def waits_for_builds(self, state: RequestState) -> bool:
        """Tell whether something is being built that a request was found to lack."""
        return self._build_first and self._foreground.waits(state)

    def cuts_as_alone(self, state: RequestState) -> bool:
        """Tell whether an answer depends on where the prompt is cut, but must not on who is served.

        Each step selects among its own rows.
        """
        return self._build_first and state.plan is not None and bool(state.plan.spans)

    def before_evict(self) -> None:
        """Note that the tree is about to evict."""
        self._lookups.before_evict()

    def before_reset(self) -> None:
        """Note that the tree is about to forget everything."""
        self._lookups.before_reset()
        self._memories.clear()

    @property
    def holds_old_weights(self) -> bool:
        """Whether a client's exact namespace may hold KV of weights that are not loaded any more."""
        return self._lookups.holds_old_weights

    def weights_changed(self) -> None:
        """Note that the tree may hold KV of weights that are not loaded any more."""
        self._lookups.weights_changed()

    def _add_planned(
        self,
        attempt: AdmissionAttempt,
        plan: BlendPlan,
        lookup: Lookup,
        reason: FallbackReason | None,
    ) -> Verdict:
        state, adder = attempt.state, attempt.adder
        start = prefix_length(attempt.req) + host_hit_length(attempt.req)
        allowance = Allowance.grant(adder, plan, start, len(fill_ids(attempt.req)))
        # Each step selects among its own rows, so the answer depends on where the prompt is cut: on
        # an idle server not at all, or as the first of its batch. (Not so with --enable-mixed-chunk,
        # where decoding requests take of the budget.)
        if self._build_first and plan.spans and admitted(adder) and not allowance.holds_all:
            allowance.withdraw()
            return stop_verdict()
        matches = [hit.match for hit in lookup.hits]
        if lookup.exact is not None:
            matches.append(lookup.exact[1])
        locks = [self._store.lock(match) for match in matches]
        verdict = attempt.run()
        if attempt.succeeded:
            state.plan, state.locks = plan, locks
            for hit in lookup.hits:
                own = hit.key in state.missed
                self._shares.hit(hit.key, 0 if own else hit.num_tokens)
            state.start_admission(
                hit_starts=[hit.span.start for hit in lookup.hits],
                missing=lookup.missing,
                fallback=reason,
            )
            start, stop = step_range(attempt.req)
            attempt.step = plan.step(start, stop)
            allowance.settle(attempt.step, stop - start, is_cut=is_cut(attempt.req, adder))
            return verdict_now(adder)
        allowance.withdraw()
        for held in locks:
            self._store.unlock(held)
        # With build, an answer must not depend on the load: wait for memory while some may come free.
        may_wait = self._build_first and not self._foreground.is_alone(adder)
        may_wait = may_wait or copies_in_flight(tree_of(adder))
        if is_out_of_memory(verdict) and not may_wait:
            return _add_plain(attempt, FallbackReason.NO_MEMORY, lookup)
        return verdict

    def _is_worth_it(self, attempt: AdmissionAttempt, plan: BlendPlan) -> bool:
        """Tell whether a plan makes the prefill faster; an exact prefix alone always does."""
        step = plan.step(prefix_length(attempt.req), attempt.state.num_tokens)
        if self._cost_model is None or step is None or not step.spans:
            return True
        num_rows = step.stop - step.exact_stop
        saved = self._cost_model.saves_s(
            num_rows,
            step.num_candidates,
            step.num_dropped,
            num_dropped_early=step.num_candidates - step.num_early,
        )
        return saved >= 0


def _add_plain(
    attempt: AdmissionAttempt, reason: FallbackReason, lookup: Lookup | None = None
) -> Verdict:
    """Admit a request that reuses nothing."""
    verdict = attempt.run()
    if attempt.succeeded:
        attempt.state.plan = None
        missing = () if lookup is None else lookup.missing
        attempt.state.start_admission(missing=missing, fallback=reason)
    return verdict


def _why_not(req: Req, state: RequestState) -> FallbackReason | None:
    """Name a property of the request that blending does not serve."""
    if is_being_aborted(req):
        return FallbackReason.ABORTED
    if len(prompt_ids(req)) != state.num_tokens:
        return FallbackReason.TRUNCATED
    if brings_embeddings(req):
        return FallbackReason.MULTIMODAL
    if is_beam(req):
        return FallbackReason.BEAM_SEARCH
    return None


def _nowhere(hit: ChunkHit) -> None:
    return None


def _make_plan(
    req: Req,
    state: RequestState,
    lookup: Lookup,
    place_of: PlaceOf,
    sizes: RowSizes,
) -> BlendPlan | None:
    trusts = POLICIES[state.policy].trusts_memory
    exact = None if lookup.exact is None else lookup.exact[0]
    blended_from = prefix_length(req) if exact is None else exact.stop
    wanted_from = logprobs_from(req)
    computed_from = state.num_tokens - 1
    if wanted_from is not None:
        computed_from = min(computed_from, wanted_from)
    spans = []
    for hit in lookup.hits:
        start, found = hit.span.start, hit.match
        stop = start + hit.num_tokens
        place = place_of(hit) if trusts else None
        span = ReusedSpan(start, stop, hit.prefix_length, found, place, hit.is_rounded)
        if start >= blended_from and stop <= computed_from:
            spans.append(span)
        elif (clipped := span.clip(blended_from, computed_from)) is not None:
            spans.append(clipped)
    if exact is None and not spans:
        return None
    return BlendPlan(
        exact=exact,
        spans=tuple(spans),
        computed_from=computed_from,
        policy=state.policy,
        ratio=state.ratio_now,
        sizes=sizes,
    )


def _hits_in_use(lookup: Lookup, plan: BlendPlan | None) -> tuple[ChunkHit, ...]:
    """Return the hits that a plan copies from; exact KV of other origin may cover some."""
    if plan is None:
        return ()
    used = {id(span.source) for span in (plan.exact, *plan.spans) if span is not None}
    return tuple(hit for hit in lookup.hits if id(hit.match) in used)


def _why_nothing_is_reused(
    req: Req, state: RequestState, lookup: Lookup, page_size: int
) -> FallbackReason:
    """Name why no chunk's KV is reused at another place than it was computed for."""
    exact = prefix_length(req) if lookup.exact is None else lookup.exact[0].stop
    # Exact KV ends with a page, and a chunk that begins before its end may lack the rest of one.
    if all(
        span.stop <= exact + (page_size - 1 if span.start < exact else 0) for span in state.spans
    ):
        return FallbackReason.CACHED
    # What is stored and not exact is reused, unless every row of it must be computed.
    stored = any(hit.span.start + hit.num_tokens > exact for hit in lookup.hits)
    return FallbackReason.LOGPROBS if stored else FallbackReason.NO_HIT

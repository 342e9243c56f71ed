"""What the scheduler process remembers of one request; it lives on the request and dies with it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sgl_blend.engine.objects import Req
from sgl_blend.engine.tree import TreeLock
from sgl_blend.fallback import FallbackReason
from sgl_blend.fusion.plan import BlendPlan, LayerSplit, StepPlan
from sgl_blend.policies import POLICIES
from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.radix_ext.namespaces import ModelFingerprint, is_chunk_of
from sgl_blend.report import BlendReport
from sgl_blend.scheduler.finder import Search
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.tuning.load_choice import MAX_RATIO, Ratios

ATTRIBUTE = "sgl_blend"
"""Attribute of SGLang's Req that holds the state."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was done for the first tokens of a prompt before the request was admitted.

    Attributes:
        start: Where what was done begins: the tokens before it were there already.
        stop: Where they end.
        report: What was done.
        hit_starts: Where reused chunks stand in the prompt.
        missing: Chunks that were not stored.
    """

    start: int
    stop: int
    report: BlendReport
    hit_starts: frozenset[int] = frozenset()
    missing: frozenset[ChunkKey] = frozenset()

    @classmethod
    def computed(cls, start: int, stop: int, num_layers: int) -> Ahead:
        """Return that tokens were prefilled as usual."""
        rows = stop - start
        report = BlendReport(
            prompt_tokens=stop,
            policy="",
            ratio=0.0,
            prefix_tokens=start,
            computed_tokens=rows,
            layer_rows=rows * num_layers,
        )
        return cls(start, stop, report)


@dataclass(slots=True)
class RequestState:
    """State of one request, owned by the scheduler thread.

    Attributes:
        num_tokens: Tokens of the prompt, separators taken out.
        spans: Chunks long enough to be reused.
        keys: Identity of each span's KV, in the same order.
        client_salt: The exact namespace of the client.
        policy: Selection policy.
        ratio: Share of reused tokens to recompute.
        fallback: Why the request is not blended; None while it may be.
        serial: A number that no other request has, if it shares its blended KV with nobody.
        model: Fingerprint of the model that the keys are of; None without chunks.
        plan: What is reused in the current admission; None if nothing is.
        steps: The plan's part in each admitted step, by the position at which the step starts.
        locks: Chunk nodes held for the plan.
        retired: Plans given up while a forward that reads their slots was queued on the device.
        unprocessed_steps: Admitted prefill steps whose result is not in yet.
        all_steps_admitted: Whether the last prefill step is admitted.
        has_preempted: Whether running requests were preempted for it since it waits.
        build_rounds: How often builds of its chunks were admitted while it waits.
        builds_alone: Whether nobody else is admitted meanwhile, because they did not stay otherwise.
        waits_for: What it was found to lack when builds for it were last tried.
        goes_by_memory: Whether it goes by what is remembered of its chunks; None until that is asked.
        copied_tokens: Tokens of the present admission whose KV was copied.
        on_host: Chunks that were found in host memory when it was last considered.
        host_seen: What device and host held then, and the room there was, if nothing could be
            brought back.
        host_tokens: Tokens that were brought back from host memory for it since it waits.
        storage_tokens: Tokens that came from storage to host memory for it since it waits.
        levels: At which level of coding chunks came from storage since it waits.
        slo_s: Seconds in which its first token is wanted; None if nobody said.
        since_s: When it was received, on the clock of time.monotonic.
        load_s: Seconds that it waited for them.
        came_s: When it waited no longer for chunks that come at levels, on the clock of since_s.
        load_ratio: Share of reused tokens to recompute while something is loaded; None if nothing is.
        told_tokens: How many of its copied tokens SGLang was told of.
        ahead: What was done for the beginning of its prompt while it waited.
        hit_starts: Where the chunks stand that the present admission reuses.
        missing: Chunks that it lacks.
        admissions: How often it was admitted; a retracted request is admitted again.
        missed: Chunks that were ever missing; they were built for it, if they are stored now.
        remembered: What scheduler/lookup.py found when it was last considered for admission.
        search: What was looked for in its text without marks; None if nothing was.
        found: Which of its chunks were found there, by their place in spans.
        counted: Whether its report is in the totals.
        report: What was done for it, kept current.
        told: The report as the client gets it. SGLang holds this dict; it is changed in place.
    """

    num_tokens: int
    spans: tuple[Span, ...]
    keys: tuple[ChunkKey, ...]
    client_salt: str | None
    policy: str
    ratio: float
    fallback: FallbackReason | None = None
    serial: int | None = None
    model: ModelFingerprint | None = None
    plan: BlendPlan | None = None
    steps: dict[int, StepPlan] = field(default_factory=dict)
    locks: list[TreeLock] = field(default_factory=list)
    retired: list[BlendPlan] = field(default_factory=list)
    unprocessed_steps: int = 0
    all_steps_admitted: bool = False
    has_preempted: bool = False
    build_rounds: int = 0
    builds_alone: bool = False
    waits_for: tuple[ChunkKey, ...] = ()
    goes_by_memory: bool | None = None
    copied_tokens: int = 0
    on_host: frozenset[ChunkKey] = frozenset()
    host_seen: tuple[object, int] | None = None
    host_tokens: int = 0
    storage_tokens: int = 0
    levels: dict[ChunkKey, str] = field(default_factory=dict)
    slo_s: float | None = None
    since_s: float = field(default_factory=time.monotonic)
    load_s: float = 0.0
    came_s: float | None = None
    load_ratio: float | None = None
    told_tokens: int = 0
    ahead: list[Ahead] = field(default_factory=list)
    hit_starts: frozenset[int] = frozenset()
    missing: frozenset[ChunkKey] = frozenset()
    admissions: int = 0
    missed: set[ChunkKey] = field(default_factory=set)
    remembered: object = None
    search: Search | None = None
    found: frozenset[int] = frozenset()
    counted: bool = False
    report: BlendReport = field(init=False)
    told: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.report = self._new_report(fallback=self.fallback)

    def _new_report(self, **counts: Any) -> BlendReport:
        return BlendReport(
            prompt_tokens=self.num_tokens,
            policy=self.policy,
            **{"ratio": self.ratio, **counts},
        )

    @property
    def may_blend(self) -> bool:
        """Whether it could reuse chunks."""
        return self.fallback is None and bool(self.keys)

    @property
    def ratio_now(self) -> float:
        """Share of reused tokens to recompute if it is admitted now: more while something is loaded."""
        return self.ratio if self.load_ratio is None else max(self.ratio, self.load_ratio)

    @property
    def ratios(self) -> Ratios:
        """Between which shares a load may choose: one where the policy has a ratio of its own."""
        is_fixed = POLICIES[self.policy].fixed_ratio is not None
        return Ratios(self.ratio, self.ratio if is_fixed else max(self.ratio, MAX_RATIO))

    def follow(self, tokens: array[int]) -> None:
        """Take the prompt as SGLang put it together: a session puts earlier turns before these tokens.

        Args:
            tokens: The whole prompt, which ends with the tokens that were read. A session may have
                taken a BOS away from their beginning, or cut its history short.
        """
        history = len(tokens) - self.num_tokens
        self.num_tokens = self.report.prompt_tokens = len(tokens)
        self.spans = tuple(Span(s.start + history, s.stop + history) for s in self.spans)
        # A prompt as long as the turn may still be another one: history can take the place of a BOS.
        there = all(
            span.start >= 0 and tokens[span.start : span.stop].tobytes() == key.tokens
            for span, key in zip(self.spans, self.keys, strict=True)
        )
        if self.fallback is None and not there:
            self.fallback = FallbackReason.MALFORMED

    @property
    def marked(self) -> frozenset[ChunkKey]:
        """Chunks that the client named."""
        return frozenset(key for i, key in enumerate(self.keys) if i not in self.found)

    def blended_namespace(self, model: LoadedModel) -> str:
        """Name the namespace of the request's blended KV."""
        return model.blended_namespace(
            self.client_salt, policy=self.policy, ratio=self.ratio, serial=self.serial
        )

    def follow_model(self, model: LoadedModel) -> None:
        """Look for chunks of the weights that are loaded now, not of those at arrival."""
        self.model = model.fingerprint
        salt = model.chunk_namespace(self.client_salt)
        self.keys = tuple(msgspec.structs.replace(key, salt=salt) for key in self.keys)
        self.follow_search(model)
        self.build_rounds, self.builds_alone, self.waits_for = 0, False, ()

    def follow_search(self, model: LoadedModel) -> None:
        """Have learned what was looked for in the text for the weights that are loaded now."""
        search = self.search
        if search is not None and not is_chunk_of(search.home.salt, model.fingerprint):
            salt = model.chunk_namespace(self.client_salt)
            self.search = replace(search, home=msgspec.structs.replace(search.home, salt=salt))

    def retire_plan(self) -> None:
        """Give the plan up, but keep its tensors while a queued forward reads them.

        They were made on the scheduler's stream; the allocator would hand their memory to its next
        tensors at once, however far the forward has come on its own stream.
        """
        if self.plan is not None and self.unprocessed_steps > 0:
            self.retired.append(self.plan)
        self.plan = None
        self.steps.clear()

    def up_to(self, stop: int) -> RequestState | None:
        """Return the state of a request for the first tokens alone, which nobody counts.

        Returns:
            None if no chunk begins there.
        """
        count = sum(span.start < stop for span in self.spans)
        if count == 0:
            return None
        return RequestState(
            stop,
            self.spans[:count],
            self.keys[:count],
            self.client_salt,
            self.policy,
            self.ratio,
            serial=self.serial,
            model=self.model,
            found=frozenset(number for number in self.found if number < count),
            counted=True,
        )

    def start_admission(
        self,
        *,
        hit_starts: Collection[int] = (),
        missing: Collection[ChunkKey] = (),
        fallback: FallbackReason | None,
    ) -> None:
        """Begin to count anew; a retracted request is admitted again from the start."""
        self.hit_starts, self.missing = frozenset(hit_starts), frozenset(missing)
        self.unprocessed_steps = 0
        self.all_steps_admitted = False
        self.has_preempted = False
        self.build_rounds, self.builds_alone, self.waits_for = 0, False, ()
        self.remembered = None
        self.steps.clear()
        self.copied_tokens = self.told_tokens = 0
        self.admissions += 1
        self.report = self._new_report(
            found_tokens=sum(
                len(self.spans[i]) for i in self.found if self.spans[i].start in hit_starts
            ),
            chunk_hits=len(hit_starts),
            chunk_misses=len(missing),
            host_tokens=self.host_tokens,
            storage_tokens=self.storage_tokens,
            chunk_levels=[self.levels.get(key) for key in self.keys] if self.levels else [],
            load_ms=round(1000 * self.load_s, 3),
            ratio=self.ratio_now,
            fallback=fallback,
        )
        self.on_host, self.host_seen, self.host_tokens = frozenset(), None, 0
        self.storage_tokens, self.load_s, self.load_ratio = 0, 0.0, None
        self.levels.clear()

    def count_step(
        self, start: int, stop: int, step: StepPlan | None, *, layers: LayerSplit, last: bool
    ) -> None:
        """Count the tokens of one admitted prefill step over [start, stop)."""
        self.unprocessed_steps += 1
        self.all_steps_admitted = last
        report = self.report
        # Tokens a retracted request had generated are prefilled again; they are not of the prompt.
        stop = min(stop, self.num_tokens)
        if report.prefix_tokens == 0 and report.computed_tokens == 0:
            report.prefix_tokens = min(start, self.num_tokens)
            self._count_ahead(start)
        exact = reused = recomputed = 0
        if step is not None:
            exact = step.exact_stop - step.start
            recomputed = step.num_recomputed
            reused = step.num_dropped
            self.steps[start] = step
            self.copied_tokens += exact + reused
            report.layer_rows += step.layer_rows(layers)
        else:
            report.layer_rows += max(0, stop - start) * layers.total
        report.prefix_tokens += exact
        report.reused_tokens += reused
        report.recomputed_tokens += recomputed
        report.computed_tokens += max(0, stop - start) - exact - reused - recomputed
        self.told.update(report.for_client())

    def _count_ahead(self, start: int) -> None:
        """Count what pieces of the prompt have done: SGLang takes all of it for a cached prefix.

        What was evicted and done again counts once.
        """
        report, done, self.ahead = self.report, self.ahead, []
        starts, missing = set(self.hit_starts), set(self.missing)
        begin = start
        for piece in reversed(done):
            if piece.stop > begin:
                continue  # evicted again
            begin, other = piece.start, piece.report
            computed = other.recomputed_tokens + other.computed_tokens
            report.prefix_tokens -= other.reused_tokens + computed
            report.reused_tokens += other.reused_tokens
            report.recomputed_tokens += other.recomputed_tokens
            report.computed_tokens += other.computed_tokens
            report.layer_rows += other.layer_rows
            report.host_tokens += other.host_tokens
            self.copied_tokens -= computed
            starts |= piece.hit_starts
            missing |= piece.missing
            if other.reused_tokens + other.recomputed_tokens:
                report.fallback = None
        report.chunk_hits += len(starts) - len(self.hit_starts)
        report.chunk_misses += len(missing) - len(self.missing)

    def take_untold(self) -> int:
        """Return how many more copied tokens SGLang is to be told of than it was; may be negative.

        Like SGLang itself it counts what was cached when a request was admitted first.
        """
        untold = self.copied_tokens - self.told_tokens
        self.told_tokens += untold
        return untold if self.admissions == 1 else 0

    def count_whole(self, step: StepPlan, *, layers: LayerSplit) -> None:
        """Count a step that was to do what its plan says, and computed everything instead."""
        report = self.report
        exact = step.exact_stop - step.start
        report.prefix_tokens -= exact
        report.reused_tokens -= step.num_dropped
        report.recomputed_tokens -= step.num_recomputed
        report.computed_tokens += exact + step.num_candidates
        report.layer_rows += (step.stop - step.start) * layers.total
        report.layer_rows -= step.layer_rows(layers)
        self.copied_tokens -= exact + step.num_dropped
        if step.spans and report.reused_tokens == 0 and report.recomputed_tokens == 0:
            report.fallback = FallbackReason.BESIDE_EMBEDDINGS
        self.told.update(report.for_client())


def state_of(req: Req) -> RequestState | None:
    """Return the state of a request, or None for requests the plugin does not look at."""
    state: RequestState | None = getattr(req, ATTRIBUTE, None)
    return state

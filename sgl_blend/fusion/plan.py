"""BlendPlan: for one request, which tokens take their KV from where, and how many are recomputed."""

from dataclasses import dataclass

import msgspec
import torch

from sgl_blend.fusion.row_sizes import NO_SIZES, RowSizes
from sgl_blend.fusion.sources import KVSource
from sgl_blend.policies import POLICIES, early_rows, keep_schedule, recompute_budget


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The model's layers: below the check layer all rows are computed, above it kept rows.

    In the check layer itself all rows are projected to fresh KV, and kept rows attend and pass the MLP.
    """

    check: int
    total: int

    @property
    def above(self) -> int:
        """Layers above the check layer."""
        return self.total - self.check - 1


class ReusedSpan(msgspec.Struct, eq=False, gc=False):
    """A run of tokens whose KV is stored already; never changed once it is made.

    Thousands are made for a prompt. They are part of no cycle, and garbage collection need not know
    of them.

    Attributes:
        start: Position of its first token in the request.
        stop: Position one past the last token.
        source_start: Position its first key was rotated for, which is its place in the stored path.
        source: Where the KV of the stored path lies.
        place: Where it is remembered how much each token deviated in other contexts (the first one's
            place in the DeviationMemory); None if it is not.
        is_rounded: Whether its KV came from storage in few bits.
    """

    start: int
    stop: int
    source_start: int
    source: KVSource
    place: int | None = None
    is_rounded: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slots(self) -> torch.Tensor:
        """int64 [length], pool slots of the stored KV, on the pool's device."""
        return self.source.take(self.source_start, self.source_start + len(self))

    @property
    def remembered(self) -> bool:
        """Whether its tokens have a memory."""
        return self.place is not None

    def clip(self, start: int, stop: int) -> "ReusedSpan | None":
        """Return the part inside [start, stop), or None if there is none."""
        if start <= self.start and self.stop <= stop:
            return self
        start, stop = max(start, self.start), min(stop, self.stop)
        if start >= stop:
            return None
        gone = start - self.start
        place = None if self.place is None else self.place + gone
        source_start = self.source_start + gone
        return ReusedSpan(start, stop, source_start, self.source, place, self.is_rounded)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward step of a request does: rows [start, stop), of which some are not computed.

    Attributes:
        start: First position of the step.
        stop: One past the last position.
        exact_prefix: Exact KV for [start, exact_prefix.stop), copied as it is. Its rows are never
            computed.
        spans: Chunks after the exact prefix, in order.
        num_recomputed: How many rows of the spans go on being computed, near to what the ratio says;
            under a gradual policy the mean over the layers.
        policy: Name of the policy that selects them.
        ratio: Share of the rows of the spans that goes on.
    """

    start: int
    stop: int
    exact_prefix: ReusedSpan | None
    spans: tuple[ReusedSpan, ...]
    num_recomputed: int
    policy: str
    ratio: float

    @property
    def exact_stop(self) -> int:
        """First position whose row is computed at all."""
        return self.start if self.exact_prefix is None else self.exact_prefix.stop

    @property
    def num_candidates(self) -> int:
        """Rows of the spans."""
        return sum(len(span) for span in self.spans)

    @property
    def num_early(self) -> int:
        """Rows of the spans that are computed up to the check layer."""
        if POLICIES[self.policy].skips_full_layers:
            return self.num_recomputed
        remembered = self._num_remembered
        early = early_rows(self.policy, self.ratio, remembered)
        if self.decides_early:  # what is more or fewer than the ratio says counts here too
            early += self.num_recomputed - self._budget(self.num_candidates)
            early = min(remembered, max(0, early))
        return max(early + self.num_candidates - remembered, self.num_recomputed)

    @property
    def num_entering(self) -> int:
        """Rows that enter the first layer, and so the most rows that any layer computes."""
        rows = self.stop - self.exact_stop
        if POLICIES[self.policy].prefills_first:
            return rows
        return rows - (self.num_candidates - self.num_early)

    @property
    def decides_early(self) -> bool:
        """Whether rows with a memory that are computed in the first layer are computed to the end."""
        remembered = self._num_remembered
        early = early_rows(self.policy, self.ratio, remembered)
        return early == self._budget(remembered)

    def _budget(self, num_reused: int) -> int:
        return recompute_budget(self.policy, self.ratio, num_reused)

    @property
    def _num_remembered(self) -> int:
        return sum(len(span) for span in self.spans if span.remembered)

    @property
    def num_dropped(self) -> int:
        """Rows that are not computed to the end because their KV is reused."""
        return self.num_candidates - self.num_recomputed

    def schedule(self, layers: LayerSplit) -> list[int]:
        """Return how many rows of the spans are computed in each layer above the check layer."""
        if POLICIES[self.policy].gradual:
            return keep_schedule(self.policy, self.ratio, self.num_candidates, layers.above)
        return [self.num_recomputed] * layers.above

    def layer_rows(self, layers: LayerSplit) -> int:
        """Return the step's cost: over all layers, how many rows are computed in each.

        The check layer counts with all rows, though most of its work is done for kept rows only.
        """
        rows = self.stop - self.exact_stop
        gone = sum(self.num_candidates - kept for kept in self.schedule(layers))
        gone += (self.num_candidates - self.num_early) * (layers.check + 1)
        return rows * layers.total - gone


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Where a request's KV comes from.

    Attributes:
        exact: KV equal to a full prefill's, for positions [.., exact.stop) that the radix prefix
            does not cover; None if there is none.
        spans: Chunk KV to be blended, ascending, disjoint, after exact.
        computed_from: Positions from here on are always computed: the last token, and every
            token whose logprob the client wants.
        policy: Name of the selection policy.
        ratio: Share of reused tokens that is recomputed.
        sizes: Numbers of rows that the steps may be brought to.
    """

    exact: ReusedSpan | None
    spans: tuple[ReusedSpan, ...]
    computed_from: int
    policy: str
    ratio: float
    sizes: RowSizes = NO_SIZES

    def step(self, start: int, stop: int) -> StepPlan | None:
        """Return what the step over [start, stop) does, or None if it is a plain prefill.

        The last row of a step is always computed, because the engine samples from it.
        """
        limit = min(stop - 1, self.computed_from)
        exact_prefix = self.exact.clip(start, limit) if self.exact is not None else None
        if exact_prefix is not None and exact_prefix.start != start:
            exact_prefix = None
        blended_from = start if exact_prefix is None else exact_prefix.stop
        clipped = (span.clip(blended_from, limit) for span in self.spans)
        spans = tuple(span for span in clipped if span is not None)
        if exact_prefix is None and not spans:
            return None
        num_reused = sum(len(span) for span in spans)
        return StepPlan(
            start=start,
            stop=stop,
            exact_prefix=exact_prefix,
            spans=spans,
            num_recomputed=self._num_recomputed(num_reused, stop - blended_from),
            policy=self.policy,
            ratio=self.ratio,
        )

    def _num_recomputed(self, num_reused: int, num_rows: int) -> int:
        budget = recompute_budget(self.policy, self.ratio, num_reused)
        policy = POLICIES[self.policy]
        if policy.gradual or policy.fixed_ratio is not None:
            return budget
        return self.sizes.snap(budget, num_rows - num_reused, self.ratio)

    def reach(self, start: int, stop: int, max_rows: int) -> int:
        """Return how far a step from start may go, at most to stop.

        At most max_rows rows of the step enter the first layer, or the step is no longer than that.
        Where budgets snap to row sizes, a longer step can enter with a few rows fewer. Then the step
        may end a little before the farthest place.
        """
        low, high = min(start + max_rows, stop), stop + 1
        if self._num_entering(start, stop) <= max_rows:
            return stop
        while high - low > 1:
            middle = (low + high) // 2
            if self._num_entering(start, middle) <= max_rows:
                low = middle
            else:
                high = middle
        return low

    def _num_entering(self, start: int, stop: int) -> int:
        step = self.step(start, stop)
        return stop - start if step is None else step.num_entering

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.fusion.plan import BlendPlan, LayerSplit, ReusedSpan, StepPlan
from sgl_blend.fusion.sources import PoolSlots
from sgl_blend.policies import POLICIES, recompute_budget


def span_at(start: int, length: int, source_start: int, *, remembered: bool = False) -> ReusedSpan:
    """A span whose slot for source position p is 7p + 3, so that slots tell where they belong."""
    path = torch.arange(source_start + length + 2)  # more of the path may be stored
    source = PoolSlots(7 * path + 3)
    return ReusedSpan(start, start + length, source_start, source, start if remembered else None)


@dataclass
class Case:
    """A plan for a request of num_tokens, and steps that together are the request."""

    plan: BlendPlan
    num_tokens: int
    prefix: int
    steps: list[tuple[int, int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    bounds = draw(st.lists(st.integers(0, 120), unique=True, min_size=2, max_size=14).map(sorted))
    num_tokens = draw(st.integers(bounds[-1], 130).filter(bool))
    exact = None
    if draw(st.booleans()):
        length = bounds[1] - bounds[0]
        exact = span_at(bounds[0], length, bounds[0])
        bounds = bounds[1:]
    spans = tuple(
        span_at(start, stop - start, draw(st.integers(0, 1000)), remembered=draw(st.booleans()))
        for start, stop in pairwise(bounds)
        if draw(st.booleans())
    )
    plan = BlendPlan(
        exact=exact,
        spans=spans,
        computed_from=draw(st.integers(0, num_tokens - 1)),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        ratio=draw(st.integers(0, 20)) / 20,
    )
    # What the radix prefix covers is in no step; cuts are where chunked prefill stops.
    prefix = draw(st.integers(0, num_tokens - 1))
    cuts = draw(st.lists(st.integers(prefix + 1, num_tokens), unique=True, max_size=4))
    edges = sorted({prefix, num_tokens, *cuts})
    return Case(plan, num_tokens, prefix, list(pairwise(edges)))


def reused_in(step: StepPlan) -> list[int]:
    """Positions of a window whose KV comes from the pool, head first."""
    runs = ([] if step.exact_prefix is None else [step.exact_prefix]) + list(step.spans)
    return [position for run in runs for position in range(run.start, run.stop)]


def planned(plan: BlendPlan) -> dict[int, int]:
    """The slot that the plan has for a position."""
    runs = ([] if plan.exact is None else [plan.exact]) + list(plan.spans)
    return {
        run.start + offset: int(run.slots[offset]) for run in runs for offset in range(len(run))
    }


@given(cases())
def test_a_window_lies_inside_its_step_in_ascending_order(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        if step is not None:
            positions = reused_in(step)
            assert (step.start, step.stop) == (start, stop)
            assert positions == sorted(set(positions))
            assert all(start <= position < stop for position in positions)
            assert all(len(span) > 0 for span in step.spans)


@given(cases())
def test_the_last_row_of_a_step_is_always_computed(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        assert step is None or stop - 1 not in reused_in(step)


@given(cases())
def test_rows_that_must_be_computed_are_never_reused(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        if step is not None:
            assert all(position < case.plan.computed_from for position in reused_in(step))


@given(cases())
def test_everything_else_that_is_planned_is_reused(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        limit = min(stop - 1, case.plan.computed_from)
        exact = case.plan.exact
        exact_prefix = (
            range(start, min(exact.stop, limit)) if exact and exact.start <= start else range(0)
        )
        chunks = {position for span in case.plan.spans for position in range(span.start, span.stop)}
        wanted = sorted({*exact_prefix, *(p for p in range(start, limit) if p in chunks)})

        assert ([] if step is None else reused_in(step)) == wanted


@given(cases())
def test_a_head_begins_with_its_step(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        if step is not None and step.exact_prefix is not None:
            assert (
                step.exact_prefix.start == start < step.exact_stop == step.exact_prefix.stop < stop
            )
            assert all(span.start >= step.exact_stop for span in step.spans)
        elif step is not None:
            assert step.exact_stop == start


@given(cases())
def test_a_position_keeps_its_slot_and_source_through_every_cut(case: Case) -> None:
    slots = planned(case.plan)
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        for span in () if step is None else (step.exact_prefix, *step.spans):
            if span is not None:
                for offset, slot in enumerate(span.slots.tolist()):
                    assert slot == slots[span.start + offset]
                    assert slot == 7 * (span.source_start + offset) + 3


@given(cases())
def test_counts_add_up_and_the_budget_is_the_policys(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        if step is not None:
            exact_prefix = 0 if step.exact_prefix is None else len(step.exact_prefix)
            assert step.num_candidates + exact_prefix == len(reused_in(step))
            assert step.num_recomputed + step.num_dropped == step.num_candidates
            assert 0 <= step.num_recomputed <= step.num_candidates
            assert step.policy == case.plan.policy
            assert step.num_recomputed == recompute_budget(
                case.plan.policy, case.plan.ratio, step.num_candidates
            )


@given(cases())
def test_the_steps_of_a_request_cover_it_once(case: Case) -> None:
    reused, computed = [], []
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        here = [] if step is None else reused_in(step)
        reused += here
        computed += sorted(set(range(start, stop)) - set(here))

    assert sorted(reused + computed) == list(range(case.prefix, case.num_tokens))
    assert set(reused) <= planned(case.plan).keys()


@given(cases())
def test_a_step_without_reuse_is_a_plain_prefill(case: Case) -> None:
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        assert step is None or reused_in(step)


@given(
    span=st.builds(
        span_at,
        st.integers(0, 50),
        st.integers(1, 40),
        st.integers(0, 90),
        remembered=st.booleans(),
    ),
    bounds=st.tuples(st.integers(-5, 120), st.integers(-5, 120)),
)
def test_clipping_keeps_positions_slots_sources_and_memories_together(
    span: ReusedSpan, bounds: tuple[int, int]
) -> None:
    inside = [p for p in range(span.start, span.stop) if bounds[0] <= p < bounds[1]]

    clipped = span.clip(*bounds)

    if clipped is None:
        assert not inside
    else:
        assert list(range(clipped.start, clipped.stop)) == inside
        assert len(clipped) == len(clipped.slots) == len(inside)
        assert clipped.source_start - span.source_start == clipped.start - span.start
        assert clipped.place == (clipped.start if span.remembered else None)
        assert clipped.slots.tolist() == [
            7 * (p - span.start + span.source_start) + 3 for p in inside
        ]


def test_a_step_that_starts_before_the_exact_kv_computes_it() -> None:
    # Its rows cannot be left out in the middle of a step, only at its head.
    plan = BlendPlan(span_at(4, 4, 4), (span_at(10, 5, 0),), 19, "hkvd", 0.2)

    step = plan.step(2, 20)

    assert step is not None
    assert step.exact_prefix is None
    assert reused_in(step) == list(range(10, 15))


def test_the_picture_of_a_whole_request() -> None:
    plan = BlendPlan(span_at(0, 4, 0), (span_at(6, 5, 100), span_at(11, 5, 50)), 19, "hkvd", 0.2)

    step = plan.step(0, 20)

    assert step is not None
    assert step.exact_stop == 4
    assert [(span.start, span.stop) for span in step.spans] == [(6, 11), (11, 16)]
    assert (step.num_candidates, step.num_recomputed, step.num_dropped) == (10, 2, 8)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_step_of_one_row_reuses_nothing(stop: int) -> None:
    plan = BlendPlan(span_at(0, 10, 0), (), 9, "hkvd", 0.2)
    assert plan.step(stop - 1, stop) is None


@given(cases(), st.integers(1, 130))
def test_a_step_reaches_as_far_as_its_rows_allow(case: Case, max_rows: int) -> None:
    def entering(stop: int) -> int:
        step = case.plan.step(case.prefix, stop)
        return stop - case.prefix if step is None else step.num_entering

    reach = case.plan.reach(case.prefix, case.num_tokens, max_rows)
    assert entering(reach) <= max_rows
    assert reach == case.num_tokens or entering(reach + 1) > max_rows


@given(cases())
def test_no_layer_computes_more_rows_than_enter_the_first(case: Case) -> None:
    layers = LayerSplit(check=2, total=6)
    for start, stop in case.steps:
        step = case.plan.step(start, stop)
        if step is not None and not POLICIES[step.policy].prefills_first:
            others = step.stop - step.exact_stop - step.num_candidates
            assert step.num_entering == others + step.num_early
            assert max(step.schedule(layers)) <= step.num_early


@given(cases(), st.sampled_from([name for name in POLICIES if POLICIES[name].prefills_first]))
def test_who_prefills_in_full_first_computes_every_row(case: Case, policy: str) -> None:
    plan = replace(case.plan, policy=policy)
    for start, stop in case.steps:
        if (step := plan.step(start, stop)) is not None:
            assert step.num_entering == step.stop - step.exact_stop

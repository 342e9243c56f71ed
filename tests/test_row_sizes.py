"""Steps are brought to numbers of rows that a device multiplies well, within a tolerance."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Driver
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.plan import BlendPlan, LayerSplit, ReusedSpan
from sgl_blend.fusion.row_sizes import MAX_RATIO, NO_SIZES, TOLERANCE, RowSizes
from sgl_blend.fusion.sources import PoolSlots
from sgl_blend.policies import NAMED, POLICIES, recompute_budget
from sgl_blend.tuning.row_sizes import BEYOND, MEASURED, measure_sizes, sizes_of

__all__ = ["model_folder", "start_engine"]  # fixtures

LAYERS = LayerSplit(check=2, total=32)
sizes = st.lists(st.integers(1, 3000), max_size=20, unique=True).map(
    lambda found: RowSizes(tuple(sorted(found)))
)
ratios = st.sampled_from([0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 1.0])


def staircase(rows: int, tile: int = 128) -> float:
    """Made-up ms of a layer: whole tiles, as matrix products of few rows on an H200 are expected."""
    return 0.09 + 0.078 * math.ceil(rows / tile)


def curve(time: Callable[[int], float]) -> tuple[list[float], list[float]]:
    return [time(rows) for rows in MEASURED], [time(rows + BEYOND) for rows in MEASURED]


def plan_of(
    num_reused: int, ratio: float, policy: str, found: RowSizes, others: int, remembered: int = 0
) -> BlendPlan:
    path = PoolSlots(torch.arange(num_reused + 1))
    spans = [(0, remembered, 0), (remembered, num_reused, None)]
    return BlendPlan(
        exact=None,
        spans=tuple(ReusedSpan(a, b, a, path, mark) for a, b, mark in spans if a < b),
        computed_from=num_reused + others,
        policy=policy,
        ratio=ratio,
        sizes=found,
    )


def counts(plan: BlendPlan) -> tuple[int, int, list[int]]:
    """Return what a plan recomputes in one step, to the check layer and above."""
    step = plan.step(0, plan.computed_from)
    assert step is not None
    return step.num_recomputed, step.num_early, step.schedule(LAYERS)


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_the_ends_of_tiles_are_found(tile: int) -> None:
    found = sizes_of(*curve(lambda rows: staircase(rows, tile))).sizes
    assert found == tuple(rows for rows in MEASURED if rows % tile == 0)


def test_a_straight_line_has_no_sizes() -> None:
    assert sizes_of(*curve(lambda rows: 0.1 + 0.0006 * rows)) == NO_SIZES


def test_noise_has_no_sizes() -> None:
    flat = [1.0] * len(MEASURED)
    assert sizes_of(flat, [1.0 + 0.015 * (i % 3 - 1) for i in range(len(MEASURED))]) == NO_SIZES


def test_a_step_takes_the_nearest_size() -> None:
    found = RowSizes((384, 512))
    assert found.snap(462, 64, 0.15) == 448  # 526 rows: 14 fewer are a tile fewer
    assert found.snap(436, 64, 0.15) == 448  # 500 rows: 12 more cost nothing
    assert found.snap(384, 64, 0.15) == 384  # 448 rows: nothing is near enough
    assert RowSizes((90, 110)).snap(100, 0, 0.15) == 90  # of two the smaller


@given(st.integers(0, 4000), st.integers(0, 3000), ratios)
def test_no_step_leaves_the_tolerance(num_reused: int, others: int, ratio: float) -> None:
    budget = recompute_budget("hkvd", ratio, num_reused)
    most = TOLERANCE * budget if 0.0 < ratio <= MAX_RATIO else 0.0
    for size in range(max(1, budget + others - 60), budget + others + 60):
        snapped = RowSizes((size,)).snap(budget, others, ratio)
        is_near = abs(size - others - budget) <= most
        assert snapped == (size - others if is_near else budget)
        assert 0 <= snapped <= num_reused


@given(st.integers(-60, 60), st.integers(0, 3000), st.integers(0, 500), ratios, st.booleans())
def test_a_larger_step_never_has_fewer_rows(
    distance: int, num_reused: int, others: int, ratio: float, grows_by_reused: bool
) -> None:
    def rows(reused: int, rest: int) -> int:
        return rest + found.snap(recompute_budget("hkvd", ratio, reused), rest, ratio)

    around = recompute_budget("hkvd", ratio, num_reused) + others
    larger = (num_reused + 1, others) if grows_by_reused else (num_reused, others + 1)
    for size in range(max(1, around - 60), around + 60):
        found = RowSizes(tuple(sorted({size, max(1, size + distance)})))
        assert rows(*larger) >= rows(num_reused, others)


@given(
    sizes,
    st.integers(1, 3000),
    st.floats(0.0, 1.0),
    st.integers(1, 200),
    ratios,
    st.sampled_from(NAMED),
)
def test_counts_of_a_step_fit_together(
    found: RowSizes, num_reused: int, share: float, others: int, ratio: float, policy: str
) -> None:
    trusts = POLICIES[policy].trusts_memory
    remembered = int(share * num_reused) if trusts else 0
    plan = plan_of(num_reused, ratio, policy, found, others, remembered)
    step = plan.step(0, num_reused + others)
    assert step is not None
    assert step.num_recomputed <= step.num_early <= step.num_candidates
    assert step.schedule(LAYERS)[-1] <= step.num_early
    if trusts:  # whoever has no memory must be seen by the check layer
        assert step.num_early >= step.num_candidates - remembered
        decided = step.num_early - (step.num_candidates - remembered)
        assert not step.decides_early or decided <= step.num_recomputed
    if ratio == 1.0:
        assert counts(plan) == counts(
            plan_of(num_reused, ratio, policy, NO_SIZES, others, remembered)
        )


def test_fixed_and_gradual_budgets_stay() -> None:
    found = RowSizes(tuple(range(1, 4000, 7)))
    for policy in ("none", "block", "all", "gradual"):
        budgets = [counts(plan_of(1000, 0.3, policy, which, 50)) for which in (found, NO_SIZES)]
        assert budgets[0] == budgets[1]


def test_only_a_gpu_is_measured() -> None:
    nothing: Any = None  # which is not looked at
    assert measure_sizes(nothing, nothing, torch.device("cpu"), TPGroup()) is NO_SIZES


def _sizes(driver: Driver) -> tuple[list[int], RowSizes]:
    runtime = driver.runtime
    return runtime.describe()["row_sizes"], runtime.admission._sizes


@pytest.mark.engine
def test_a_cpu_server_keeps_its_budgets(start_engine: StartEngine) -> None:
    assert start_engine().call(_sizes) == ([], NO_SIZES)


def _measure_where_it_matters(driver: Driver) -> list[bool]:
    """Compose again on a machine that measures, with and without build first."""
    from unittest.mock import patch

    from sgl_blend import compose_fusion
    from sgl_blend.engine.facts import read_facts
    from sgl_blend.engine.tp_group import this_group
    from sgl_blend.settings.config import BlendConfig

    found = []
    for on_miss in ("compute", "build"):
        config = BlendConfig(enable_blend=True, blend_check_layer=1, blend_on_miss=on_miss)
        facts = read_facts(driver.scheduler)
        with patch.object(compose_fusion, "measure_sizes", lambda *_: RowSizes((128,))):
            fusion = compose_fusion.make_fusion(config, driver.scheduler, facts, this_group())
        found.append(fusion.sizes == RowSizes((128,)))
    return found


@pytest.mark.engine
def test_answers_of_build_first_depend_on_no_times(start_engine: StartEngine) -> None:
    assert start_engine().call(_measure_where_it_matters) == [True, False]

"""The formulas of ``sgl-blend plan-storage``, by hand and by their laws."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.tuning.storage_plan import Demand, Tier, Verdict, plan_storage

DEMAND = Demand(
    kv_bytes_per_token=100_000,
    library_tokens=1_000_000,  # 100 GB
    request_tokens=10_000,  # 1 GB
    request_chunks=10,
    ratio=0.2,
    prefill_tokens_per_s=10_000.0,  # recomputing takes 0.2 s
)
FAST = Tier("fast", 50e9, 1e-5, usd_per_gb_month=2.0)
GOOD = Tier("good", 10e9, 1e-3, usd_per_gb_month=0.1)
SLOW = Tier("slow", 1e9, 3e-2, usd_per_gb_month=0.02)


def demand(**changes: Any) -> Demand:
    fields = {name: getattr(DEMAND, name) for name in Demand.__slots__}
    return Demand(**{**fields, **changes})


def tier(**changes: Any) -> Tier:
    fields = {name: getattr(GOOD, name) for name in Tier.__slots__}
    return Tier(**{**fields, **changes})


def test_the_numbers_by_hand() -> None:
    plan = plan_storage(DEMAND, [SLOW, GOOD, FAST])
    fast, good, slow = plan.tiers
    assert [row.tier.name for row in plan.tiers] == ["fast", "good", "slow"]
    assert DEMAND.recompute_s == pytest.approx(0.2)
    assert [row.load_s for row in plan.tiers] == pytest.approx([0.0201, 0.11, 1.3])
    assert [row.usd_per_month for row in plan.tiers] == pytest.approx([200.0, 10.0, 2.0])
    assert good.needed_bytes_per_s == pytest.approx(1e9 / 0.19)
    assert slow.needed_bytes_per_s is None, "its latency alone takes 0.3 s"
    assert (fast.verdict, good.verdict, slow.verdict) == (
        Verdict.NO_DELAY,
        Verdict.NO_DELAY,
        Verdict.TOO_SLOW,
    )
    assert plan.chosen is good
    assert plan.nearest is None


def test_a_tier_of_exactly_the_needed_bandwidth_adds_no_delay() -> None:
    (row,) = plan_storage(DEMAND, [SLOW, GOOD]).tiers[:1]
    needed = row.needed_bytes_per_s
    assert needed is not None
    assert plan_storage(DEMAND, [tier(bytes_per_s=needed * 1.0001)]).chosen
    assert not plan_storage(DEMAND, [tier(bytes_per_s=needed * 0.9999)]).chosen


def test_a_shared_tier_counts_once_and_divides_its_bandwidth() -> None:
    fleet = demand(servers=8)
    own, shared, few = plan_storage(
        fleet,
        [
            tier(name="own"),
            tier(name="shared", servers=4, bytes_per_s=9e9),
            tier(name="few", servers=4, bytes_per_s=9e9, loads_at_once=2),
        ],
    ).tiers
    assert own.tier.name == "own"
    assert (own.copies, own.stored_bytes) == (8, 800e9)
    assert own.usd_per_month == pytest.approx(80.0)
    assert own.load_s == pytest.approx(0.11)
    shared, few = sorted((shared, few), key=lambda row: -row.load_s)
    assert (shared.copies, shared.stored_bytes) == (2, 200e9)
    assert shared.usd_per_month == pytest.approx(20.0)
    assert shared.load_s == pytest.approx(0.01 + 4 / 9)
    assert shared.needed_bytes_per_s == pytest.approx(4e9 / 0.19)
    assert few.load_s == pytest.approx(0.01 + 2 / 9)


def test_fewer_servers_than_could_share_a_tier() -> None:
    (row,) = plan_storage(demand(servers=3), [tier(servers=4, loads_at_once=4)]).tiers
    assert row.copies == 1
    assert row.load_s == pytest.approx(0.01 + 0.3)
    (row,) = plan_storage(demand(servers=5), [tier(servers=4)]).tiers
    assert row.copies == 2


def test_a_tier_must_hold_the_library() -> None:
    holds, lacks = (tier(name=str(gb), capacity_bytes=gb * 1e9) for gb in (100, 99))
    assert plan_storage(DEMAND, [holds]).chosen
    plan = plan_storage(DEMAND, [lacks, FAST])
    assert plan.chosen is not None
    assert plan.chosen.tier is FAST
    assert {row.tier.name: row.verdict for row in plan.tiers}["99"] is Verdict.TOO_SMALL


def test_what_is_only_too_small_comes_nearer_than_what_is_too_slow() -> None:
    small, smaller = (tier(name=str(gb), capacity_bytes=gb * 1e9) for gb in (50, 40))
    plan = plan_storage(DEMAND, [SLOW, smaller, small])
    assert plan.chosen is None
    assert plan.nearest is not None
    assert plan.nearest.tier.name == "50"
    slower = plan_storage(DEMAND, [SLOW, tier(name="2", bytes_per_s=2e9)])
    assert slower.nearest is not None
    assert slower.nearest.tier.name == "2"


def test_without_prices_the_slowest_that_suits_is_chosen() -> None:
    speeds = (30e9, 10e9, 1e9)
    tiers = [tier(name=f"{s / 1e9:g}", bytes_per_s=s, usd_per_gb_month=None) for s in speeds]
    plan = plan_storage(DEMAND, tiers)
    assert plan.chosen is not None
    assert plan.chosen.tier.name == "10"


positive = st.floats(1e-3, 1e3)


@given(
    st.lists(
        st.tuples(positive, st.floats(0, 0.1), positive, st.integers(1, 8)), min_size=1, max_size=6
    ),
    st.floats(0, 1),
    st.integers(1, 20),
)
def test_the_choice_suits_and_nothing_that_suits_is_cheaper(
    rows: list[tuple[float, float, float, int]], ratio: float, servers: int
) -> None:
    tiers = [
        Tier(str(i), gb * 1e9, latency, price, servers=shared)
        for i, (gb, latency, price, shared) in enumerate(rows)
    ]
    plan = plan_storage(demand(ratio=ratio, servers=servers), tiers)
    suitable = [row for row in plan.tiers if row.load_s <= ratio * 1.0]
    assert bool(suitable) == (plan.chosen is not None) == (plan.nearest is None)
    if plan.chosen is not None:
        assert plan.chosen in suitable
        prices = [row.usd_per_month for row in suitable if row.usd_per_month is not None]
        assert plan.chosen.usd_per_month == min(prices)
    assert [row.load_s for row in plan.tiers] == sorted(row.load_s for row in plan.tiers)

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.policies import (
    EXACT,
    NAMED,
    POLICIES,
    keep_schedule,
    recompute_budget,
)
from sgl_blend.policies.deviation import k_deviation, v_deviation
from sgl_blend.policies.query import question_attention
from sgl_blend.policies.spec import Sees

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=6)
# Few distinct values, so that ties are the rule.
tied_scores = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=60)
# Ratios as people write them, so that an exact fraction tells what was meant.
ratios = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
policies = st.sampled_from(sorted(POLICIES))
chosen_ratio = st.sampled_from(sorted(p for p in POLICIES if POLICIES[p].fixed_ratio is None))
# Hybrid deals its budget out anew: with one token more, every chunk may get a first token more.
growing = chosen_ratio.filter(lambda name: not name.endswith("hybrid"))


def scores_for(chunks: list[int]) -> torch.Tensor:
    return torch.rand(sum(chunks), generator=torch.Generator().manual_seed(len(chunks)))


@given(values=tied_scores, data=st.data())
def test_hkvd_takes_the_largest_scores_and_of_equal_ones_the_earlier(
    values: list[float], data: st.DataObject
) -> None:
    budget = data.draw(st.integers(0, len(values)))

    chosen = POLICIES["hkvd"].select(torch.tensor(values), [len(values)], budget)

    by_rank = sorted(range(len(values)), key=lambda token: (-values[token], token))
    assert chosen.tolist() == sorted(by_rank[:budget])


def test_ties_among_many_tokens_go_to_the_earlier() -> None:
    assert POLICIES["hkvd"].select(torch.ones(10_007), [10_007], 500).tolist() == list(range(500))


@given(chunks=lengths, data=st.data())
def test_first_k_takes_the_heads_of_the_chunks(chunks: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, sum(chunks)))

    chosen = set(POLICIES["first-k"].select(None, chunks, budget).tolist())

    # Deal tokens out to the chunks in turn, like cards, until the budget is used up.
    heads = [0] * len(chunks)
    while sum(heads) < budget:
        for index, length in enumerate(chunks):
            if heads[index] < length and sum(heads) < budget:
                heads[index] += 1
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    assert chosen == {
        start + offset for start, head in zip(starts, heads, strict=True) for offset in range(head)
    }


def test_first_k_is_equally_many_of_every_chunk() -> None:
    assert POLICIES["first-k"].select(None, [10, 10, 10], 6).tolist() == [0, 1, 10, 11, 20, 21]


def test_first_k_gives_the_share_of_a_short_chunk_to_the_others() -> None:
    assert POLICIES["first-k"].select(None, [1, 5], 4).tolist() == [0, 1, 2, 3]


@given(chunks=lengths, data=st.data())
def test_random_is_the_same_every_time(chunks: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, sum(chunks)))
    first = POLICIES["random"].select(None, chunks, budget)
    torch.manual_seed(data.draw(st.integers(0, 1000)))

    assert torch.equal(POLICIES["random"].select(None, chunks, budget), first)


def test_random_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()

    POLICIES["random"].select(None, [100], 10)

    assert torch.equal(torch.get_rng_state(), before)


def test_random_is_spread_over_the_chunks() -> None:
    chosen = POLICIES["random"].select(None, [500, 500], 100)
    assert 30 <= int((chosen < 500).sum()) <= 70


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_returns_distinct_ascending_tokens_for_every_budget(policy: str) -> None:
    chunks = [3, 1, 7, 2]
    for budget in range(14):
        chosen = POLICIES[policy].select(scores_for(chunks), chunks, budget)

        assert chosen.dtype == torch.int64
        assert chosen.shape == (budget,)
        assert (chosen.diff() > 0).all()
        assert all(0 <= token < 13 for token in chosen.tolist())


@given(policy=growing, chunks=lengths, pair=st.tuples(ratios, ratios))
def test_a_larger_ratio_only_adds_tokens(
    policy: str, chunks: list[int], pair: tuple[float, float]
) -> None:
    scores, select = scores_for(chunks), POLICIES[policy].select

    fewer, more = (
        set(select(scores, chunks, recompute_budget(policy, ratio, sum(chunks))).tolist())
        for ratio in sorted(pair)
    )

    assert fewer <= more


@given(chunks=lengths, ratio=ratios)
def test_none_takes_nothing_and_all_takes_everything(chunks: list[int], ratio: float) -> None:
    assert recompute_budget("none", ratio, sum(chunks)) == 0
    assert recompute_budget("block", ratio, sum(chunks)) == 0
    assert recompute_budget("all", ratio, sum(chunks)) == sum(chunks)


@given(policy=chosen_ratio, ratio=ratios, num_reused=st.integers(0, 200_000))
def test_the_budget_is_the_exact_share_rounded_up(
    policy: str, ratio: float, num_reused: int
) -> None:
    meant = math.ceil(Fraction(str(ratio)) * num_reused)
    assert recompute_budget(policy, ratio, num_reused) == meant


@pytest.mark.parametrize(
    ("ratio", "num_reused", "budget"),
    [
        (0.15, 20, 3),
        (0.07, 100, 7),  # 7.000000000000001 in floating point
        (0.15, 21, 4),
        (0.15, 1, 1),
        (1e-300, 255, 1),
        (0.0, 1000, 0),
        (1.0, 1000, 1000),
        (0.5, 0, 0),
    ],
)
def test_the_budget_of(ratio: float, num_reused: int, budget: int) -> None:
    assert recompute_budget("hkvd", ratio, num_reused) == budget


@given(policy=policies, pair=st.tuples(st.floats(0, 1), st.floats(0, 1)), n=st.integers(0, 10_000))
def test_a_larger_ratio_never_has_a_smaller_budget(
    policy: str, pair: tuple[float, float], n: int
) -> None:
    low, high = sorted(pair)
    budgets = recompute_budget(policy, low, n), recompute_budget(policy, high, n)
    assert 0 <= budgets[0] <= budgets[1] <= n


def test_only_policies_that_need_scores_see_anything() -> None:
    known = {
        "hkvd": (Sees.LAYER, v_deviation),
        "hkvd-k": (Sees.LAYER, k_deviation),
        "gradual": (Sees.LAYER, v_deviation),
        "hybrid": (Sees.LAYER, v_deviation),
        "query-aware": (Sees.LAYER, question_attention),
        "edge": (Sees.NOTHING, None),
        "first-k": (Sees.NOTHING, None),
        "random": (Sees.NOTHING, None),
        "none": (Sees.NOTHING, None),
        "block": (Sees.NOTHING, None),
        "all": (Sees.NOTHING, None),
        "oracle": (Sees.PREFILL, v_deviation),
    }
    assert {name: (POLICIES[name].sees, POLICIES[name].score) for name in known} == known


def test_every_policy_that_drops_rows_has_an_exact_twin_for_evaluation_only() -> None:
    twins = {name for name in POLICIES if name.startswith(EXACT)}
    assert twins == {EXACT + name for name in NAMED if name not in ("all", "oracle")}
    for name in twins:
        twin, policy = POLICIES[name], POLICIES[name.removeprefix(EXACT)]
        assert twin.evaluation_only
        assert twin.true_kv
        assert replace(twin, evaluation_only=False, true_kv=False) == policy


def test_edge_takes_both_ends_of_every_chunk() -> None:
    assert POLICIES["edge"].select(None, [5, 4], 4).tolist() == [0, 4, 5, 8]
    assert POLICIES["edge"].select(None, [5, 4], 9).tolist() == list(range(9))
    assert POLICIES["edge"].select(None, [1, 6], 3).tolist() == [0, 1, 6]


# --- how many in which layer ---


@given(policy=policies, ratio=ratios, n=st.integers(0, 5000), layers=st.integers(1, 80))
def test_a_schedule_never_rises_and_stays_within_the_tokens(
    policy: str, ratio: float, n: int, layers: int
) -> None:
    schedule = keep_schedule(policy, ratio, n, layers)
    assert len(schedule) == layers
    assert all(0 <= count <= n for count in schedule)
    assert schedule == sorted(schedule, reverse=True)


@given(policy=policies, ratio=ratios, n=st.integers(0, 5000), layers=st.integers(1, 80))
def test_the_mean_of_a_schedule_is_the_budget(
    policy: str, ratio: float, n: int, layers: int
) -> None:
    schedule = keep_schedule(policy, ratio, n, layers)
    assert abs(sum(schedule) / layers - recompute_budget(policy, ratio, n)) <= 1.0


def test_gradual_falls_from_one_and_a_half_to_half_its_ratio() -> None:
    assert keep_schedule("gradual", 0.2, 1000, 5) == [300, 250, 200, 150, 100]
    assert keep_schedule("hkvd", 0.2, 1000, 5) == [200] * 5


def test_gradual_cannot_begin_with_more_than_everything() -> None:
    assert keep_schedule("gradual", 0.9, 100, 3) == [100, 90, 80]
    assert keep_schedule("gradual", 1.0, 100, 3) == [100, 100, 100]
    assert keep_schedule("gradual", 0.0, 100, 3) == [0, 0, 0]

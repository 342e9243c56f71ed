"""The formulas of the loading controller, against slower ways to compute the same."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading_cases import FLOOR, KV_BYTES, LINKS, MODELS, SPEEDS, STEPS, a_chunk, prompts, times

from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.load_choice import Ratios, choose
from sgl_blend.tuning.loading import (
    Chunk,
    Links,
    ModelTimes,
    Place,
    Prompt,
    Step,
    hiding_ratio,
    num_recomputed,
    seconds_of,
    step_seconds,
    steps_of,
)


def recurrence(step: Step, ratio: float, model: ModelTimes, host: LinkSpeed) -> float:
    """Compute F_(L-1) layer by layer, as the formula stands in the docstring."""
    kept = math.ceil(ratio * step.num_reused - 1e-9)
    early = max(kept, math.ceil(model.early_share * step.num_reused - 1e-9))
    first_waiting = model.check_layer if model.early_share == 1.0 else 0
    ended = 0.0
    for layer in range(model.num_layers):
        rows = step.num_computed + (early if layer <= model.check_layer else kept)
        if layer >= first_waiting and step.num_reused:
            arrived = 0.0
            if step.num_loaded:
                moved = (layer + 1) * step.num_loaded * model.kv_bytes
                arrived = host.latency_s + moved / host.bytes_per_s
            ended = max(ended, arrived + model.copy_s(step.num_reused))
        ended += model.layer_s(rows)
    return ended + (model.step_s if step.num_reused + step.num_computed else 0.0)


# --- one step ---


@given(STEPS, st.floats(0, 1), MODELS, SPEEDS)
def test_a_step_ends_when_its_layers_say_so(
    step: Step, ratio: float, model: ModelTimes, host: LinkSpeed
) -> None:
    found = step_seconds(step, ratio, model, host)
    assert found == pytest.approx(recurrence(step, ratio, model, host), rel=1e-9)


@given(STEPS, st.floats(0, 1), MODELS, SPEEDS, st.floats(1, 10))
def test_a_faster_link_never_makes_a_step_slower(
    step: Step, ratio: float, model: ModelTimes, host: LinkSpeed, faster: float
) -> None:
    better = LinkSpeed(host.latency_s / faster, host.bytes_per_s * faster)
    now, then = (step_seconds(step, ratio, model, link) for link in (host, better))
    assert then <= now * (1 + 1e-12)


def test_loading_and_computing_overlap() -> None:
    # 1000 tokens: 4.096 MB a layer, 4.096 ms at 1 GB/s; 150 + 50 rows take 0.2 ms, 1050 rows 1.05.
    model, host = times(), LinkSpeed(1e-3, 1e9)
    bound_by_load = step_seconds(Step(50, 1000, 1000), 0.15, model, host)
    assert bound_by_load == pytest.approx(1e-3 + 32 * 4.096e-3 + 0.2e-3)
    bound_by_compute = step_seconds(Step(50, 1000, 1000), 0.15, model, LinkSpeed(1e-6, 1e11))
    assert bound_by_compute == pytest.approx(3 * 1.05e-3 + 29 * 0.2e-3)
    on_device = step_seconds(Step(50, 1000), 0.15, model, host)
    assert on_device == pytest.approx(bound_by_compute), "what is on the device waits for nothing"


def test_recomputed_tokens_are_counted_as_the_policies_count_them() -> None:
    from sgl_blend.policies import recompute_budget

    for ratio, reused in itertools.product((0.0, 0.15, 0.3, 0.5, 1.0), (0, 1, 20, 333, 1000)):
        assert num_recomputed(ratio, reused) == recompute_budget("hkvd", ratio, reused)


# --- the ratio ---


@given(STEPS, MODELS, st.floats(0, 0.1))
def test_the_hiding_ratio_is_the_largest_that_hides(
    step: Step, model: ModelTimes, layer_load_s: float
) -> None:
    ratio = hiding_ratio(step, model, layer_load_s)
    count = num_recomputed(ratio, step.num_reused)
    if count:
        assert model.layer_s(count + step.num_computed) <= layer_load_s
    if count < step.num_reused:
        assert model.layer_s(count + 1 + step.num_computed) > layer_load_s


@pytest.mark.parametrize(("share", "expected"), [(0.1, 0.15), (0.3, 0.3), (0.9, 0.5)])
def test_the_used_ratio_flips_at_the_predicted_bandwidth(share: float, expected: float) -> None:
    # At this bandwidth a layer of 4000 tokens loads while share * 4000 + 20 rows are computed.
    bandwidth = 4000 * KV_BYTES / (1e-6 * (share * 4000 + 20))
    prompt = Prompt((a_chunk(4000, Place.HOST),), 20)
    links = Links(LinkSpeed(1e-5, bandwidth))
    model = times(early=0.0)  # no layer computes more than the others
    choice = choose(prompt, model, links, Ratios(0.15))
    assert choice.loaded == (0,)
    assert choice.ratio == pytest.approx(expected, abs=2e-3)
    on_device = Prompt((a_chunk(4000, Place.DEVICE),), 20)
    assert choose(on_device, model, links, Ratios(0.15)).ratio == 0.15, "nothing is loaded"


def test_nothing_hides_behind_a_load_that_the_first_layers_outlast() -> None:
    # A layer loads in 1 ms, and 980 tokens could be computed meanwhile. But when the check layer
    # ends, after 3 x 4.02 ms, 12 of 16 layers are there: from then on computing never waits.
    model = times(layers=16)
    links = Links(LinkSpeed(1e-5, 4000 * KV_BYTES / 1e-3))
    prompt = Prompt((a_chunk(4000, Place.HOST),), 20)
    assert hiding_ratio(Step(20, 4000, 4000), model, 1e-3) == pytest.approx(0.245)
    choice = choose(prompt, model, links, Ratios(0.15))
    assert choice.ratio == pytest.approx(0.15, abs=1e-3)
    assert choice.seconds == pytest.approx(3 * 4.02e-3 + 13 * 0.62e-3, rel=0.01)


def test_no_ratio_makes_loading_slower_than_computing_all() -> None:
    # One layer stands above the check layer, and it starts after 3 x 3.75 + 4.02 ms at any ratio. So
    # 0.81 ms of the 16.08 ms for computing all are left for it.
    model = times(layers=4, check=2)
    links = Links(LinkSpeed(1e-6, 4000 * KV_BYTES / 3.75e-3))
    prompt = Prompt((a_chunk(4000, Place.HOST),), 20)
    choice = choose(prompt, model, links, Ratios(0.15))
    assert choice.compute_all_s == pytest.approx(16.08e-3)
    assert choice.seconds <= choice.compute_all_s
    assert choice.ratio == pytest.approx((0.81 - 0.02) / 4, abs=3e-3)


def test_a_store_hides_no_recompute() -> None:
    links = Links(LinkSpeed(1e-5, 1e12), LinkSpeed(1e-5, 1e10))
    choice = choose(Prompt((a_chunk(4000, Place.STORAGE),), 20), times(), links, Ratios(0.15))
    assert (choice.loaded, choice.ratio) == ((0,), 0.15)


@given(prompts(6), MODELS, LINKS)
def test_a_raised_ratio_costs_nothing_before_the_last_layer(
    prompt: Prompt, model: ModelTimes, links: Links
) -> None:
    fixed, free = (choose(prompt, model, links, ratios) for ratios in (FLOOR, Ratios(0.15)))
    assert 0.15 <= free.ratio <= 0.5
    assert free.loaded == fixed.loaded
    steps = steps_of(prompt, free.loaded, links, stepwise=free.stepwise)
    last = steps[-1]
    more_s = math.fsum(
        sign * model.layer_s(num_recomputed(ratio, last.num_reused) + last.num_computed)
        for sign, ratio in ((1, free.ratio), (-1, 0.15))
    )
    assert free.seconds <= (fixed.seconds + more_s) * (1 + 1e-8)
    assert free.seconds <= free.compute_all_s
    assert free.seconds == pytest.approx(seconds_of(steps, free.ratio, model, links.host))


# --- the store ---


def test_steps_end_before_awaited_chunks() -> None:
    places = (Place.HOST, Place.TEXT, Place.STORAGE, Place.DEVICE, Place.STORAGE)
    prompt = Prompt(tuple(Chunk(100 + i, place, 10**6) for i, place in enumerate(places)), 7)
    links = Links(LinkSpeed(1e-3, 1e10), LinkSpeed(0.01, 1e8), storage_queue_s=0.5)
    steps = steps_of(prompt, {0, 2, 4}, links, stepwise=True)
    assert [(step.num_computed, step.num_reused, step.num_loaded) for step in steps] == [
        (101, 100, 100),
        (0, 205, 102),
        (7, 104, 104),
    ]
    assert [step.start_s for step in steps] == pytest.approx([0.0, 0.52, 0.54])
    (whole,) = steps_of(prompt, {0, 2, 4}, links, stepwise=False)
    assert (whole.num_computed, whole.num_reused, whole.num_loaded) == (108, 409, 306)
    assert whole.start_s == pytest.approx(0.54)
    assert steps_of(prompt, {2}, links, stepwise=True)[0] == Step(201, 0, 0, 0.0)
    rest = Prompt(prompt.chunks[2:], 7)
    assert len(steps_of(rest, {0}, links, stepwise=True)) == 1, "nothing stands before the chunk"


def test_an_exact_chunk_is_brought_and_not_computed() -> None:
    places = (Place.STORAGE, Place.STORAGE, Place.HOST)
    first, *others = [Chunk(100 + i, place, 10**6) for i, place in enumerate(places)]
    prompt = Prompt((replace(first, is_exact=True), *others), 7)
    links = Links(LinkSpeed(1e-3, 1e10), LinkSpeed(0.01, 1e8))
    (step,) = steps_of(prompt, {0, 1, 2}, links, stepwise=True)
    # Nothing is left to do before the second one comes.
    assert (step.num_computed, step.num_reused, step.num_loaded) == (7, 203, 303)
    assert step.start_s == pytest.approx(0.04)
    (without,) = steps_of(prompt, {2}, links, stepwise=True)
    assert (without.num_computed, without.num_reused) == (208, 102)


def test_pieces_pay_where_a_step_costs_less_than_it_hides() -> None:
    chunks = tuple(a_chunk(1000, Place.STORAGE) for _ in range(4))
    links = Links(LinkSpeed(1e-5, 1e12), LinkSpeed(1e-3, 1e9))
    waits = [
        choose(Prompt(chunks, 20), times(1e-5, step=step_s), links, FLOOR).stepwise
        for step_s in (0.0, 0.01, 1.0)
    ]
    assert waits == [True, True, False]


def test_steps_wait_for_each_other_and_for_their_chunks() -> None:
    model, host = times(1e-3, layers=1, check=0), LinkSpeed(1e-6, 1e12)
    early, late = Step(100, start_s=0.02), Step(200, start_s=0.5)
    assert seconds_of([early, late], 0.15, model, host) == pytest.approx(0.7)
    assert seconds_of([early, Step(200, start_s=0.03)], 0.15, model, host) == pytest.approx(0.32)


def test_waiting_is_worth_as_long_as_computing_would_take() -> None:
    prompt = Prompt((a_chunk(4000, Place.STORAGE),), 20)
    model = times()
    links = Links(LinkSpeed(1e-5, 1e11), LinkSpeed(1e-3, 1e10))
    choice = choose(prompt, model, links, FLOOR)
    assert choice.wait_s == pytest.approx(1e-3 + 4000 * KV_BYTES * 32 / 1e10)
    slower = Links(links.host, links.storage, choice.patience_s - choice.wait_s - 1e-6)
    assert choose(prompt, model, slower, FLOOR).loaded == (0,)
    too_slow = Links(links.host, links.storage, choice.patience_s - choice.wait_s + 1e-6)
    assert choose(prompt, model, too_slow, FLOOR).loaded == ()

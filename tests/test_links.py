"""The speed of a link, from a trial and from every load."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.tuning.links import LinkClock, LinkSpeed, TimedLoad, deadline_s, fit_speed


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10.0**power)


@given(magnitudes(-5, -1), magnitudes(7, 11), st.integers(0, 4))
def test_a_trial_finds_latency_and_bandwidth_in_spite_of_a_stall(
    latency: float, bandwidth: float, stalled: int
) -> None:
    link = LinkSpeed(latency, bandwidth)
    small, large = 4096, int(bandwidth * latency * 50) + 10**6
    sizes = (small, small, small, large, large, large)
    trial = [
        TimedLoad(n, link.seconds(n) * (9.0 if i == stalled else 1.0)) for i, n in enumerate(sizes)
    ]
    found = fit_speed(trial)
    assert found.latency_s == pytest.approx(latency, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(bandwidth, rel=1e-3)


def test_a_trial_that_noise_drowns_still_gives_a_speed() -> None:
    found = fit_speed([TimedLoad(1000, 0.02), TimedLoad(2000, 0.01)])
    assert found.latency_s == pytest.approx(0.0075)
    assert found.bytes_per_s == pytest.approx(200_000)


def test_what_a_trial_needs() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        fit_speed([TimedLoad(5, 1.0), TimedLoad(5, 2.0)])
    for num_bytes, seconds in ((0, 1.0), (5, 0.0), (5, math.inf), (5, math.nan)):
        with pytest.raises(ValueError, match="at least 1 byte and some time"):
            TimedLoad(num_bytes, seconds)


LARGE = 10_000_000
GUESS = LinkSpeed(1e-3, 1e9)


def timed(link: LinkSpeed, num_bytes: int = LARGE, factor: float = 1.0) -> TimedLoad:
    return TimedLoad(num_bytes, link.seconds(num_bytes) * factor)


def test_small_loads_teach_the_latency_and_large_ones_the_bandwidth() -> None:
    draw, clock, link = random.Random(3), LinkClock(LinkSpeed(0.1, 1e7)), LinkSpeed(2e-3, 2e9)
    for _ in range(120):
        clock.update(timed(link, draw.choice([20_000, 10**6, 10**8]), draw.uniform(0.9, 1.1)))
    assert clock.speed.latency_s == pytest.approx(2e-3, rel=0.15)
    assert clock.speed.bytes_per_s == pytest.approx(2e9, rel=0.15)


def test_a_latency_that_rises_is_seen_though_most_loads_are_large() -> None:
    # Beside large loads, which hardly notice, a small one would always be the odd one out.
    clock, link = LinkClock(GUESS), LinkSpeed(1e-2, 1e9)
    for _ in range(8):
        for num_bytes in (10**9, 10**9, 10**4):
            clock.update(timed(link, num_bytes))
    assert clock.speed.latency_s == pytest.approx(1e-2, rel=0.1)
    assert clock.speed.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_no_load_moves_an_estimate_by_more_than_a_bound() -> None:
    clock = LinkClock(GUESS)
    for _ in range(2):
        clock.update(timed(GUESS, factor=1e6))
    assert clock.speed.seconds(LARGE) < 10 * GUESS.seconds(LARGE)
    for _ in range(100):
        clock.update(TimedLoad(1, 1e-12))
    assert clock.speed.latency_s >= 1e-6


def test_one_stalled_load_teaches_nothing() -> None:
    clock = LinkClock(GUESS)
    for factor in (100.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1.0):
        clock.update(timed(GUESS, factor=factor))
        assert clock.speed.seconds(LARGE) == pytest.approx(GUESS.seconds(LARGE))


def test_a_slow_down_shows_within_a_few_loads() -> None:
    clock, slow = LinkClock(GUESS), LinkSpeed(1e-3, 1e8)
    clock.update(timed(GUESS))
    for _ in range(4):
        clock.update(timed(slow))
    assert clock.speed.seconds(LARGE) == pytest.approx(slow.seconds(LARGE), rel=0.25)
    for _ in range(6):
        clock.update(timed(GUESS))
    assert clock.speed.seconds(LARGE) == pytest.approx(GUESS.seconds(LARGE), rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 10**9), magnitudes(-6, 3)), max_size=30))
def test_an_estimate_stays_a_speed_whatever_was_measured(loads: list[tuple[int, float]]) -> None:
    clock = LinkClock(GUESS)
    for num_bytes, seconds in loads:
        clock.update(TimedLoad(num_bytes, seconds))
        assert 0 < clock.speed.latency_s < math.inf
        assert 0 < clock.speed.bytes_per_s < math.inf


def test_a_deadline_leaves_room_for_a_load_of_twice_the_time() -> None:
    assert deadline_s(0.2) == pytest.approx(0.45)
    assert deadline_s(0.0) == pytest.approx(0.05)

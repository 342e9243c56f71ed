"""Bootstrap intervals: how often they hold the true mean, and their limits."""

import numpy as np
import pytest

from sgl_blend.commands.common.bootstrap import mean_interval


def test_the_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(7)
    num_trials, truth = 200, 0.7
    held = 0
    for trial in range(num_trials):
        low, high = mean_interval([float(x) for x in draw.random(80) < truth], seed=trial)
        held += low <= truth <= high
    # 95 % of 200 is 190 with a standard deviation of 3; the percentile method falls a little short.
    assert 180 <= held <= 199


def test_the_interval_is_about_two_standard_errors_wide_on_either_side() -> None:
    values = list(np.random.default_rng(0).normal(3.0, 2.0, size=400))
    low, high = mean_interval(values, seed=0)
    error = float(np.std(values)) / 20
    assert low == pytest.approx(np.mean(values) - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(np.mean(values) + 1.96 * error, abs=0.25 * error)


def test_equal_values_leave_no_doubt() -> None:
    assert mean_interval([1.0] * 9, seed=3) == (1.0, 1.0)
    assert mean_interval([0.25], seed=3) == (0.25, 0.25)


def test_the_seed_decides_the_interval() -> None:
    values = [float(x) for x in np.random.default_rng(0).normal(size=50)]
    assert mean_interval(values, seed=1) == mean_interval(values, seed=1)
    assert mean_interval(values, seed=1) != mean_interval(values, seed=2)

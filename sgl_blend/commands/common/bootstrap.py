"""How sure a figure is: percentile bootstrap for means and medians, exact bounds for shares."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95

Interval = tuple[float, float]
"""Lower and upper end."""


def mean_interval(values: Sequence[float], seed: int) -> Interval:
    """Return the bootstrap interval of a mean (Efron's percentile method).

    For the difference of two means over the same items, pass the differences item by item.

    Args:
        values: One figure per item, at least one.
        seed: The same seed and values give the same interval.
    """
    return _interval(values, np.mean, seed)


def median_interval(values: Sequence[float], seed: int) -> Interval:
    """Return the bootstrap interval of a median; arguments as mean_interval's."""
    return _interval(values, np.median, seed)


def share_bounds(count: int, total: int) -> Interval:
    """Return the ends that a true share lies above and below with 95 % each (Clopper-Pearson).

    Each end is exact and one-sided, for a test that uses only one of them. Unlike the bootstrap
    they know that what was never seen in a few items may still happen: 0 of 64 leaves up to 4.6 %.

    Args:
        count: Items that have the property.
        total: Items, at least one.
    """
    return _low_end(count, total), 1.0 - _low_end(total - count, total)


def _low_end(count: int, total: int) -> float:
    """Return the share at which so many hits or more have a chance of 5 %."""
    hits = np.arange(count, total + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])
    ways = factorials[total] - factorials[hits] - factorials[total - hits]
    low, high = 0.0, float(count > 0)
    for _ in range(50):
        share = (low + high) / 2
        if share in (low, high):
            break
        logs = ways + hits * math.log(share) + (total - hits) * math.log1p(-share)
        low, high = (share, high) if np.exp(logs).sum() < 1 - CONFIDENCE else (low, share)
    return low


def _interval(
    values: Sequence[float], statistic: Callable[[np.ndarray], np.floating[Any]], seed: int
) -> Interval:
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    found = [
        statistic(sample[generator.integers(len(sample), size=len(sample))])
        for _ in range(NUM_RESAMPLES)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)

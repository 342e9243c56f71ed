"""How sure a mean or median is: percentile bootstrap intervals."""

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

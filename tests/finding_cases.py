"""What tests of finding share: random prompts, and a clock that knows how fast the machine is."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

_USUAL_MS = 0.25
"""What the fixed arithmetic takes on the machine on which the bars were set, in milliseconds."""


def random_tokens(seed: int, size: int, vocabulary: int = 100_000) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocabulary, size, dtype=np.int32)


def milliseconds(work: Callable[[], object], times: int = 50) -> float:
    """Return the time that this thread spends on some work: the lowest median of five groups.

    A neighbour on the machine's cache or memory makes some groups slow, and none too fast.
    """
    taken = []
    for _ in range(times):
        begin = time.thread_time()
        work()
        taken.append(time.thread_time() - begin)
    return 1e3 * float(np.median(np.reshape(taken, (5, -1)), axis=1).min())


def slowness() -> float:
    """Return how much slower than usual the machine is now, at least 1: by a fixed arithmetic."""
    numbers = np.arange(8_000, dtype=np.uint64)

    def arithmetic() -> None:
        mixed = numbers
        for _ in range(20):
            mixed = (mixed * np.uint64(0x9E3779B97F4A7C15)) ^ (mixed >> np.uint64(29))

    return max(1.0, milliseconds(arithmetic) / _USUAL_MS)

"""How long something takes on this machine."""

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a piece of work, the device's part included, after one warm-up."""
    times: list[float] = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])

"""Which numbers of rows this device multiplies well, measured at start on the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_blend.engine.models import model_dtype, row_modules
from sgl_blend.engine.objects import DecoderLayer, ModelRunner
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.row_sizes import NO_SIZES, RowSizes
from sgl_blend.tuning.timing import median_seconds

MEASURED = (*range(64, 1024, 64), *range(1024, 2049, 128))
"""Numbers of rows that may end a row of tiles. Above, a tile more is less than what the noise is."""
BEYOND = 16
"""Rows by which a number is exceeded to see what the next tile costs."""
_MIN_STEP = 3.0
"""The next tile costs at least so many times what so many rows cost in the mean."""
_MIN_SHARE = 0.02
"""And at least this share of the time up to there; less is noise."""
_REPEATS = 5
_CALLS = 4
"""Calls in one measurement, so that the launch of the first hardly counts."""


def sizes_of(times: Sequence[float], beyond: Sequence[float]) -> RowSizes:
    """Return the numbers of rows that it pays to stop at.

    Args:
        times: Seconds for each number of MEASURED.
        beyond: Seconds for BEYOND rows more.
    """
    mean = BEYOND * (times[-1] - times[0]) / (MEASURED[-1] - MEASURED[0])
    steps = zip(MEASURED, times, beyond, strict=True)
    return RowSizes(
        tuple(
            rows
            for rows, time, longer in steps
            if longer - time > max(_MIN_STEP * max(mean, 0.0), _MIN_SHARE * time)
        )
    )


@torch.inference_mode()
def measure_sizes(
    runner: ModelRunner, layer: DecoderLayer, device: torch.device, tp_group: TPGroup
) -> RowSizes:
    """Measure what a decoder layer does to each row by itself; every rank must take part.

    Only a GPU has tiles to fill. Elsewhere there are no sizes.

    Args:
        runner: SGLang's ModelRunner, model loaded.
        layer: One of the model's decoder layers.
        device: Where it lies.
        tp_group: Every rank uses the first one's times.
    """
    if device.type != "cuda":
        return NO_SIZES
    parts = row_modules(runner, layer)
    dtype = model_dtype(runner)

    def work(rows: int) -> Callable[[], object]:
        inputs = [torch.randn(rows, width, device=device).to(dtype) for _, width in parts]
        calls = [(module, x) for (module, _), x in zip(parts, inputs, strict=True)] * _CALLS
        return lambda: [module(x) for module, x in calls]

    found = [
        median_seconds(work(rows + more), device, _REPEATS)
        for more in (0, BEYOND)
        for rows in MEASURED
    ]
    agreed = tp_group.agree(found)
    return sizes_of(agreed[: len(MEASURED)], agreed[len(MEASURED) :])

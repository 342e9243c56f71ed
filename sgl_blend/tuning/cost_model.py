"""When blending is worth it: what a plan saves against what it costs, in this machine's own times.

Saved is linear work: rows that are dropped do not pass the layers above the check layer. Paid are the
selection, a second plan for attention, and for every layer above a copy of all reused KV. All of it is
measured once at start, on the loaded model's own modules and its own KV pool, for several numbers of
rows, because a small matrix product on a GPU takes as long as one of a single row. Attention itself is
left out: it shrinks too, and so do attention and MLP of the check layer, so a plan is at least as good
as it looks here.
"""

import bisect
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sgl_blend.engine.models import hidden_size, model_dtype, query_heads, row_modules
from sgl_blend.engine.objects import DecoderLayer, ModelRunner
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.plan import LayerSplit
from sgl_blend.fusion.rotation import Rotation
from sgl_blend.kernels.delta_rope import LayerPools, copy_rotated_layers
from sgl_blend.kernels.kv_deviation import kv_deviation_at
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.segmented_topk import Segments, select_rows
from sgl_blend.kernels.upload import to_device
from sgl_blend.tuning.timing import median_seconds

ROWS = (1, 32, 128, 512, 2048)
"""Numbers of rows at which times are measured; between them they are taken to be linear."""
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds for ROWS rows.

    Attributes:
        layer: What one decoder layer does to each row by itself: linear modules, experts.
        copy: Copy and rotation of the KV of one layer.
        select: Scoring, choosing and taking rows out; once a forward.
        attend: The plan for scattered attention with a few rows; once a forward.
        attend_layer: What one layer's scattered attention of a few rows takes.
        forward: What a forward of few rows takes besides its layers.
    """

    layer: tuple[float, ...]
    copy: tuple[float, ...]
    select: tuple[float, ...]
    attend: float
    attend_layer: float
    forward: float = 0.0


class CostModel:
    """Says whether a plan makes a prefill faster; immutable."""

    def __init__(self, times: Times, layers: LayerSplit) -> None:
        self._times = times
        self._layers = layers

    def layer_s(self, num_rows: int) -> float:
        """Return the seconds of what one decoder layer does to each row by itself."""
        return _at(self._times.layer, num_rows)

    def copy_s(self, num_rows: int) -> float:
        """Return the seconds to copy and rotate the KV of one layer."""
        return _at(self._times.copy, num_rows)

    def with_forward(self, seconds: Sequence[float], *, below: int, above: int) -> "CostModel":
        """Return the model that also knows what a forward takes besides its layers.

        Args:
            seconds: Of some forwards of few rows.
            below: Their rows in the layers up to the check layer.
            above: Their rows in the layers above.
        """
        early, late = self._layers.check + 1, self._layers.above
        in_layers = early * self.layer_s(below) + late * self.layer_s(above)
        besides = max(0.0, statistics.median(seconds) - in_layers)
        return CostModel(replace(self._times, forward=besides), self._layers)

    @property
    def step_s(self) -> float:
        """Seconds of a forward besides its layers, however few rows it has."""
        return self._times.forward

    def saves_s(
        self, num_rows: int, num_reused: int, num_dropped: int, *, num_dropped_early: int = 0
    ) -> float:
        """Return how many seconds a prefill gains; negative if blending makes it slower.

        Args:
            num_rows: Rows of the prefill.
            num_reused: Those of them whose KV is copied.
            num_dropped: Those of these that are not computed to the end.
            num_dropped_early: Those of these that are dropped before the first layer, not in the
                check layer.
        """
        if num_dropped == 0:
            return 0.0
        times = self._times
        early, above = self._layers.check + 1, self._layers.above
        whole, begun, kept = (
            _at(times.layer, num_rows - gone) for gone in (0, num_dropped_early, num_dropped)
        )
        saved = early * (whole - begun) + above * (whole - kept)
        layers = self._layers.total if num_dropped_early else above
        moving = layers * (_at(times.copy, num_reused) + times.attend_layer)
        return saved - moving - _at(times.select, num_rows) - times.attend

    def least_rows(self, ratio: float) -> int:
        """Return from how many rows on, all but 32 of them reusable, blending wins; a power of two."""
        rows = 64
        while rows < 1 << 20:
            reused = rows - 32
            if self.saves_s(rows, reused, int(reused * (1 - ratio))) > 0:
                break
            rows *= 2
        return rows


def _at(times: tuple[float, ...], rows: int) -> float:
    """Read a measured line at a number of rows; beyond its ends it goes on straight."""
    if rows <= 0:
        return 0.0
    right = min(max(bisect.bisect_left(ROWS, rows), 1), len(ROWS) - 1)
    x0, x1 = ROWS[right - 1], ROWS[right]
    y0, y1 = times[right - 1], times[right]
    return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


def without_bumps(times: Sequence[float]) -> list[float]:
    """Return times that never fall: fewer rows that took longer than more rows were disturbed.

    Args:
        times: Of ever more rows, as they were measured.
    """
    lowest = list(itertools.accumulate(reversed(times), min))
    return lowest[::-1]


@torch.inference_mode()
def measure(
    runner: ModelRunner,
    layer_module: DecoderLayer,
    pools: LayerPools,
    kernel: RaggedKernel,
    rotation: Rotation,
    tp_group: TPGroup,
) -> Times:
    """Measure this machine; the pool must be unused, and every rank must take part.

    Args:
        runner: SGLang's ModelRunner, model and pool loaded.
        layer_module: One of the model's decoder layers.
        pools: The runner's KV pools.
        kernel: Attends for scattered rows.
        rotation: The model's.
        tp_group: Every rank uses the first one's times.
    """
    parts = row_modules(runner, layer_module)
    v_pool = pools.v[0]
    device, dtype = v_pool.device, model_dtype(runner)
    heads = query_heads(layer_module)

    def layer(rows: int) -> Callable[[], object]:
        inputs = [torch.randn(rows, width, device=device).to(dtype) for _, width in parts]
        return lambda: [module(x) for (module, _), x in zip(parts, inputs, strict=True)]

    def slots(rows: int) -> torch.Tensor:
        place: torch.Tensor = torch.arange(rows, device=device) % (v_pool.shape[0] - 1) + 1
        return place

    def copy(rows: int) -> Callable[[], object]:
        where = slots(rows)
        cos, sin = rotation.between(where * 0, where * 0)  # by nothing: the bytes stay the same
        return lambda: copy_rotated_layers(
            pools, range(1), where, where, cos, sin, neox=rotation.neox
        )

    def select(rows: int) -> Callable[[], object]:
        where, numbers = slots(rows), torch.arange(rows, device=device)
        hidden = torch.zeros(rows, hidden_size(runner), device=device, dtype=dtype)
        fresh = torch.zeros(rows, *v_pool.shape[1:], device=device, dtype=dtype)
        segments = Segments((rows,), (rows,), (max(1, rows // 8),))
        bounds = to_device(torch.from_numpy(segments.bounds()), device)  # with others, in a forward

        def run() -> object:
            scores = kv_deviation_at(fresh, numbers, v_pool, where)
            kept = select_rows(scores, numbers, segments, bounds).kept
            return compact_rows(kept, [hidden])

        return run

    positions = torch.arange(8, device=device)
    query = torch.zeros(8, heads, pools.k[0].shape[-1], device=device, dtype=dtype)

    host_counts = kernel.host_counts([8], [8])
    counts = None if host_counts is None else to_device(torch.from_numpy(host_counts), device)

    def plan() -> Any:
        return kernel.plan(positions, [8], [slots(8)], dtype, counts=counts)

    ready = plan()
    found = [
        without_bumps([median_seconds(kind(rows), device, _REPEATS) for rows in ROWS])
        for kind in (layer, copy, select)
    ]
    few = [
        median_seconds(plan, device, _REPEATS),
        median_seconds(
            lambda: kernel.run(query, pools.k[0], v_pool, ready, scale=1.0), device, _REPEATS
        ),
    ]
    agreed = tp_group.agree([value for line in found for value in line] + few)
    size = len(ROWS)
    return Times(
        layer=tuple(agreed[:size]),
        copy=tuple(agreed[size : 2 * size]),
        select=tuple(agreed[2 * size : 3 * size]),
        attend=agreed[-2],
        attend_layer=agreed[-1],
    )

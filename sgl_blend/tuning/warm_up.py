"""Compile every kernel that a blended forward may launch, before the server takes requests.

Triton compiles a kernel when it is first launched, and once more for every type, constant and alignment
that it has not seen. That takes up to seconds each, and a request and all after it would wait. One
trial (trial.py) launches few of these variants: which one runs depends on the rows, on the number of
requests and on the policy. So each operation runs here once at every size that decides between
variants. What it computes means nothing: it reads slot 0, where SGLang puts the KV of padding, and
writes that slot's own KV back.

Which sizes decide is the kernels' business and may change. The sizes here are finer than any of their
steps, and tests/test_warm_up.py holds that no blended forward launches anything else.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sgl_blend.engine.models import hidden_size, model_dtype, query_heads
from sgl_blend.engine.objects import DecoderLayer, ModelRunner
from sgl_blend.fusion.rotation import Rotation
from sgl_blend.kernels.delta_rope import LayerPools, copy_rotated_layers
from sgl_blend.kernels.kv_deviation import kv_deviation_at
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.kernels.rounding import Rounding
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.segmented_topk import Segments, select_rows
from sgl_blend.kernels.upload import to_device

logger = logging.getLogger(__name__)

_SEGMENT_ROWS = (1, 64, 256, 1024, 2048, 4096, 8192, 16_384, 65_536)
"""Rows of a request that selects: kernels cut them into blocks by their number."""
_LENGTHS = (2, 8192)
"""Positions of a request: its KV is never split along them, or as often as the device has room."""
_REQUEST_ROWS = 2
"""Rows of a request that attends; of a tensor with a single row torch does not keep the stride."""


@dataclass(frozen=True, slots=True)
class _Fresh:
    """What a layer computes, by row: q [rows, heads, head_dim], k and v [rows, kv_heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@torch.inference_mode()
def warm_up(
    runner: ModelRunner,
    layer_module: DecoderLayer,
    pools: LayerPools,
    kernel: RaggedKernel,
    rotation: Rotation,
    most_requests: int,
    *,
    rounds: bool = False,
) -> None:
    """Launch every operation of a blended forward in all its variants.

    Args:
        runner: SGLang's ModelRunner, model and pool loaded.
        layer_module: One of the model's decoder layers.
        pools: The runner's KV pools.
        kernel: Attends for scattered rows.
        rotation: The model's.
        most_requests: That one forward may hold.
        rounds: Whether stored KV may come in few bits.
    """
    started = time.perf_counter()
    dtype, heads = model_dtype(runner), query_heads(layer_module)
    device = pools.v[0].device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    odd = torch.zeros(2, dtype=torch.int64, device=device)[1:]  # begins where few tensors do
    cos, sin = rotation.between(first, first)  # by nothing: the bytes stay the same
    copy_rotated_layers(pools, range(1), first, first, cos, sin, neox=rotation.neox)
    for rows in _SEGMENT_ROWS:
        segments = Segments(rows=(rows,), candidates=(rows,), taken=(1,))
        bounds = to_device(torch.from_numpy(segments.bounds()), device)
        numbers = torch.arange(rows, device=device)
        select_rows(torch.zeros(rows, device=device), numbers, segments, bounds)
    compact_rows(first, [first, first, first])  # token ids, positions, slots
    compact_rows(first, [first, first, cos, sin])  # of candidates that select again
    compact_rows(first, [first, odd, cos, sin])  # likewise, after exact prefixes of odd length
    compact_rows(first, [torch.zeros(1, device=device)])  # their priorities, or what is decided
    compact_rows(first, [torch.zeros(1, device=device)] * 2)  # both
    compact_rows(first, [torch.zeros(1, hidden_size(runner), dtype=dtype, device=device)])
    for fresh in _fresh(pools, heads, _REQUEST_ROWS, dtype):
        compact_rows(first, [fresh.q])
        kv_deviation_at(fresh.v, first, pools.v[0], first)
        kv_deviation_at(fresh.k, first, pools.k[0], first, (cos, sin, rotation.neox))
    kv_deviation_at(pools.v[0], first, pools.v[0], first)  # of a probe
    if rounds:
        share = torch.zeros(1, device=device)
        compact_rows(first, [share] * 3)
        rounding = Rounding(share, torch.zeros(pools.v[0].shape[1:], device=device))
        for fresh in _fresh(pools, heads, _REQUEST_ROWS, dtype):
            kv_deviation_at(fresh.v, first, pools.v[0], first, rounding=rounding)
    if pools.k[0].dtype != dtype:  # fresh keys are read there
        kv_deviation_at(pools.k[0], first, pools.k[0], first, (cos, sin, rotation.neox))
    for count in _counts(most_requests):
        for length in _LENGTHS:
            _attend(pools, heads, dtype, kernel, [length, *[_REQUEST_ROWS] * (count - 1)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    logger.info("sgl-blend: all kernels are compiled, after %.1f s", seconds)


def _counts(most: int) -> Iterator[int]:
    """Yield the least number of requests of every class that ends at a power of two."""
    count, power = 1, 1
    while count <= most:
        yield count
        count, power = power + 1, 2 * power


def _fresh(pools: LayerPools, heads: int, rows: int, dtype: torch.dtype) -> Iterator[_Fresh]:
    """Yield q, k and v as parts of one projection, as most models have them, and each by itself."""
    (_, kv_heads, head_dim), v_head_dim = pools.k[0].shape, pools.v[0].shape[2]
    k_start = heads * head_dim
    v_start = k_start + kv_heads * head_dim
    width = v_start + kv_heads * v_head_dim
    projected = torch.zeros(rows, width, dtype=dtype, device=pools.v[0].device)
    parts = projected.tensor_split((k_start, v_start), dim=1)
    for q, k, v in (parts, [part.clone(memory_format=torch.contiguous_format) for part in parts]):
        yield _Fresh(
            q.view(rows, heads, head_dim),
            k.view(rows, kv_heads, head_dim),
            v.view(rows, kv_heads, v_head_dim),
        )


def _attend(
    pools: LayerPools, heads: int, dtype: torch.dtype, kernel: RaggedKernel, lengths: list[int]
) -> None:
    """Attend once from the last positions of requests of these lengths."""
    device = pools.v[0].device
    slots = [torch.zeros(length, dtype=torch.int64, device=device) for length in lengths]
    ends = torch.tensor(lengths, device=device)[:, None]
    positions = (ends - torch.arange(_REQUEST_ROWS, 0, -1, device=device)).flatten()
    plan = kernel.plan(positions, [_REQUEST_ROWS] * len(lengths), slots, dtype)
    for fresh in _fresh(pools, heads, positions.numel(), dtype):
        kernel.run(fresh.q, pools.k[0], pools.v[0], plan, scale=1.0)

"""Launch our kernels on a GPU that is not there, and print how often each was compiled.

Everything happens but the launch: Triton binds the arguments, specialises and compiles for sm_90.
test_kernel_launches.py runs this in a process of its own, where kernels are not interpreted.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sgl_blend.kernels import (
    delta_rope_triton,
    kv_deviation_triton,
    ragged_attention_fixed_triton,
    ragged_attention_triton,
    row_compaction_triton,
    segmented_topk_triton,
    unquantise_triton,
)
from sgl_blend.kernels.bin_scales import BinScales
from sgl_blend.kernels.delta_rope import address_table
from sgl_blend.kernels.ragged_attention_fixed import MAX_REQUESTS, FixedRows

MODULES = (
    delta_rope_triton,
    kv_deviation_triton,
    ragged_attention_triton,
    row_compaction_triton,
    segmented_topk_triton,
    unquantise_triton,
)
HALF = torch.bfloat16


class AbsentHopper:
    """What Triton asks its driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        return torch


def only_compile() -> None:
    run = JITFunction.run

    def warm_up(self: Any, *arguments: Any, **options: Any) -> Any:
        return run(self, *arguments, **{**options, "warmup": True})

    driver.set_active(AbsentHopper())
    JITFunction.run = warm_up


def pool() -> torch.Tensor:
    return torch.zeros(40, 8, 128, dtype=HALF)


def launch_all(rows: list[int]) -> None:
    """Launch every kernel on a batch with so many rows per request."""
    count = sum(rows)
    k, v = (pool(), pool()), (pool(), pool())
    slots = torch.arange(count)
    cos, sin = torch.ones(count, 64), torch.zeros(count, 64)
    delta_rope_triton.copy_rotated_layers_triton(
        address_table(k, v), range(1, 2), (k[0], v[0]), (slots, slots), (cos, sin), neox=True
    )
    kv_deviation_triton.kv_deviation_at_triton(k[0], slots, k[1], slots, None)
    segmented_topk_triton.segmented_topk_triton(torch.zeros(count), rows, [n // 2 for n in rows])
    half = [n // 2 for n in rows]
    bounds = torch.zeros(3, len(rows) + 1, dtype=torch.int32)
    segmented_topk_triton.select_rows_triton(torch.zeros(count), slots, rows, sum(half), bounds)
    hidden = torch.zeros(count, 4096, dtype=HALF)
    row_compaction_triton.compact_rows_triton(slots, [hidden, hidden, slots, slots.int()])
    plan = ragged_attention_triton.TritonRagged().plan(
        slots, rows, [torch.arange(30) for _ in rows], HALF
    )
    q = torch.zeros(count, 32, 128, dtype=HALF)
    for num_splits in (1, 2):
        ragged_attention_triton.ragged_attention_triton(
            q, k[0], v[0], plan, scale=0.1, num_splits=num_splits
        )


def decode(pages: int, tokens: int) -> None:
    """Launch the decoding of so many pages."""
    ones = torch.ones(8, 128)
    scales = BinScales(ones, ones, ones, ones, bits=4, has_anchors=True)
    packed = torch.zeros(pages, scales.num_bytes(tokens), dtype=torch.uint8)
    cos = torch.ones(pages, tokens, 64)
    slots = torch.arange(1 + pages * tokens)[1:].view(pages, tokens)
    unquantise_triton.unquantise_triton(packed, scales, (cos, cos, True), slots, pool())


def launch_fixed(num_rows: int) -> None:
    """Launch what a graph of so many rows captures."""
    q, k, v = torch.zeros(num_rows, 32, 128, dtype=HALF), pool(), pool()
    rows = FixedRows(
        positions=torch.zeros(num_rows, dtype=torch.int32),
        bounds=torch.zeros(3, MAX_REQUESTS + 1, dtype=torch.int64),
        table=torch.zeros(640, dtype=torch.int32),
    )
    for num_splits in (1, 2):
        ragged_attention_fixed_triton.ragged_attention_fixed_triton(
            q, k, v, rows, scale=0.1, num_splits=num_splits
        )


def count_variants() -> dict[str, int]:
    kernels = {
        name: kernel
        for module in MODULES
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction)
    }
    counts = {
        name: sum(len(caches[0]) for caches in kernel.device_caches.values())
        for name, kernel in kernels.items()
    }
    return {name: count for name, count in counts.items() if count}


if __name__ == "__main__":
    only_compile()
    for rows in ([1], [1, 1], [16], [7, 0, 9, 1]):
        launch_all(rows)
    for pages, tokens in ((1, 1), (1, 16), (2, 11), (3, 64)):
        decode(pages, tokens)
    for num_rows in (64, 448, 1024):
        launch_fixed(num_rows)
    json.dump(count_variants(), sys.stdout)

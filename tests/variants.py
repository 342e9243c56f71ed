"""What of our kernels a GPU would compile for a blended forward that runs on the CPU.

A forward on the CPU computes with the torch references. Here each of them also launches its Triton
kernel, on a GPU that is not there, with the very same tensors. Triton binds the arguments and names the
variant that it would need; nothing is compiled or run. This works in the process of an engine, where
kernels are not interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from launch_kernels import AbsentHopper
from numpy.typing import NDArray
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sgl_blend.kernels import (
    delta_rope,
    kv_deviation,
    ragged_attention_tiles,
    row_compaction,
    segmented_topk,
)
from sgl_blend.kernels.delta_rope_tables_triton import delta_rope_tables_triton
from sgl_blend.kernels.delta_rope_triton import copy_rotated_layers_triton
from sgl_blend.kernels.kv_deviation_triton import kv_deviation_at_triton
from sgl_blend.kernels.ragged_attention import TorchRagged
from sgl_blend.kernels.ragged_attention_triton import TritonRagged
from sgl_blend.kernels.row_compaction_triton import compact_rows_triton
from sgl_blend.kernels.segmented_topk_triton import select_rows_triton

MULTIPROCESSORS = 132
"""Of an H100 and an H200."""


class BothRagged:
    """A RaggedKernel that computes in torch and launches the Triton kernel beside."""

    name = "both"

    def host_counts(self, num_rows: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int32]:
        return TritonRagged().host_counts(num_rows, lengths)

    def plan(
        self,
        positions: torch.Tensor,
        num_rows: Sequence[int],
        kv_slots: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        counts: torch.Tensor | None = None,
    ) -> tuple[Any, Any]:
        arguments = positions, num_rows, kv_slots, dtype
        return (
            TorchRagged().plan(*arguments),
            TritonRagged().plan(*arguments, counts=counts),
        )

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        plan: tuple[Any, Any],
        *,
        scale: float,
    ) -> torch.Tensor:
        TritonRagged().run(q, k_pool, v_pool, plan[1], scale=scale)
        return TorchRagged().run(q, k_pool, v_pool, plan[0], scale=scale)


def _copy(
    pools: delta_rope.LayerPools,
    layers: range,
    source: torch.Tensor,
    dest: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    neox: bool,
) -> None:
    addresses = delta_rope.address_table(pools.k, pools.v)
    both = (pools.k[0], pools.v[0]), (source, dest), (cos, sin)
    copy_rotated_layers_triton(addresses, layers, *both, neox=neox)


def _select(scores: torch.Tensor, rows: torch.Tensor, segments: segmented_topk.Segments) -> None:
    bounds = torch.from_numpy(segments.bounds())
    select_rows_triton(scores, rows, segments.rows, sum(segments.taken), bounds)


_BESIDE: list[tuple[Any, str, Callable[..., Any]]] = [
    (delta_rope, "_copy_rotated_layers_torch", _copy),
    (delta_rope, "_delta_rope_tables_torch", delta_rope_tables_triton),
    (kv_deviation, "_kv_deviation_at_torch", kv_deviation_at_triton),
    (row_compaction, "_compact_rows_torch", compact_rows_triton),
    (segmented_topk, "_select_rows_torch", _select),
]


def _choose_splits(device: torch.device, num_programs: int, max_length: int) -> int:
    return max(1, min(2 * MULTIPROCESSORS // num_programs, 32, max_length // 512))


@contextmanager
def kernels_beside() -> Iterator[dict[str, set[str]]]:
    """Collect the variants of each kernel for the time of a with block."""
    found: dict[str, set[str]] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = kernel.device_caches[0][-1]
        options["debug"] = False
        _, specialization, rest = binder(*args, **options)
        found.setdefault(kernel.__name__, set()).add(f"{specialization} {rest}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        patch.setattr(ragged_attention_tiles, "choose_splits", _choose_splits)
        for module, name, launch in _BESIDE:
            patch.setattr(module, name, _both(getattr(module, name), launch))
        driver.set_active(AbsentHopper())
        yield found


def _both(compute: Callable[..., Any], launch: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        launch(*args)
        return compute(*args)

    return both

"""K and V per head, in a pool for each layer: multi-head and grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_blend.fusion.layouts.base import Copy
from sgl_blend.kernels.delta_rope import (
    LayerPools,
    clear_slots,
    copy_rotated_layers,
    rotated_copy,
    turn_slots,
)


class MHALayout:
    """The layout of a model whose attention has K and V heads.

    Args:
        pools: All layers of the model.
        neox: Pairing of the rotary embedding, see rotate_keys.
    """

    def __init__(self, pools: LayerPools, *, neox: bool) -> None:
        self._pools = pools
        self._neox = neox

    @property
    def is_on_gpu(self) -> bool:
        """Whether it lies in the memory of a CUDA device."""
        return self._pools.k[0].is_cuda

    def copy(self, one: Copy) -> None:
        """Copy KV to other slots, and turn its keys to other positions."""
        copy_rotated_layers(
            self._pools,
            one.layers,
            one.source_slots,
            one.dest_slots,
            one.cos,
            one.sin,
            neox=self._neox,
        )

    def layer_copy(self, one: Copy) -> Callable[[int], None]:
        """Return what makes a copy in one layer, for KV in host memory."""
        return rotated_copy(
            self._pools, one.source_slots, one.dest_slots, one.cos, one.sin, neox=self._neox
        )

    def turn_back_and_forth(
        self, slots: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Turn keys to other positions and back in all layers; see KVLayout."""
        for pool in self._pools.k:
            turn_slots(pool, slots, cos, -sin, neox=self._neox)
            turn_slots(pool, slots, cos, sin, neox=self._neox)

    def clear(self, slots: torch.Tensor) -> None:
        """Write zeros in all layers; slots is int64 [n]."""
        for buffer in (*self._pools.k, *self._pools.v):
            clear_slots(buffer, slots)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer by slot, each [slots, heads, head_dim]."""
        return self._pools.k[number], self._pools.v[number]

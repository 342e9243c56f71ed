"""What the fusor does with KV, whatever the KV of a model looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Copy:
    """KV of some tokens, copied in a range of layers.

    Attributes:
        layers: Layers of the model.
        source_slots: int64 [n], where the KV lies.
        dest_slots: int64 [n], where it goes; disjoint from all sources.
        cos: float32 [n, rotary_dim / 2], rotation from the stored position to the new one.
        sin: float32, same shape.
    """

    layers: range
    source_slots: torch.Tensor
    dest_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class KVLayout(Protocol):
    """The KV of all layers of a model, in the pool."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether it lies in the memory of a CUDA device."""

    def copy(self, one: Copy) -> None:
        """Copy KV to other slots, and move it to other positions."""

    def layer_copy(self, one: Copy) -> Callable[[int], None]:
        """Return what makes a copy in one layer, for KV in host memory."""

    def turn_back_and_forth(
        self, slots: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Move KV away and back in all layers, where it lies, rounded each time as in a copy.

        Args:
            slots: int64 [n].
            cos: float32 [n, rotary_dim / 2], the rotation back.
            sin: float32, same shape.
        """

    def clear(self, slots: torch.Tensor) -> None:
        """Write zeros in all layers; slots is int64 [n]."""

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what policies see of one layer: K and V by slot, each [slots, heads, head_dim]."""

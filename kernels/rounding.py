"""What coding may have done to stored values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far coding may have moved cached values.

    Attributes:
        share: float32 [num_tokens], 1 for tokens whose values came in few bits, else 0.
        half_bins: float32 [num_kv_heads, head_dim], contiguous, half a bin of each channel.
    """

    share: torch.Tensor
    half_bins: torch.Tensor

"""The rotary embedding that all decoder layers of a model share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_blend.engine.objects import DecoderLayer
from sgl_blend.errors import UnsupportedError

_STATIC_KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""SGLang's classes whose table depends on nothing but the position."""


class RotaryEmbedding:
    """A model's own rotary embedding.

    Attributes:
        neox: True if the halves of a head form the rotated pairs, False if neighbours do.
        head_size: Width of a head.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.neox = bool(module.is_neox_style)
        self.head_size = int(module.head_size)

    @property
    def table(self) -> torch.Tensor:
        """Cosines, then sines: [positions, rotary_dim]. It may grow and change its dtype."""
        table: torch.Tensor = self._module.cos_sin_cache
        return table

    def rotate(self, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return keys as the model rotates them.

        Args:
            positions: int64 [n].
            keys: [n, head_size], of the model's dtype; they are not changed.

        Returns:
            [n, 1, head_size].
        """
        rotated: torch.Tensor = self._module(positions, keys.clone(), keys.clone())[1]
        return rotated.view(len(positions), 1, self.head_size)


def read_rotary_embedding(layers: Sequence[DecoderLayer]) -> RotaryEmbedding:
    """Read the rotation that all decoder layers share.

    Args:
        layers: The model's decoder layers.

    Raises:
        UnsupportedError: A layer has no rotary embedding, layers differ, or the kind is not one
            whose rotation depends on the position alone.
    """
    embeddings = [
        getattr(getattr(layer, "self_attn", None), "rotary_emb", None) for layer in layers
    ]
    first = embeddings[0]
    kind = type(first).__name__
    if first is None or kind not in _STATIC_KINDS:
        raise UnsupportedError(
            f"enable_blend: rotary embedding {kind} is not supported, expected one of "
            f"{', '.join(_STATIC_KINDS)}"
        )
    if any(embedding is not first for embedding in embeddings):
        raise UnsupportedError("enable_blend: decoder layers with different rotary embeddings")
    if not hasattr(first, "cos_sin_cache") or getattr(first, "position_start", 0) != 0:
        raise UnsupportedError(f"enable_blend: {kind} without a plain cos/sin table")
    if isinstance(getattr(first, "scaling_factors", None), list) and len(first.scaling_factors) > 1:
        raise UnsupportedError("enable_blend: linear RoPE scaling with more than one factor")
    return RotaryEmbedding(first)

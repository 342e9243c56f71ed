"""The model's own rotary embedding, read once and accepted only if its rotation is understood."""

from dataclasses import dataclass
from typing import Any

import torch

from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import delta_rope_tables

_STATIC_KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""SGLang's classes whose table depends on nothing but the position."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a model rotates its keys.

    Attributes:
        embedding: SGLang's rotary module; its table may grow and change dtype, so it is read anew.
        neox: True if the halves of a head form the rotated pairs, False if neighbours do.
    """

    embedding: Any
    neox: bool

    def between(
        self, old_position: torch.Tensor, new_position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that move keys from old to new positions (see delta_rope_tables)."""
        return delta_rope_tables(self.embedding.cos_sin_cache, old_position, new_position)


def read_rotation(layers: list[Any]) -> Rotation:
    """Read the rotation that all decoder layers share.

    Args:
        layers: The model's decoder layers, each with ``self_attn.rotary_emb``.

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
    if not hasattr(first, "cos_sin_cache") or first.position_start != 0:
        raise UnsupportedError(f"enable_blend: {kind} without a plain cos/sin table")
    if isinstance(getattr(first, "scaling_factors", None), list) and len(first.scaling_factors) > 1:
        raise UnsupportedError("enable_blend: linear RoPE scaling with more than one factor")
    return Rotation(embedding=first, neox=bool(first.is_neox_style))

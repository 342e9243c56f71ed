"""The model's own rotary embedding: read once, accepted if it is understood, and checked by numbers."""

from dataclasses import dataclass
from typing import Any

import torch

from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import delta_rope_tables, rotate_keys

_STATIC_KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""SGLang's classes whose table depends on nothing but the position."""

_DELTAS = (1, 1_000, 30_000)
_CHECKED_FROM = (0, 5, 61)
"""Positions at which the checked keys were stored."""


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
    if not hasattr(first, "cos_sin_cache") or getattr(first, "position_start", 0) != 0:
        raise UnsupportedError(f"enable_blend: {kind} without a plain cos/sin table")
    if isinstance(getattr(first, "scaling_factors", None), list) and len(first.scaling_factors) > 1:
        raise UnsupportedError("enable_blend: linear RoPE scaling with more than one factor")
    return Rotation(embedding=first, neox=bool(first.is_neox_style))


def rotation_errors(rotation: Rotation, dtype: torch.dtype, num_positions: int) -> dict[int, float]:
    """Compare moved keys with keys that the model's own module rotates in place.

    Random keys are rotated by the module for a few positions, moved by ``between`` and
    ``rotate_keys``, and compared with what the module makes of them at the new position.

    Args:
        rotation: What is to be checked.
        dtype: The model's; keys are rounded to it before and after they are moved.
        num_positions: Tokens of the longest prompt; SGLang's table may be longer, and is not
            always right there.

    Returns:
        Relative error |moved - true| / |true| by distance: 1, 1,000 and 30,000 tokens as far as the
        longest prompt reaches, and the largest distance in it.
    """
    module = rotation.embedding
    device = module.cos_sin_cache.device
    old = torch.tensor(_CHECKED_FROM, device=device)
    farthest = min(module.cos_sin_cache.shape[0], num_positions) - 1 - max(_CHECKED_FROM)
    generator = torch.Generator().manual_seed(0)
    shape = (len(_CHECKED_FROM), module.head_size)
    raw = torch.randn(shape, generator=generator).to(device, dtype)

    def rotated(position: torch.Tensor) -> torch.Tensor:
        key: torch.Tensor = module(position, raw.clone(), raw.clone())[1]
        return key.view(len(_CHECKED_FROM), 1, module.head_size)

    stored = rotated(old)
    errors = {}
    for delta in (*(d for d in _DELTAS if d < farthest), farthest):
        cos, sin = rotation.between(old, old + delta)
        moved = rotate_keys(stored, cos, sin, neox=rotation.neox).double()
        true = rotated(old + delta).double()
        errors[delta] = float((moved - true).norm() / true.norm())
    return errors


def check_rotation(errors: dict[int, float], dtype: torch.dtype) -> None:
    """Refuse a rotation that does not agree with the model's own.

    The bound is four roundings of the dtype: the key as it is stored, moved, and rotated by the
    model, and the model's table, which may be of that dtype too.

    Raises:
        UnsupportedError: An error of ``rotation_errors`` is beyond the bound.
    """
    bound = 4 * torch.finfo(dtype).eps
    for delta, error in errors.items():
        if not error <= bound:
            raise UnsupportedError(
                f"enable_blend: keys moved by {delta} tokens are off by {error:.1e} from the model's "
                f"own rotation, more than {bound:.1e}; this model must not be blended"
            )

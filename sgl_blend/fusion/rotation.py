"""The model's own rotary embedding: read once, accepted if it is understood, and checked by numbers."""

from dataclasses import dataclass

import torch

from sgl_blend.engine.rotary import RotaryEmbedding
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import delta_rope_tables, rotate_keys

_DELTAS = (1, 1_000, 30_000)
_CHECKED_FROM = (0, 5, 61)
"""Positions at which the checked keys were stored."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a model rotates its keys.

    Attributes:
        embedding: The model's own.
    """

    embedding: RotaryEmbedding

    @property
    def neox(self) -> bool:
        """True if the halves of a head form the rotated pairs, False if neighbours do."""
        return self.embedding.neox

    def between(
        self, old_position: torch.Tensor, new_position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that move keys from old to new positions (see delta_rope_tables)."""
        return delta_rope_tables(self.embedding.table, old_position, new_position)

    def none(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that leave so many keys where they are."""
        table = self.embedding.table
        shape = (num_tokens, table.shape[1] // 2)
        return torch.ones(shape, device=table.device), torch.zeros(shape, device=table.device)


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
    own = rotation.embedding
    device = own.table.device
    old = torch.tensor(_CHECKED_FROM, device=device)
    farthest = min(own.table.shape[0], num_positions) - 1 - max(_CHECKED_FROM)
    generator = torch.Generator().manual_seed(0)
    shape = (len(_CHECKED_FROM), own.head_size)
    raw = torch.randn(shape, generator=generator).to(device, dtype)

    stored = own.rotate(old, raw)
    errors = {}
    for delta in (*(d for d in _DELTAS if d < farthest), farthest):
        cos, sin = rotation.between(old, old + delta)
        moved = rotate_keys(stored, cos, sin, neox=rotation.neox).double()
        true = own.rotate(old + delta, raw).double()
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

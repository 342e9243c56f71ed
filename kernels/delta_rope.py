"""Delta-RoPE: move cached KV to the slots and positions where its chunk reappears.

Rotations compose, RoPE(x, new) = R(new) R(old)^-1 RoPE(x, old). R(new) R(old)^-1 is formed from two
rows of the model's own cos/sin table, so whatever shaped that table (linear, llama3 or YaRN
frequencies, its dtype) is inside, and nothing else is. A YaRN table carries its attention scaling in
every row; the cached key carries it already, so the composite divides by |row(old)| |row(new)| and is
a pure rotation.
"""

from dataclasses import dataclass

import torch

from sgl_blend.kernels.checks import check_tensor


def delta_rope_tables(
    cos_sin: torch.Tensor, old_position: torch.Tensor, new_position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compose the rotation from old to new positions, once per request for all layers.

    Args:
        cos_sin: [num_positions, rotary_dim], the model's table: cosines, then sines.
        old_position: int64 [num_tokens], the position the cached key was rotated for.
        new_position: int64 [num_tokens], the position it is needed at.

    Returns:
        cos and sin of the difference angle, each float32 [num_tokens, rotary_dim / 2]; exactly
        1 and 0 where the two positions are equal.
    """
    old_cos, old_sin = cos_sin[old_position].double().chunk(2, dim=-1)
    new_cos, new_sin = cos_sin[new_position].double().chunk(2, dim=-1)
    cos = new_cos * old_cos + new_sin * old_sin
    sin = new_sin * old_cos - new_cos * old_sin
    norm = torch.hypot(cos, sin)
    same = (old_position == new_position)[:, None]
    cos = torch.where(same, 1.0, cos / norm)
    sin = torch.where(same, 0.0, sin / norm)
    return cos.float(), sin.float()


def rotate_keys(
    k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool
) -> torch.Tensor:
    """Rotate keys by the tables of delta_rope_tables.

    Args:
        k: [num_tokens, num_kv_heads, head_dim]; dimensions beyond rotary_dim pass through.
        cos: float32 [num_tokens, rotary_dim / 2].
        sin: float32, same shape as cos.
        neox: True if the halves of a head form the pairs, False (GPT-J) if neighbours do.

    Returns:
        A new tensor like k. Arithmetic is float32, rounded to k.dtype once.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    num_tokens, _, head_dim = k.shape
    half = cos.shape[-1]
    check_tensor("cos", cos, shape=(num_tokens, half), dtype=torch.float32)
    check_tensor("sin", sin, shape=(num_tokens, half), dtype=torch.float32)
    if 2 * half > head_dim:
        raise ValueError(f"cos: rotary_dim {2 * half} exceeds head_dim {head_dim} of k")
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = k.clone()
    rotary = k[..., : 2 * half].float()
    if neox:
        x, y = rotary[..., :half], rotary[..., half:]
    else:
        x, y = rotary[..., 0::2], rotary[..., 1::2]
    new_x = (x * cos - y * sin).to(k.dtype)
    new_y = (y * cos + x * sin).to(k.dtype)
    if neox:
        out[..., :half] = new_x
        out[..., half : 2 * half] = new_y
    else:
        out[..., 0 : 2 * half : 2] = new_x
        out[..., 1 : 2 * half : 2] = new_y
    return out


def copy_rotated(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    neox: bool,
) -> None:
    """Gather KV at source slots, rotate the keys, scatter both to dest slots, in place.

    Args:
        k_pool: [num_slots, num_kv_heads, head_dim], one layer of the paged pool.
        v_pool: [num_slots, num_kv_heads, v_head_dim].
        source_slots: int64 [num_tokens].
        dest_slots: int64 [num_tokens], disjoint from source_slots and without repeats.
        cos: float32 [num_tokens, rotary_dim / 2], from delta_rope_tables.
        sin: float32, same shape as cos.
        neox: See rotate_keys.

    Raises:
        ValueError: The slot lists differ in length.
    """
    check_tensor("dest_slots", dest_slots, shape=(source_slots.shape[0],))
    k_pool[dest_slots] = rotate_keys(k_pool[source_slots], cos, sin, neox=neox)
    v_pool[dest_slots] = v_pool[source_slots]


@dataclass(frozen=True)
class LayerPools:
    """KV pools of all layers.

    Attributes:
        k: Per layer [num_slots, num_kv_heads, head_dim].
        v: Per layer [num_slots, num_kv_heads, v_head_dim].
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


def copy_rotated_layers(
    pools: LayerPools,
    layers: range,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    neox: bool,
) -> None:
    """Do what copy_rotated does, in a range of layers."""
    for layer in layers:
        copy_rotated(pools.k[layer], pools.v[layer], source_slots, dest_slots, cos, sin, neox=neox)

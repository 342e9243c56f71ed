"""Delta-RoPE: move cached KV to the slots and positions where its chunk reappears.

Rotations compose, RoPE(x, new) = R(new) R(old)^-1 RoPE(x, old). R(new) R(old)^-1 is formed from two
rows of the model's own cos/sin table, so whatever shaped that table (linear, llama3 or YaRN
frequencies, its dtype) is inside, and nothing else is. A YaRN table carries its attention scaling in
every row; the cached key carries it already, so the composite divides by |row(old)| |row(new)| and is
a pure rotation.

    (x, y) of a pair  ->  (x cos - y sin, y cos + x sin), its bits kept where cos is 1 and sin is 0

An fp8 pool is dequantised, rotated and quantised again. Its scale is one factor for the whole pool
and commutes with a rotation, so it is not needed here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sgl_blend.kernels.checks import check_rows, check_tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MOVABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES)
"""Of pools whose KV can be moved."""
_ADDRESS_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class LayerPools:
    """The paged KV pools of all layers, made once per model runner.

    Attributes:
        k: Per layer [num_slots, num_kv_heads, head_dim]; the layers agree in shape, strides and
            dtype, and a slot's heads are contiguous.
        v: Per layer [num_slots, num_kv_heads, v_head_dim], likewise, in the dtype of k.
        addresses: int64 [num_layers, 2] on the device, where the K and the V pool of a layer begin;
            None for pools in host memory. The pools are held here, so the addresses stay theirs.

    Raises:
        ValueError: Pools differ, or a row is not contiguous, or the dtype is not a pool's, or a CUDA
            pool does not begin on a 16-byte boundary.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    addresses: torch.Tensor | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.k) != len(self.v) or not self.k:
            raise ValueError(f"v: expected {len(self.k)} (at least 1) layers, got {len(self.v)}")
        _check_alike("k", self.k)
        _check_alike("v", self.v)
        if self.v[0].dtype != self.k[0].dtype:
            raise ValueError(f"v: expected {self.k[0].dtype}, got {self.v[0].dtype}")
        on_cuda = self.k[0].is_cuda
        object.__setattr__(self, "addresses", address_table(self.k, self.v) if on_cuda else None)


def _check_alike(name: str, pools: tuple[torch.Tensor, ...]) -> None:
    """Raise unless one kernel can walk all the pools with the numbers of the first."""
    first = pools[0]
    check_tensor(name, first, shape=(None, None, None))
    check_rows(name, first)
    if first.dtype not in MOVABLE_DTYPES:
        raise ValueError(f"{name}: expected a floating-point pool, got {first.dtype}")
    for layer, pool in enumerate(pools):
        check_tensor(f"{name}[{layer}]", pool, shape=tuple(first.shape), dtype=first.dtype)
        if pool.stride() != first.stride() or pool.device != first.device:
            raise ValueError(f"{name}[{layer}]: expected strides and device of layer 0")


def address_table(k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Write down where the pools begin, int64 [num_layers, 2] on their device.

    Raises:
        ValueError: A pool does not begin on a 16-byte boundary, as wide loads need.
    """
    addresses = [[key.data_ptr(), value.data_ptr()] for key, value in zip(k, v, strict=True)]
    if any(address % _ADDRESS_ALIGNMENT_BYTES for pair in addresses for address in pair):
        raise ValueError(f"pools: expected addresses in steps of {_ADDRESS_ALIGNMENT_BYTES} bytes")
    return torch.tensor(addresses, dtype=torch.int64).to(k[0].device)


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
    if cos_sin.is_cuda:
        from sgl_blend.kernels.delta_rope_tables_triton import delta_rope_tables_triton

        return delta_rope_tables_triton(cos_sin, old_position, new_position)
    return _delta_rope_tables_torch(cos_sin, old_position, new_position)


def _delta_rope_tables_torch(
    cos_sin: torch.Tensor, old_position: torch.Tensor, new_position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
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
        A new tensor like k. Arithmetic is float32, rounded to k.dtype once (fp8 saturates); a pair
        whose angle is 0 keeps its bits.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    num_tokens, _, head_dim = k.shape
    check_rotation(cos, sin, num_tokens, head_dim)
    return _Turn.of(cos, sin, neox=neox).applied_to(k)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A rotation as it meets the rotary numbers of keys [n, heads, head_dim], one after another.

    Both numbers of a pair stand in it: (x, y) becomes (x cos + y -sin, y cos + x sin).

    Attributes:
        cos: float32 [n, 1, rotary_dim].
        sin: Same shape, negative for the first number of each pair.
        still: bool, same shape, where a pair keeps its bits; None if there is none.
        neox: See rotate_keys.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    still: torch.Tensor | None
    neox: bool

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool) -> "_Turn":
        """Take the tables of delta_rope_tables."""
        still = (cos == 1) & (sin == 0)
        some = cos.is_cuda or bool(still.any())  # asking a GPU would wait for it
        return cls(
            _interleave(cos, cos, neox)[:, None],
            _interleave(-sin, sin, neox)[:, None],
            _interleave(still, still, neox)[:, None] if some else None,
            neox,
        )

    @property
    def turns(self) -> bool:
        """Whether a pair is turned at all; waits for a GPU."""
        return self.still is None or not bool(self.still.all())

    def applied_to(self, keys: torch.Tensor) -> torch.Tensor:
        """Return rotated keys; see rotate_keys."""
        rotary_dim = self.cos.shape[-1]
        rotary = keys[..., :rotary_dim]
        wide = rotary.float()
        x, y = _pairs(wide, self.neox)
        # Products are rounded before they are added: an addcmul would round some of them only once.
        turned = (wide * self.cos).add_(_interleave(y, x, self.neox).mul_(self.sin))
        turned = _rounding(keys.dtype)(turned)
        if self.still is not None:
            turned = torch.where(self.still, rotary, turned)
        if rotary_dim == keys.shape[-1]:
            return turned
        out = keys.clone()
        out[..., :rotary_dim] = turned
        return out


def _pairs(rotary: torch.Tensor, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second number of every pair, each [..., pairs]."""
    if neox:
        x, y = rotary.tensor_split(2, dim=-1)
        return x, y
    return rotary[..., 0::2], rotary[..., 1::2]


def _interleave(x: torch.Tensor, y: torch.Tensor, neox: bool) -> torch.Tensor:
    """Return a new tensor of which these are the pairs."""
    return torch.cat((x, y), dim=-1) if neox else torch.stack((x, y), dim=-1).flatten(-2)


def check_rotation(cos: torch.Tensor, sin: torch.Tensor, num_tokens: int, head_dim: int) -> None:
    """Raise unless cos and sin can rotate num_tokens keys of head_dim dimensions.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    half = cos.shape[-1]
    check_tensor("cos", cos, shape=(num_tokens, half), dtype=torch.float32)
    check_tensor("sin", sin, shape=(num_tokens, half), dtype=torch.float32)
    if 2 * half > head_dim:
        raise ValueError(f"cos: rotary_dim {2 * half} exceeds head_dim {head_dim} of k")


def _rounding(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    # A rotated component can be sqrt(2) times the largest of its pair; fp8 is full at 448.
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        return lambda wide: wide.clamp(-limit, limit).to(dtype)
    return lambda wide: wide.to(dtype)


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
    """Gather KV at source slots, rotate the keys, scatter both to dest slots, in a range of layers.

    In place, and one launch on CUDA.

    Args:
        pools: The pools of all layers.
        layers: Numbers of the layers to copy in.
        source_slots: int64 [num_tokens].
        dest_slots: int64 [num_tokens], disjoint from source_slots and without repeats.
        cos: float32 [num_tokens, rotary_dim / 2], from delta_rope_tables.
        sin: float32, same shape as cos.
        neox: See rotate_keys.

    Raises:
        ValueError: A shape or dtype does not fit, or a layer has no pool.
    """
    num_tokens = source_slots.shape[0]
    check_tensor("source_slots", source_slots, shape=(None,), dtype=torch.int64)
    check_tensor("dest_slots", dest_slots, shape=(num_tokens,), dtype=torch.int64)
    check_rotation(cos, sin, num_tokens, pools.k[0].shape[-1])
    if layers and not 0 <= min(layers) <= max(layers) < len(pools.k):
        raise ValueError(f"layers: expected numbers below {len(pools.k)}, got {layers}")
    if pools.addresses is None:
        _copy_rotated_layers_torch(pools, layers, source_slots, dest_slots, cos, sin, neox)
        return
    from sgl_blend.kernels.delta_rope_triton import copy_rotated_layers_triton

    copy_rotated_layers_triton(
        pools.addresses,
        layers,
        (pools.k[0], pools.v[0]),
        (source_slots, dest_slots),
        (cos, sin),
        neox=neox,
    )


def _copy_rotated_layers_torch(
    pools: LayerPools,
    layers: range,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    neox: bool,
) -> None:
    copy = rotated_copy(pools, source_slots, dest_slots, cos, sin, neox=neox)
    for layer in layers:
        copy(layer)


def rotated_copy(
    pools: LayerPools,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    neox: bool,
) -> Callable[[int], None]:
    """Return what copies one layer of pools in host memory, prepared once for all layers.

    Arguments as copy_rotated_layers.
    """
    turn = _Turn.of(cos, sin, neox=neox)
    turns = turn.turns  # no wait: these tensors are the host's own
    dest = _run_of(dest_slots)

    def copy(layer: int) -> None:
        keys = pools.k[layer].index_select(0, source_slots)
        _scatter(pools.k[layer], dest, turn.applied_to(keys) if turns else keys)
        _scatter(pools.v[layer], dest, pools.v[layer].index_select(0, source_slots))

    return copy


def _run_of(slots: torch.Tensor) -> torch.Tensor | slice:
    """Return slots of host memory that follow each other as a slice, which is written twice as fast."""
    first, num_slots = int(slots[0]) if slots.numel() else 0, slots.numel()
    run = slice(first, first + num_slots)
    return run if torch.equal(slots, torch.arange(run.start, run.stop)) else slots


def _scatter(pool: torch.Tensor, slots: torch.Tensor | slice, rows: torch.Tensor) -> None:
    if isinstance(slots, slice):
        pool[slots] = rows
        return
    if pool.dtype in FP8_DTYPES:  # for which torch has no index_copy_
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool.index_copy_(0, slots, rows)


def turn_slots(
    pool: torch.Tensor, slots: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool
) -> None:
    """Rotate the keys in some slots of one layer's pool, in place; for evaluations.

    Args:
        pool: [num_slots, num_kv_heads, head_dim].
        slots: int64 [n], without repeats.
        cos: float32 [n, rotary_dim / 2], from delta_rope_tables.
        sin: float32, same shape as cos.
        neox: See rotate_keys.
    """
    _scatter(pool, slots, rotate_keys(pool[slots], cos, sin, neox=neox))


def clear_slots(pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write zeros into a pool of any dtype, in place; slots is int64 [n]."""
    if pool.dtype in FP8_DTYPES:  # for which torch has no index_put_
        pool = pool.view(torch.uint8)
    pool[slots] = 0

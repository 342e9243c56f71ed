"""Keys moved by delta-RoPE, against SGLang's own rotary embeddings and complex numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.rotary_embedding import get_rope

from sgl_blend.kernels.delta_rope import (
    LayerPools,
    copy_rotated_layers,
    delta_rope_tables,
    rotate_keys,
)
from support import assert_as_good_as, rms_error

MAX_POSITION = 40_000
HEAD_DIM = 64
SCALINGS: dict[str, dict[str, Any] | None] = {
    "RotaryEmbedding": None,
    "LinearScalingRotaryEmbedding": {"rope_type": "linear", "factor": 4.0},
    "Llama3RotaryEmbedding": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "YaRNScalingRotaryEmbedding": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 10_000,
    },
}
MOVES = [(5, 6), (6, 5), (0, 1000), (1000, 0), (9, 30_009), (30_009, 9), (39_999, 0), (17, 17)]


def make_rope(
    kind: str, *, rotary_dim: int = HEAD_DIM, neox: bool = True, dtype: torch.dtype = torch.float32
) -> Any:
    rope = get_rope(HEAD_DIM, rotary_dim, MAX_POSITION, 10_000, neox, SCALINGS[kind], dtype)
    assert type(rope).__name__ == kind
    return rope


def place(rope: Any, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate as the model does."""
    flat = x.reshape(x.shape[0], -1)
    _, placed = rope.forward_native(position, flat.clone(), flat.clone())
    return torch.as_tensor(placed).view(x.shape)


def to_complex(x: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """See the rotated pairs of a head as complex numbers."""
    shape = (*x.shape[:-1], 2, -1) if neox else (*x.shape[:-1], -1, 2)
    pairs = x.reshape(shape)
    return torch.view_as_complex((pairs.transpose(-1, -2) if neox else pairs).contiguous())


def from_complex(z: torch.Tensor, *, neox: bool) -> torch.Tensor:
    pairs = torch.view_as_real(z)
    return (pairs.transpose(-1, -2) if neox else pairs).reshape(*z.shape[:-1], -1)


def turn(rope: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply the rotary part of every head by complex factors [num_tokens, rotary_dim / 2]."""
    rotary = x[..., : rope.rotary_dim]
    z = to_complex(rotary, neox=rope.is_neox_style) * factor[:, None, :]
    tail = x[..., rope.rotary_dim :]
    return torch.cat([from_complex(z, neox=rope.is_neox_style), tail], dim=-1)


def table_row(rope: Any, position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read the model's table as cos + i sin."""
    cos, sin = rope.cos_sin_cache[position].to(dtype).chunk(2, dim=-1)
    return torch.complex(cos, sin)


def move(rope: Any, k: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cos, sin = delta_rope_tables(rope.cos_sin_cache, old, new)
    return rotate_keys(k, cos, sin, neox=rope.is_neox_style)


def positions(position: int, num_tokens: int) -> torch.Tensor:
    return torch.full((num_tokens,), position)


@pytest.mark.parametrize("move_", MOVES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 32, 6])
@pytest.mark.parametrize("kind", SCALINGS)
def test_a_moved_key_is_the_key_the_model_places_there(
    kind: str, rotary_dim: int, neox: bool, move_: tuple[int, int]
) -> None:
    rope = make_rope(kind, rotary_dim=rotary_dim, neox=neox)
    x = torch.randn(37, 3, HEAD_DIM)
    old, new = positions(move_[0], 37), positions(move_[1], 37)
    cached = place(rope, x, old)

    moved = move(rope, cached, old, new)

    oracle = turn(rope, x.double(), table_row(rope, new, torch.float64))
    old_row, new_row = (table_row(rope, p, torch.float32) for p in (old, new))
    reference = turn(rope, turn(rope, cached, old_row.reciprocal()), new_row)
    assert_as_good_as(moved, reference, oracle)
    # And what the model itself computes there is no farther away than rounding twice explains.
    assert rms_error(moved, place(rope, x, new)) <= 2 * rms_error(reference, oracle) + 1e-7


@pytest.mark.parametrize("kind", SCALINGS)
def test_every_token_moves_by_its_own_distance(kind: str) -> None:
    rope = make_rope(kind)
    x = torch.randn(101, 2, HEAD_DIM)
    old = torch.randint(0, MAX_POSITION, (101,))
    new = torch.randint(0, MAX_POSITION, (101,))
    cached = place(rope, x, old)

    moved = move(rope, cached, old, new)

    oracle = turn(rope, x.double(), table_row(rope, new, torch.float64))
    old_row, new_row = (table_row(rope, p, torch.float32) for p in (old, new))
    reference = turn(rope, turn(rope, cached, old_row.reciprocal()), new_row)
    assert_as_good_as(moved, reference, oracle)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SCALINGS)
def test_half_precision_keys_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    rope = make_rope(kind)
    x = torch.randn(64, 2, HEAD_DIM)
    old, new = torch.randint(0, MAX_POSITION, (2, 64))
    cached = place(rope, x, old).to(dtype)

    moved = move(rope, cached, old, new)

    between = table_row(rope, new, torch.float64) / table_row(rope, old, torch.float64)
    oracle = turn(rope, cached.double(), between)
    reference = turn(rope, cached.float(), between.to(torch.complex64)).to(dtype)
    assert moved.dtype == dtype
    assert_as_good_as(moved, reference, oracle)


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_half_precision_table_still_gives_a_rotation(kind: str) -> None:
    # SGLang keeps its table in the model's dtype on some devices; rounding makes rows not unit.
    rope = make_rope(kind, dtype=torch.bfloat16)
    assert rope.cos_sin_cache.dtype == torch.bfloat16
    old, new = torch.randint(0, MAX_POSITION, (2, 200))

    cos, sin = delta_rope_tables(rope.cos_sin_cache, old, new)

    row = table_row(rope, new, torch.float64) / table_row(rope, old, torch.float64)
    unit = row / row.abs()
    reference = torch.polar(torch.ones_like(cos), unit.angle().float())
    assert cos.dtype == sin.dtype == torch.float32
    assert_as_good_as(cos, reference.real, unit.real)
    assert_as_good_as(sin, reference.imag, unit.imag)


@pytest.mark.parametrize("kind", SCALINGS)
def test_moving_keeps_the_norm(kind: str) -> None:
    # A YaRN key carries the attention scaling already; applying it again would stretch the key.
    rope = make_rope(kind)
    cached = place(rope, torch.randn(50, 2, HEAD_DIM), positions(3, 50))

    moved = move(rope, cached, positions(3, 50), positions(2003, 50))

    norm, moved_norm = cached.double().norm(dim=-1), moved.double().norm(dim=-1)
    assert rms_error(moved_norm, norm) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_a_key_that_stays_is_bit_identical(kind: str, neox: bool, dtype: torch.dtype) -> None:
    rope = make_rope(kind, neox=neox)
    cached = torch.randn(300, 2, HEAD_DIM).to(dtype)
    here = torch.randint(0, MAX_POSITION, (300,))

    cos, sin = delta_rope_tables(rope.cos_sin_cache, here, here.clone())

    assert (cos == 1).all()
    assert (sin == 0).all()
    assert torch.equal(rotate_keys(cached, cos, sin, neox=neox), cached)


place_in_table = st.integers(0, MAX_POSITION - 1)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(SCALINGS)),
    neox=st.booleans(),
    path=st.tuples(place_in_table, place_in_table, place_in_table),
    seed=st.integers(0, 1 << 30),
)
def test_two_moves_are_one_move(
    kind: str, neox: bool, path: tuple[int, int, int], seed: int
) -> None:
    rope = make_rope(kind, neox=neox)
    k = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    start, middle, end = (positions(p, 3) for p in path)

    twice = move(rope, move(rope, k, start, middle), middle, end)
    once = move(rope, k, start, end)

    rows = [table_row(rope, p, torch.float64) for p in (start, middle, end)]
    first, second = rows[1] / rows[0], rows[2] / rows[1]
    oracle = turn(rope, k.double(), first * second)
    step = turn(rope, k, first.to(torch.complex64))
    reference = turn(rope, step, second.to(torch.complex64))
    # Three numbers per pair are too few for a root mean square to be sharp, hence the slack.
    assert_as_good_as(twice, reference, oracle, slack=2)
    assert_as_good_as(once, reference, oracle, slack=2)


@settings(max_examples=60)
@given(old=place_in_table, new=place_in_table)
def test_moving_back_undoes_a_move(old: int, new: int) -> None:
    rope = make_rope("YaRNScalingRotaryEmbedding")

    there = delta_rope_tables(rope.cos_sin_cache, positions(old, 1), positions(new, 1))
    back = delta_rope_tables(rope.cos_sin_cache, positions(new, 1), positions(old, 1))

    assert torch.equal(back[0], there[0])
    assert torch.equal(back[1], -there[1])


def test_dimensions_beyond_the_rotary_ones_pass_through() -> None:
    rope = make_rope("RotaryEmbedding", rotary_dim=32)
    cached = torch.randn(9, 2, HEAD_DIM)

    moved = move(rope, cached, positions(1, 9), positions(77, 9))

    assert torch.equal(moved[..., 32:], cached[..., 32:])
    assert not torch.equal(moved[..., :32], cached[..., :32])


def test_rotating_leaves_the_argument_alone() -> None:
    rope = make_rope("RotaryEmbedding")
    cached = torch.randn(4, 2, HEAD_DIM)
    before = cached.clone()

    move(rope, cached, positions(1, 4), positions(9, 4))

    assert torch.equal(cached, before)


@pytest.mark.parametrize("dest", ["scattered", "neighbours", "neighbours in another order"])
def test_copying_rotates_keys_copies_values_and_touches_no_other_slot(dest: str) -> None:
    rope = make_rope("RotaryEmbedding")
    k_pool, v_pool = torch.randn(64, 2, HEAD_DIM), torch.randn(64, 2, 48)
    slots = torch.randperm(64) if dest == "scattered" else torch.arange(64)
    source, dest_slots, others = slots[:20], slots[20:40], slots[40:]
    if dest == "neighbours in another order":
        dest_slots = dest_slots[
            torch.cat([torch.tensor([0]), 1 + torch.randperm(18), torch.tensor([19])])
        ]
    k_before, v_before = k_pool.clone(), v_pool.clone()
    cos, sin = delta_rope_tables(rope.cos_sin_cache, torch.arange(20), torch.arange(500, 520))

    pools = LayerPools((k_pool,), (v_pool,))
    copy_rotated_layers(pools, range(1), source, dest_slots, cos, sin, neox=True)

    assert torch.equal(k_pool[dest_slots], rotate_keys(k_before[source], cos, sin, neox=True))
    assert torch.equal(v_pool[dest_slots], v_before[source])
    for untouched in (source, others):
        assert torch.equal(k_pool[untouched], k_before[untouched])
        assert torch.equal(v_pool[untouched], v_before[untouched])


def test_copying_nothing_changes_nothing() -> None:
    k_pool, v_pool = torch.randn(2, 8, 1, HEAD_DIM)
    before = k_pool.clone()
    nowhere, table = torch.empty(0, dtype=torch.int64), torch.empty(0, HEAD_DIM // 2)

    pools = LayerPools((k_pool,), (v_pool,))
    copy_rotated_layers(pools, range(1), nowhere, nowhere, table, table, neox=True)

    assert torch.equal(k_pool, before)


def test_tables_of_another_length_are_refused() -> None:
    cos = torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"^cos: expected shape \(5, 8\), got \(4, 8\)$"):
        rotate_keys(torch.zeros(5, 1, 16), cos, cos, neox=True)


def test_a_sine_table_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sin: expected shape \(5, 8\), got \(5, 4\)$"):
        rotate_keys(torch.zeros(5, 1, 16), torch.ones(5, 8), torch.zeros(5, 4), neox=True)


def test_double_precision_tables_are_refused() -> None:
    cos = torch.ones(5, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^cos: expected torch\.float32, got torch\.float64$"):
        rotate_keys(torch.zeros(5, 1, 16), cos, cos, neox=True)


def test_more_rotary_dimensions_than_the_head_has_are_refused() -> None:
    cos = torch.ones(5, 9)
    with pytest.raises(ValueError, match=r"^cos: rotary_dim 18 exceeds head_dim 16 of k$"):
        rotate_keys(torch.zeros(5, 1, 16), cos, cos, neox=True)


def test_slot_lists_of_different_lengths_are_refused() -> None:
    pool, table = torch.zeros(8, 1, 16), torch.ones(3, 8)
    source, dest = torch.arange(3), torch.arange(3, 5)
    pools = LayerPools((pool,), (pool,))
    with pytest.raises(ValueError, match=r"^dest_slots: expected shape \(3,\), got \(2,\)$"):
        copy_rotated_layers(pools, range(1), source, dest, table, 0 * table, neox=True)

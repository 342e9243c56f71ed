"""The Triton copy of all layers against complex numbers in float64 and against the torch copy."""

import math

import pytest
import torch

from sgl_blend.kernels.delta_rope import LayerPools, address_table, copy_rotated_layers
from sgl_blend.kernels.delta_rope_triton import copy_rotated_layers_triton
from support import DEVICE, KERNEL_DTYPES, assert_as_good_as

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
# (num_heads, head_dim, v_head_dim, rotary_dim)
SHAPES = [
    (8, 128, 128, 128),
    (1, 64, 64, 64),
    (3, 80, 48, 32),  # partial rotary, three heads, narrow values
    (2, 96, 96, 96),  # halves of 48 are no power of two
    (1, 256, 24, 6),
]
NUM_SLOTS = 300


class Move:
    """Random pools of several layers and a move between their slots."""

    def __init__(
        self,
        num_tokens: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        *,
        num_layers: int = 3,
        padding: int = 0,
    ) -> None:
        num_heads, head_dim, v_head_dim, rotary_dim = shape

        def pool(width: int) -> torch.Tensor:
            rows = torch.randn(NUM_SLOTS, num_heads * width + padding).to(dtype).to(DEVICE)
            return rows[:, : num_heads * width].view(NUM_SLOTS, num_heads, width)

        self.k = tuple(pool(head_dim) for _ in range(num_layers))
        self.v = tuple(pool(v_head_dim) for _ in range(num_layers))
        slots = torch.randperm(NUM_SLOTS, device=DEVICE)
        self.source, self.dest = slots[:num_tokens], slots[num_tokens : 2 * num_tokens]
        self.angle = torch.rand(num_tokens, rotary_dim // 2) * 2 * math.pi
        self.cos, self.sin = self.angle.cos().to(DEVICE), self.angle.sin().to(DEVICE)

    def clone(self) -> LayerPools:
        # Not torch.clone: it would drop the space between two rows.
        k, v = ([_copy_with_strides(x) for x in pools] for pools in (self.k, self.v))
        return LayerPools(tuple(k), tuple(v))

    def run_triton(self, *, neox: bool, layers: range | None = None) -> LayerPools:
        pools = self.clone()
        copy_rotated_layers_triton(
            address_table(pools.k, pools.v),
            range(len(self.k)) if layers is None else layers,
            (pools.k[0], pools.v[0]),
            (self.source, self.dest),
            (self.cos, self.sin),
            neox=neox,
        )
        return pools

    def run_torch(self, *, neox: bool) -> LayerPools:
        pools = LayerPools(*((tuple(x.cpu() for x in y)) for y in (self.clone().k, self.clone().v)))
        cpu = [x.cpu() for x in (self.source, self.dest, self.cos, self.sin)]
        copy_rotated_layers(pools, range(len(self.k)), *cpu, neox=neox)
        return pools


def _copy_with_strides(x: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def turned(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Rotate by complex multiplication in float64."""
    k = k.cpu().double()
    width = 2 * cos.shape[1]
    rotary = k[..., :width]
    pairs = rotary.reshape(*k.shape[:-1], *((2, -1) if neox else (-1, 2)))
    pairs = pairs.transpose(-1, -2) if neox else pairs
    z = torch.view_as_complex(pairs.contiguous())
    z = z * torch.complex(cos.cpu().double(), sin.cpu().double())[:, None, :]
    back = torch.view_as_real(z)
    back = (back.transpose(-1, -2) if neox else back).flatten(-2)
    return torch.cat([back, k[..., width:]], dim=-1)


def bits(x: torch.Tensor) -> torch.Tensor:
    """See a tensor as integers, where -0.0 is not 0.0 and NaN equals itself."""
    size_to_type = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.cpu().contiguous().view(size_to_type[x.element_size()])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layer_is_rotated_as_complex_numbers_are(
    shape: tuple[int, int, int, int], neox: bool, dtype: torch.dtype
) -> None:
    move = Move(37, shape, dtype)

    got, want = move.run_triton(neox=neox), move.run_torch(neox=neox)

    dest = move.dest.cpu()
    for layer, k in enumerate(move.k):
        oracle = turned(k[move.source], move.cos, move.sin, neox=neox)
        assert_as_good_as(got.k[layer].cpu()[dest], want.k[layer][dest], oracle)
        assert torch.equal(bits(got.v[layer]), bits(want.v[layer]))


@pytest.mark.parametrize("num_tokens", [1, 63, 100])
def test_no_other_slot_and_no_other_layer_is_touched(num_tokens: int) -> None:
    move = Move(num_tokens, (3, 64, 48, 32), torch.float16, num_layers=5, padding=16)
    copied = range(1, 5, 2)

    got = move.run_triton(neox=True, layers=copied)

    others = torch.ones(NUM_SLOTS, dtype=torch.bool, device=DEVICE)
    others[move.dest] = False
    for layer in range(5):
        where = others if layer in copied else slice(None)
        assert torch.equal(bits(got.k[layer][where]), bits(move.k[layer][where]))
        assert torch.equal(bits(got.v[layer][where]), bits(move.v[layer][where]))
        moved = not torch.equal(bits(got.k[layer]), bits(move.k[layer]))
        assert moved == (layer in copied)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, *FP8], ids=str)
def test_a_key_that_stays_keeps_its_bits(dtype: torch.dtype, neox: bool) -> None:
    move = Move(50, (2, 64, 64, 32), dtype)
    move.cos, move.sin = torch.ones_like(move.cos), torch.zeros_like(move.sin)
    for k in move.k:
        k[move.source, :, 0] = torch.tensor(-0.0).to(dtype)
        k[move.source, :, 1] = torch.tensor(torch.nan).to(dtype)
        k[move.source, :, 2] = torch.finfo(dtype).min

    for pools in (move.run_triton(neox=neox), move.run_torch(neox=neox)):
        for layer, k in enumerate(move.k):
            copied = pools.k[layer].cpu()[move.dest.cpu()]
            assert torch.equal(bits(copied), bits(k[move.source]))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_keys_make_a_quarter_turn_without_rounding(dtype: torch.dtype, neox: bool) -> None:
    move = Move(63, (3, 80, 64, 32), dtype)
    move.cos, move.sin = torch.zeros_like(move.cos), torch.ones_like(move.sin)

    got = move.run_triton(neox=neox)

    for layer, k in enumerate(move.k):
        exact = turned(k[move.source].float(), move.cos, move.sin, neox=neox)
        assert torch.equal(got.k[layer].cpu()[move.dest.cpu()].double(), exact)


# Triton's interpreter loses the carry where a mantissa rounds up to 2.
@pytest.mark.gpu
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_keys_are_dequantised_rotated_and_quantised(dtype: torch.dtype, neox: bool) -> None:
    move = Move(63, (2, 64, 64, 64), dtype)

    got, want = move.run_triton(neox=neox), move.run_torch(neox=neox)

    dest = move.dest.cpu()
    for layer, k in enumerate(move.k):
        oracle = turned(k[move.source].float(), move.cos, move.sin, neox=neox)
        got_k, want_k = got.k[layer].cpu()[dest].float(), want.k[layer][dest].float()
        assert_as_good_as(got_k, want_k, oracle)
        assert torch.equal(bits(got.v[layer]), bits(want.v[layer]))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_keys_that_grow_beyond_the_largest_number_saturate(dtype: torch.dtype) -> None:
    move = Move(5, (1, 64, 64, 64), dtype)
    move.angle.fill_(math.pi / 4)
    move.cos, move.sin = move.angle.cos().to(DEVICE), move.angle.sin().to(DEVICE)
    for k in move.k:
        k.fill_(torch.finfo(dtype).max)

    for pools in (move.run_triton(neox=True), move.run_torch(neox=True)):
        grown = pools.k[0].cpu()[move.dest.cpu()][..., 32:].float()
        assert (grown == torch.finfo(dtype).max).all()


@pytest.mark.parametrize(("num_tokens", "layers"), [(0, range(3)), (5, range(0)), (0, range(0))])
def test_copying_nothing_changes_nothing(num_tokens: int, layers: range) -> None:
    move = Move(num_tokens, (2, 64, 64, 64), torch.float32)

    got = move.run_triton(neox=True, layers=layers)

    for layer in range(3):
        assert torch.equal(got.k[layer], move.k[layer])
        assert torch.equal(got.v[layer], move.v[layer])


def test_the_public_copy_is_the_same_copy() -> None:
    move = Move(20, (2, 64, 32, 64), torch.float32)
    pools = move.clone()

    copy_rotated_layers(pools, range(3), move.source, move.dest, move.cos, move.sin, neox=True)

    same = move.run_triton(neox=True)
    for layer in range(3):
        assert_as_good_as(pools.k[layer], same.k[layer], same.k[layer].double())
        assert torch.equal(pools.v[layer], same.v[layer])


def test_pools_in_host_memory_have_no_addresses() -> None:
    pools = LayerPools((torch.zeros(4, 1, 8),), (torch.zeros(4, 1, 8),))

    assert pools.addresses is None


def test_layers_that_differ_are_refused() -> None:
    pool, wider = torch.zeros(4, 1, 8), torch.zeros(4, 1, 9)
    with pytest.raises(ValueError, match=r"^k\[1\]: expected shape \(4, 1, 8\), got \(4, 1, 9\)$"):
        LayerPools((pool, wider), (pool, pool))
    with pytest.raises(ValueError, match=r"^v: expected 2 \(at least 1\) layers, got 1$"):
        LayerPools((pool, pool), (pool,))
    with pytest.raises(ValueError, match=r"^v: expected torch\.float32, got torch\.float16$"):
        LayerPools((pool,), (pool.half(),))
    with pytest.raises(ValueError, match=r"^k\[1\]: expected strides and device of layer 0$"):
        LayerPools((pool, torch.zeros(4, 1, 16)[..., :8]), (pool, pool))


def test_pools_whose_rows_are_not_contiguous_are_refused() -> None:
    pool = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"^k: expected contiguous rows, got strides"):
        LayerPools((pool.transpose(1, 2),), (pool,))


def test_pools_of_integers_are_refused() -> None:
    pool = torch.zeros(4, 2, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^k: expected a floating-point pool, got torch\.int8$"):
        LayerPools((pool,), (pool,))


def test_a_layer_without_a_pool_is_refused() -> None:
    move = Move(2, (1, 8, 8, 8), torch.float32)
    slots, tables = (move.source, move.dest), (move.cos, move.sin)
    with pytest.raises(ValueError, match=r"^layers: expected numbers below 3, got range\(2, 4\)$"):
        copy_rotated_layers(move.clone(), range(2, 4), *slots, *tables, neox=True)


def test_pools_at_odd_addresses_are_refused() -> None:
    odd = torch.zeros(33, dtype=torch.float16)[1:].view(4, 1, 8)
    with pytest.raises(ValueError, match=r"^pools: expected addresses in steps of 16 bytes$"):
        address_table((odd,), (odd,))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.kernels.kv_deviation import kv_deviation
from support import assert_as_good_as

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1, 16), (7, 2, 64), (129, 7, 80), (613, 1, 128)]


def deviation_oracle(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Expand the square, |a|^2 - 2ab + |b|^2 in float64, one token at a time."""
    rows = []
    for a, b in zip(fresh.double(), cached.double(), strict=True):
        a, b = a.reshape(-1), b.reshape(-1)
        rows.append(torch.dot(a, a) - 2 * torch.dot(a, b) + torch.dot(b, b))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_squared_distance(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    fresh, cached = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)

    got = kv_deviation(fresh, cached)

    reference = torch.linalg.vector_norm(fresh.float() - cached.float(), dim=(1, 2)) ** 2
    assert got.dtype == torch.float32
    assert_as_good_as(got, reference, deviation_oracle(fresh, cached))


def test_half_precision_is_widened_before_the_subtraction() -> None:
    # 60 000 squared is infinite in float16, and 256 + 1 is 256 in bfloat16.
    large = torch.full((1, 1, 2), 60_000.0, dtype=torch.float16)
    near = torch.tensor([[[256.0, 1.0]]], dtype=torch.bfloat16)

    assert kv_deviation(large, -large).tolist() == [2 * 120_000.0**2]
    assert kv_deviation(near, -near).tolist() == [512.0**2 + 4.0]


@given(seed=st.integers(0, 1 << 30), num_tokens=st.integers(1, 40))
def test_it_is_symmetric_and_zero_only_for_equal_kv(seed: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, num_tokens, 3, 8, generator=generator)

    assert torch.equal(kv_deviation(a, b), kv_deviation(b, a))
    assert (kv_deviation(a, b) > 0).all()
    assert (kv_deviation(a, a) == 0).all()


@given(seed=st.integers(0, 1 << 30), num_tokens=st.integers(2, 40))
def test_a_token_does_not_see_the_others(seed: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, num_tokens, 2, 8, generator=generator)
    order = torch.randperm(num_tokens, generator=generator)

    assert torch.equal(kv_deviation(a[order], b[order]), kv_deviation(a, b)[order])


def test_inputs_are_left_alone() -> None:
    a, b = torch.randn(2, 5, 2, 8)
    before = a.clone(), b.clone()

    kv_deviation(a, b)

    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize("other", [(4, 2, 8), (5, 1, 8), (5, 2, 1)], ids=str)
def test_shapes_that_would_broadcast_are_refused(other: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"^cached: expected shape \(5, 2, 8\), got"):
        kv_deviation(torch.zeros(5, 2, 8), torch.zeros(other))

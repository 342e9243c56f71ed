import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.kernels.checks import check_rows, check_tensor

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(shape=shapes, free=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_shape_fits_itself_and_its_wildcards(shape: tuple[int, ...], free: list[bool]) -> None:
    tensor = torch.zeros(shape)
    pattern = tuple(None if any_ else size for size, any_ in zip(shape, free, strict=False))

    check_tensor("x", tensor, shape=pattern, dtype=torch.float32)


@given(shape=shapes, other=shapes)
def test_another_shape_never_fits(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    if shape != other:
        with pytest.raises(ValueError, match=r"^x: expected shape "):
            check_tensor("x", torch.zeros(shape), shape=other)


def test_the_message_says_what_was_expected_and_what_came() -> None:
    with pytest.raises(ValueError, match=r"^cos: expected shape \(3, None\), got \(2, 4\)$"):
        check_tensor("cos", torch.zeros(2, 4), shape=(3, None))


def test_a_missing_dimension_does_not_fit_a_wildcard() -> None:
    with pytest.raises(ValueError, match=r"expected shape \(2, None\), got \(2,\)"):
        check_tensor("x", torch.zeros(2), shape=(2, None))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^x: expected torch\.float32, got torch\.bfloat16$"):
        check_tensor("x", torch.zeros(2, dtype=torch.bfloat16), shape=(2,), dtype=torch.float32)


def test_any_dtype_fits_if_none_is_asked_for() -> None:
    check_tensor("x", torch.zeros(2, dtype=torch.int8), shape=(2,))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(5),
        torch.zeros(5, 2, 8),
        torch.zeros(5, 9)[:, 2:7],
        torch.zeros(10, 2, 8)[::2],
        torch.zeros(0, 3),
        torch.zeros(5, 8, 1)[:, ::8],
    ],
    ids=lambda tensor: str((tuple(tensor.shape), tensor.stride())),
)
def test_rows_may_lie_apart(tensor: torch.Tensor) -> None:
    check_rows("x", tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(5, 9)[:, ::2], torch.zeros(5, 3, 8)[:, :, :7], torch.zeros(4, 5).t()],
    ids=lambda tensor: str((tuple(tensor.shape), tensor.stride())),
)
def test_a_row_may_not(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^x: expected contiguous rows, got strides \("):
        check_rows("x", tensor)

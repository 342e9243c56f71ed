"""Rows gathered from several tensors, bit for bit."""

import pytest
import torch

from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.row_compaction_triton import compact_rows_triton
from support import DEVICE, KERNEL_DTYPES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NUM_ROWS = 130


def wide(width: int, dtype: torch.dtype, *, padding: int = 0) -> torch.Tensor:
    rows = torch.randn(NUM_ROWS, width + padding, device=DEVICE).to(dtype)
    return rows[:, :width]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 1 << 30, (NUM_ROWS,), device=DEVICE).to(dtype)


def assert_gathered(rows: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    for compact in (compact_rows, compact_rows_triton):
        got = compact(rows.to(DEVICE), tensors)
        assert len(got) == len(tensors)
        for new, old in zip(got, tensors, strict=True):
            assert new.dtype == old.dtype
            assert new.is_contiguous()
            assert torch.equal(new, torch.stack([old[row] for row in rows.tolist()]))


@pytest.mark.parametrize("num_rows", [1, 63, 100])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_all_a_batch_carries_is_gathered(num_rows: int, dtype: torch.dtype) -> None:
    rows = torch.randperm(NUM_ROWS)[:num_rows].sort().values
    hidden, residual = wide(300, dtype, padding=20), wide(4096, dtype)

    assert_gathered(rows, [hidden, residual, numbers(torch.int64), numbers(torch.int32)])


@pytest.mark.parametrize("width", [1, 2, 63, 2048, 2049, 5000])
def test_every_width_is_gathered_whole(width: int) -> None:
    assert_gathered(torch.tensor([129, 0, 0, 7]), [wide(width, torch.float16, padding=1)])


def test_queries_keep_their_heads() -> None:
    q = torch.randn(NUM_ROWS, 7, 80, device=DEVICE)

    assert_gathered(torch.tensor([3, 5]), [q, numbers(torch.int64), q.half()])


def test_no_rows_give_empty_tensors_of_the_same_kind() -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for compact in (compact_rows, compact_rows_triton):
        hidden, place = compact(nothing, [wide(12, torch.float16), numbers(torch.int32)])
        assert (hidden.shape, hidden.dtype) == ((0, 12), torch.float16)
        assert (place.shape, place.dtype) == ((0,), torch.int32)


def test_tensors_that_do_not_fit_are_refused() -> None:
    rows, tensor = torch.arange(2), torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"^tensors: expected 1 to 4, got 5$"):
        compact_rows(rows, [tensor] * 5)
    with pytest.raises(ValueError, match=r"^tensors: expected 1 to 4, got 0$"):
        compact_rows(rows, [])
    with pytest.raises(ValueError, match=r"^tensors\[1\]: expected 5 rows, got 4$"):
        compact_rows(rows, [tensor, tensor[:4]])
    with pytest.raises(ValueError, match=r"^tensors\[0\]: expected contiguous rows, got strides"):
        compact_rows(rows, [tensor.t()])
    with pytest.raises(ValueError, match=r"^rows: expected torch\.int64, got torch\.int32$"):
        compact_rows(rows.int(), [tensor])

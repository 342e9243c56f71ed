"""Attention from fixed buffers: what a batch of its own shape gives, and nothing for the padding."""

import pytest
import torch
from ragged_cases import Case, dense, make_case

from sgl_blend.kernels.ragged_attention import TorchRagged
from sgl_blend.kernels.ragged_attention_fixed import (
    MAX_REQUESTS,
    FixedKernel,
    FixedRows,
    TorchFixed,
    ragged_attention_fixed,
    write_bounds,
)
from sgl_blend.kernels.ragged_attention_fixed_triton import (
    TritonFixed,
    most_tiles,
    ragged_attention_fixed_triton,
)
from sgl_blend.kernels.ragged_attention_tiles import TileShape
from sgl_blend.kernels.ragged_attention_triton import TritonRagged, ragged_attention_triton
from sgl_blend.tuning.kernel_choice import fixed_kernel
from support import DEVICE, SINGLE_FIRST, assert_as_good_as

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL_TILE = TileShape(block_m=32, block_n=16, num_warps=4, num_stages=2)
"""Tiles of 16 rows, so that few rows have many."""
STRIDE = 320
"""Entries of the slot table that belong to one request."""
MANY = [5, 0, 17, 16, 1, 33, 2, 3, 4, 1, 1, 20, 15, 0, 7, 9]


def fixed_rows(case: Case, num_rows: int) -> FixedRows:
    """Put a case into buffers; its requests lie in the table in another order."""
    batch = case.batch
    order = torch.randperm(len(batch.num_rows), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros(len(batch.num_rows) + 1, STRIDE, dtype=torch.int32)
    for place, slots in zip(order, batch.kv_slots, strict=True):
        table[place, : len(slots)] = slots.to(torch.int32)
    rows = FixedRows(
        positions=torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
        bounds=torch.full((3, MAX_REQUESTS + 1), 7, dtype=torch.int64, device=DEVICE),
        table=table.flatten().to(DEVICE),
    )
    rows.positions[: sum(batch.num_rows)] = batch.positions.to(DEVICE)
    lengths = [len(slots) for slots in batch.kv_slots]
    write_bounds(rows.bounds, batch.num_rows, lengths, order.to(DEVICE) * STRIDE)
    return rows


def padded(q: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Add rows of padding that are no numbers: whoever reads them is seen."""
    return torch.cat([q, q.new_full((num_rows - len(q), *q.shape[1:]), torch.nan)])


@pytest.mark.parametrize("dtype", SINGLE_FIRST, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("counts", "num_rows"),
    [([40], 64), ([64], 64), ([1], 64), ([50, 0, 1, 17], 96), ([3, 61], 64), (MANY, 192)],
    ids=str,
)
def test_rows_of_a_fixed_grid_are_those_of_a_grid_of_their_own(
    counts: list[int], num_rows: int, num_splits: int, dtype: torch.dtype
) -> None:
    case = make_case(counts).to(dtype).on(DEVICE)
    batch = case.batch
    alone = TritonRagged().plan(batch.positions, counts, batch.kv_slots, case.q.dtype)
    pools = case.k_pool, case.v_pool
    want = ragged_attention_triton(
        case.q, *pools, alone, scale=case.scale, tile=SMALL_TILE, num_splits=num_splits
    )

    got = ragged_attention_fixed_triton(
        padded(case.q, num_rows), *pools, fixed_rows(case, num_rows), scale=case.scale,
        tile=SMALL_TILE, num_splits=num_splits,
    )  # fmt: skip

    assert (got[sum(counts) :] == 0).all()
    got = got[: sum(counts)]
    # The two are compiled apart on a GPU: from bounds and slots of other types.
    assert torch.equal(got, want) or DEVICE.type == "cuda"
    assert_as_good_as(got, dense(case, case.q.dtype), dense(case, torch.float64), slack=2)


@pytest.mark.parametrize("kernel", [TorchFixed(), TritonFixed()], ids=["torch", "triton"])
def test_the_buffers_decide_and_nothing_else(kernel: FixedKernel) -> None:
    # What a graph does: the same tensors for every batch, the larger one first.
    buffers = fixed_rows(make_case([1] * MAX_REQUESTS), 96)
    for counts in ([50, 0, 1, 17], [20], [4, 4, 80]):
        case = make_case(counts, seed=sum(counts)).on(DEVICE)
        rows = fixed_rows(case, 96)
        buffers = FixedRows(buffers.positions, buffers.bounds, rows.table)
        buffers.positions[: sum(counts)] = rows.positions[: sum(counts)]
        buffers.bounds.copy_(rows.bounds)

        got = kernel.run(
            padded(case.q, 96), case.k_pool, case.v_pool, buffers, scale=case.scale
        )  # fmt: skip

        want, exact = dense(case, case.q.dtype), dense(case, torch.float64)
        assert_as_good_as(got[: sum(counts)], want, exact, slack=2)
        assert (got[sum(counts) :] == 0).all()


def test_torch_gives_the_rows_the_bits_that_they_have_alone() -> None:
    case = make_case([40, 0, 70]).on(DEVICE)

    got = ragged_attention_fixed(
        padded(case.q, 128), case.k_pool, case.v_pool, fixed_rows(case, 128), scale=case.scale
    )

    assert torch.equal(got[:110], case.run(TorchRagged()))


def test_slots_may_lie_beyond_what_32_bits_count() -> None:
    bounds = torch.zeros(3, MAX_REQUESTS + 1, dtype=torch.int64)
    start = 16_384 * 131_072
    write_bounds(bounds, [2, 3], [9, 8], torch.tensor([start, 5]))

    assert bounds[0].tolist() == [0, 2] + [5] * 15
    assert bounds[1].tolist() == [start, 5] + [0] * 15
    assert bounds[2].tolist() == [9, 8] + [0] * 15


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 1024])
@pytest.mark.parametrize("tile_rows", [1, 8, 32])
def test_the_grid_holds_the_tiles_of_every_batch(num_rows: int, tile_rows: int) -> None:
    worst = 0
    for requests in range(1, min(num_rows, MAX_REQUESTS) + 1):
        # A tile more for each row that begins one: all requests but one hold such a row more.
        counts = [1] * requests
        left = num_rows - requests
        for index in range(requests):
            more = left // tile_rows * tile_rows if index == 0 else 0
            counts[index] += more
            left -= more
        counts[-1] += left
        worst = max(worst, sum(-(-count // tile_rows) for count in counts))
    assert worst <= most_tiles(num_rows, tile_rows) <= worst + 1


def test_what_plans_on_the_host_cannot_be_fixed() -> None:
    class Other(TorchRagged):
        name = "flashinfer"

    assert isinstance(fixed_kernel(TorchRagged()), TorchFixed)
    assert isinstance(fixed_kernel(TritonRagged()), TritonFixed)
    assert fixed_kernel(Other()) is None


def test_buffers_that_do_not_fit_are_refused() -> None:
    case = make_case([5])
    rows = fixed_rows(case, 64)
    run = ragged_attention_fixed
    with pytest.raises(ValueError, match=r"^positions: expected shape \(5,\), got \(64,\)$"):
        run(case.q, case.k_pool, case.v_pool, rows, scale=1.0)
    narrow = FixedRows(rows.positions, rows.bounds.to(torch.int32), rows.table)
    with pytest.raises(ValueError, match=r"^bounds: expected torch.int64, got torch.int32$"):
        run(padded(case.q, 64), case.k_pool, case.v_pool, narrow, scale=1.0)
    wide = FixedRows(rows.positions, rows.bounds, rows.table.long())
    with pytest.raises(ValueError, match=r"^table: expected torch.int32, got torch.int64$"):
        run(padded(case.q, 64), case.k_pool, case.v_pool, wide, scale=1.0)

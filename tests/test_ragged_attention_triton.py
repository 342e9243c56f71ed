"""Scattered queries in Triton against a dense float64 oracle, and the law of causality (L2)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged_cases import Case, Rows, dense, make_case

from sgl_blend.kernels import ragged_attention_triton as in_triton
from sgl_blend.kernels.ragged_attention import RaggedKernel, TorchRagged, ragged_kernel
from sgl_blend.kernels.ragged_attention_tiles import (
    Launch,
    TileShape,
    choose_tile,
    prepare_launch,
)
from sgl_blend.kernels.ragged_attention_triton import (
    TritonPlan,
    TritonRagged,
    plan_triton,
    ragged_attention_triton,
)
from support import DEVICE, KERNEL_DTYPES, SINGLE_FIRST, assert_as_good_as

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRITON = TritonRagged()
SMALL_TILE = TileShape(block_m=32, block_n=16, num_warps=4, num_stages=2)
"""Many tiles and blocks from few rows."""


def plan(case: Case) -> TritonPlan:
    rows = case.batch
    return TRITON.plan(rows.positions, rows.num_rows, rows.kv_slots, case.q.dtype)


def run(case: Case, *, tile: TileShape | None = SMALL_TILE, num_splits: int = 1) -> torch.Tensor:
    return ragged_attention_triton(
        case.q, case.k_pool, case.v_pool, plan(case), scale=case.scale, tile=tile,
        num_splits=num_splits,
    )  # fmt: skip


def assert_right(case: Case, got: torch.Tensor) -> None:
    assert got.dtype == case.q.dtype
    assert_as_good_as(got, dense(case, case.q.dtype), dense(case, torch.float64), slack=2)


def assert_same(case: Case, got: torch.Tensor, other: torch.Tensor) -> None:
    """Compare what two variants of the kernel return: a GPU's compiler may order their sums apart."""
    if DEVICE.type == "cuda":
        assert_right(case, got)
    else:
        assert torch.equal(got, other)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[1], [63], [100], [129, 1, 31], [5, 128, 0, 1, 130], [0, 7, 0]])
def test_it_is_softmax_attention_under_a_mask_by_position(
    counts: list[int], dtype: torch.dtype
) -> None:
    case = make_case(counts).to(dtype).on(DEVICE)

    assert_right(case, run(case))
    assert_right(case, case.run(TRITON))  # the tile that is chosen by itself


@pytest.mark.parametrize(
    ("group", "num_kv_heads"), [*((group, 2) for group in range(1, 9)), (3, 1), (8, 1)]
)
def test_every_group_of_heads_reads_its_own_kv_head(group: int, num_kv_heads: int) -> None:
    case = make_case([33, 1, 60], heads=(group * num_kv_heads, num_kv_heads), head_dim=64)

    assert_right(case.on(DEVICE), run(case.on(DEVICE)))


@pytest.mark.parametrize("dtype", SINGLE_FIRST, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dimension_has_a_tile(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([40, 9], head_dim=head_dim).to(dtype).on(DEVICE)

    assert_right(case, case.run(TRITON))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 24), (96, 128), (192, 128)])
def test_values_may_be_narrower_or_wider_than_keys(head_dim: int, v_head_dim: int) -> None:
    case = make_case([40, 9], head_dim=head_dim, v_head_dim=v_head_dim).on(DEVICE)

    got = run(case)

    assert got.shape == (49, 4, v_head_dim)
    assert_right(case, got)


@pytest.mark.parametrize("dtype", SINGLE_FIRST, ids=str)
@pytest.mark.parametrize("num_splits", [2, 5])
def test_shares_of_the_kv_merge_into_the_same_result(num_splits: int, dtype: torch.dtype) -> None:
    case = make_case([50, 0, 1, 17], heads=(6, 2)).to(dtype).on(DEVICE)

    assert_right(case, run(case, num_splits=num_splits))


def test_kv_may_lie_in_rows_instead_of_slots() -> None:
    case = make_case([50, 0, 31]).on(DEVICE)
    slots = torch.cat(case.batch.kv_slots)
    rows = replace(plan(case), slots=None)

    got = ragged_attention_triton(
        case.q, case.k_pool[slots], case.v_pool[slots], rows, scale=case.scale, tile=SMALL_TILE
    )

    assert_same(case, got, run(case))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_fp8_kv_is_read_with_its_scales(
    dtype: torch.dtype, kv_dtype: torch.dtype, num_splits: int
) -> None:
    case = make_case([63, 9], head_dim=64).to(dtype).on(DEVICE)
    k_pool, v_pool = case.k_pool.to(kv_dtype), case.v_pool.to(kv_dtype)
    tensors = case.q, k_pool, v_pool, plan(case)

    got = ragged_attention_triton(
        *tensors, scale=case.scale * 0.5, v_scale=2.0, num_splits=num_splits
    )

    wide = Case(case.q, k_pool.to(dtype) * 0.5, v_pool.to(dtype) * 2, case.batch, case.scale)
    assert_right(wide, got)
    if num_splits == 1:
        through_protocol = TRITON.run(*tensors, scale=case.scale, k_scale=0.5, v_scale=2.0)
        assert torch.equal(through_protocol, got)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_kv_head_is_not_touched_by_its_neighbour(head_dim: int) -> None:
    # At head_dim 80 a block of 128 reaches into the next head, or past the pool.
    case = make_case([40], head_dim=head_dim).on(DEVICE)
    before = run(case)

    case.k_pool[:, 1] = case.v_pool[:, 1] = torch.nan
    after = run(case)

    assert torch.equal(after[:, :2], before[:, :2])
    assert after[:, 2:].isnan().all()


def test_queries_may_lie_inside_a_wider_projection() -> None:
    case = make_case([40]).on(DEVICE)
    projected = torch.randn(40, 200, device=DEVICE)
    projected[:, 50:114] = case.q.flatten(1)
    inside = Case(
        projected[:, 50:114].view(40, 4, 16), case.k_pool, case.v_pool, case.batch, case.scale
    )

    assert_same(case, run(inside), run(case))


def with_garbage_after(case: Case, row: int, garbage: float) -> Case:
    later = case.batch.kv_slots[1][int(case.batch.positions[row]) + 1 :]
    k_pool, v_pool = case.k_pool.clone(), case.v_pool.clone()
    noise = torch.randn(len(later), *k_pool.shape[1:], device=DEVICE).to(k_pool.dtype)
    k_pool[later] = noise * garbage
    v_pool[later] = noise * -garbage
    return Case(case.q, k_pool, v_pool, case.batch, case.scale)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", SINGLE_FIRST, ids=str)
def test_kv_after_a_row_leaves_it_bit_identical(dtype: torch.dtype, num_splits: int) -> None:
    case = make_case([3, 40, 2], seed=5).to(dtype).on(DEVICE)
    before = run(case, num_splits=num_splits)
    for row in (3, 18, 19, 30):
        after = run(with_garbage_after(case, row, 1e3), num_splits=num_splits)

        kept = [*range(row + 1), 43, 44]
        assert torch.equal(after[kept], before[kept])


# The rows after it do see it; the interpreter warns of that.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_splits", [1, 2])
def test_kv_after_a_tile_is_not_even_read(num_splits: int) -> None:
    # Slots are allocated before they are written, and NaN times the weight 0 is NaN.
    case = make_case([3, 40, 2], seed=5).on(DEVICE)
    before = run(case, num_splits=num_splits)
    for last_row_of_tile in (18, 34):
        after = run(with_garbage_after(case, last_row_of_tile, torch.nan), num_splits=num_splits)

        kept = [*range(last_row_of_tile + 1), 43, 44]
        assert torch.equal(after[kept], before[kept])


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_row_sees_kv_at_its_own_position(num_splits: int) -> None:
    case = make_case([3, 40]).on(DEVICE)
    before = run(case, num_splits=num_splits)
    for row in (3, 18, 19, 42):
        own = case.batch.kv_slots[1][case.batch.positions[row]]
        changed = Case(case.q, case.k_pool, case.v_pool.clone(), case.batch, case.scale)
        changed.v_pool[own] += 1e4

        after = run(changed, num_splits=num_splits)

        assert (after[row] != before[row]).any(dim=-1).all()
        assert torch.equal(after[:row], before[:row])


def test_contiguous_rows_are_ordinary_causal_attention() -> None:
    case = make_case([200])
    slots = case.batch.kv_slots[0][:200]
    case.batch = Rows(torch.arange(200), [200], [slots])

    got = run(case.on(DEVICE)).cpu()

    reference = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1),
        case.k_pool[slots].repeat_interleave(2, dim=1).transpose(0, 1),
        case.v_pool[slots].repeat_interleave(2, dim=1).transpose(0, 1),
        is_causal=True,
        scale=case.scale,
    ).transpose(0, 1)
    assert_as_good_as(got, reference, dense(case, torch.float64), slack=2)


@pytest.mark.parametrize("num_requests", [17, 65])
def test_many_requests_find_their_tiles(num_requests: int) -> None:
    case = make_case([n % 3 for n in range(num_requests)]).on(DEVICE)

    assert_right(case, run(case))


@pytest.mark.parametrize("kernel", [TorchRagged(), TRITON], ids=lambda kernel: str(kernel.name))
def test_kernels_answer_alike_behind_one_protocol(kernel: RaggedKernel) -> None:
    case = make_case([40, 9]).on(DEVICE)

    assert_right(case, case.run(kernel))
    case.q = case.q[:0]
    case.batch = Rows(case.batch.positions[:0], [], [])
    assert case.run(kernel).shape == (0, 4, 16)


def test_the_device_decides_which_kernel_runs() -> None:
    assert ragged_kernel(torch.device("cpu")).name == "torch"
    assert ragged_kernel(torch.device("cuda:1")).name == "triton"


@pytest.mark.parametrize("splits", [1, 2])
def test_layers_after_the_first_are_not_prepared_again(
    monkeypatch: pytest.MonkeyPatch, splits: int
) -> None:
    first, second = (make_case([3, 40], seed=seed).on(DEVICE) for seed in (1, 2))
    prepared = []

    def prepare(*args: Any) -> Launch:
        prepared.append(prepare_launch(*args))
        return prepared[-1]

    monkeypatch.setattr(in_triton, "prepare_launch", prepare)
    shared = plan(first)
    layers = [
        ragged_attention_triton(
            case.q, case.k_pool, case.v_pool, shared, scale=1.0, num_splits=splits
        )
        for case in (first, second, first)
    ]
    assert len(prepared) == 1
    assert torch.equal(layers[0], layers[2]), "what a layer left in the buffers is read"
    alone = ragged_attention_triton(
        second.q, second.k_pool, second.v_pool, plan(first), scale=1.0, num_splits=splits
    )
    assert torch.equal(layers[1], alone)
    assert not torch.equal(layers[0], layers[1])


def test_other_shapes_are_prepared_anew() -> None:
    case = make_case([5]).on(DEVICE)
    shared = plan(case)
    TRITON.run(case.q, case.k_pool, case.v_pool, shared, scale=1.0)
    with pytest.raises(ValueError, match=r"^q: 3 heads do not pack over 2 KV heads$"):
        TRITON.run(case.q[:, :3].contiguous(), case.k_pool, case.v_pool, shared, scale=1.0)
    with pytest.raises(ValueError, match=r"^scale: expected a positive number, got 0.0$"):
        TRITON.run(case.q, case.k_pool, case.v_pool, shared, scale=0.0)


def test_batches_that_do_not_fit_are_refused() -> None:
    case = make_case([5]).on(DEVICE)
    rows = case.batch
    with pytest.raises(ValueError, match=r"^num_rows: expected a sum of 5, got 4$"):
        TRITON.plan(rows.positions, [4], rows.kv_slots, torch.float32)
    with pytest.raises(ValueError, match=r"^kv_slots: expected 2 requests, got 1$"):
        TRITON.plan(rows.positions, [4, 1], rows.kv_slots, torch.float32)
    with pytest.raises(ValueError, match=r"^slots: expected shape \(9,\), got \(5,\)$"):
        plan_triton(rows.positions, [5], [9], torch.arange(5))
    good = plan(case)
    with pytest.raises(
        ValueError, match=r"^q: expected shape \(5, None, None\), got \(4, 4, 16\)$"
    ):
        TRITON.run(case.q[:4], case.k_pool, case.v_pool, good, scale=1.0)
    with pytest.raises(ValueError, match=r"^q: 3 heads do not pack over 2 KV heads$"):
        TRITON.run(case.q[:, :3].contiguous(), case.k_pool, case.v_pool, good, scale=1.0)
    with pytest.raises(ValueError, match=r"^q: expected head_dim of at most 256, got 300$"):
        choose_tile(300, torch.bfloat16)

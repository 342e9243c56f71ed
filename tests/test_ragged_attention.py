"""Scattered queries against a dense float64 oracle, and the law of causality (L2)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import Case, Rows, dense, make_case

from sgl_blend.kernels.ragged_attention import plan_ragged, ragged_attention
from support import assert_as_good_as

COUNTS = [1, 63, 64, 65, 127, 128, 129, 613]
GQA = [(4, 4), (4, 2), (4, 1), (8, 1), (7, 1), (14, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_it_is_softmax_attention_under_a_mask_by_position(count: int, dtype: torch.dtype) -> None:
    case = make_case([count]).to(dtype)

    got = case.run()

    assert got.dtype == dtype
    assert_as_good_as(got, dense(case, dtype), dense(case, torch.float64))


@pytest.mark.parametrize("heads", GQA, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_every_head_shape_reads_its_own_kv_head(head_dim: int, heads: tuple[int, int]) -> None:
    case = make_case([33, 1, 60], heads=heads, head_dim=head_dim)

    got = case.run()

    assert_as_good_as(got, dense(case, torch.float32), dense(case, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[1, 1], [129, 1, 31], [5, 128, 127, 1, 130], [0, 7, 0]])
def test_requests_of_a_batch_do_not_mix(counts: list[int], dtype: torch.dtype) -> None:
    case = make_case(counts).to(dtype)

    got = case.run()

    assert_as_good_as(got, dense(case, dtype), dense(case, torch.float64))


def test_values_may_be_narrower_than_keys() -> None:
    case = make_case([40, 9], head_dim=64, v_head_dim=24)

    got = case.run()

    assert got.shape == (49, 4, 24)
    assert_as_good_as(got, dense(case, torch.float32), dense(case, torch.float64))


def test_contiguous_rows_are_ordinary_causal_attention() -> None:
    case = make_case([200])
    case.batch = Rows(torch.arange(200), [200], [case.batch.kv_slots[0][:200]])
    slots = case.batch.kv_slots[0]

    got = case.run()

    reference = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1),
        case.k_pool[slots].repeat_interleave(2, dim=1).transpose(0, 1),
        case.v_pool[slots].repeat_interleave(2, dim=1).transpose(0, 1),
        is_causal=True,
        scale=case.scale,
    ).transpose(0, 1)
    assert_as_good_as(got, reference, dense(case, torch.float64))


def test_the_first_position_sees_itself_alone() -> None:
    case = make_case([1])
    slots = case.batch.kv_slots[0]
    case.batch = Rows(torch.tensor([0]), [1], [slots])

    got = case.run()

    torch.testing.assert_close(got[0], case.v_pool[slots[0]].repeat_interleave(2, dim=0))


def test_a_pool_of_another_dtype_is_read_as_the_queries_are() -> None:
    case = make_case([50])
    narrow = Case(case.q, case.k_pool.bfloat16(), case.v_pool.bfloat16(), case.batch, case.scale)

    got = narrow.run()

    assert got.dtype == torch.float32
    assert_as_good_as(got, dense(narrow, torch.float32), dense(narrow, torch.float64))


def test_inputs_are_left_alone() -> None:
    case = make_case([40, 3])
    before = case.q.clone(), case.k_pool.clone(), case.v_pool.clone()

    case.run()

    assert torch.equal(case.q, before[0])
    assert torch.equal(case.k_pool, before[1])
    assert torch.equal(case.v_pool, before[2])


# Finite and such that scores stay finite: a mask that adds -inf cannot hide an infinite score.
GARBAGE = [1.0, -1e4, 1e30, -1e36]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.sampled_from(COUNTS),
    garbage=st.sampled_from(GARBAGE),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_kv_after_a_row_leaves_it_bit_identical(
    seed: int, count: int, garbage: float, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = make_case([3, count, 2], seed=seed).to(dtype)
    row = 3 + data.draw(st.integers(0, count - 1))
    slots = case.batch.kv_slots[1]
    later = slots[int(case.batch.positions[row]) + 1 :]
    before = case.run()

    noise = torch.randn(len(later), *case.k_pool.shape[1:]).to(dtype)
    case.k_pool[later] = noise * garbage
    case.v_pool[later] = noise * -garbage
    after = case.run()

    kept = [*range(row + 1), 3 + count, 4 + count]
    assert torch.equal(after[kept], before[kept])


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 30), count=st.sampled_from(COUNTS), data=st.data())
def test_a_row_sees_kv_at_its_own_position(seed: int, count: int, data: st.DataObject) -> None:
    case = make_case([3, count], seed=seed)
    row = 3 + data.draw(st.integers(0, count - 1))
    own = case.batch.kv_slots[1][int(case.batch.positions[row])]
    before = case.run()

    # Doubling the key could leave a row alone that hardly looks there; a large value cannot.
    case.v_pool[own] += 1e4
    after = case.run()

    assert (after[row] != before[row]).any(dim=-1).all()
    assert torch.equal(after[:row], before[:row])


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 30), count=st.integers(2, 200))
def test_a_row_is_the_same_whichever_rows_are_kept_beside_it(seed: int, count: int) -> None:
    case = make_case([count], seed=seed)
    some = torch.arange(0, count, 2)
    fewer = Case(
        case.q[some],
        case.k_pool,
        case.v_pool,
        Rows(case.batch.positions[some], [len(some)], case.batch.kv_slots),
        case.scale,
    )

    assert_as_good_as(fewer.run(), dense(fewer, torch.float32), dense(case, torch.float64)[some])


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_all_layers_take_the_same_masks(kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_blend.kernels.ragged_attention._KEPT_MASK_BYTES", kept_bytes)
    case = make_case([70, 5], heads=(4, 2))
    rows = case.batch
    plan = plan_ragged(rows.positions, rows.num_rows, rows.kv_slots, case.q.dtype)
    layers = [
        ragged_attention(case.q, case.k_pool, case.v_pool, plan, scale=case.scale) for _ in range(2)
    ]
    assert torch.equal(layers[0], layers[1])
    assert len(plan._grouped) == (3 if kept_bytes else 0)


def test_no_rows_give_no_rows() -> None:
    case = make_case([5])
    case.q = case.q[:0]
    case.batch = Rows(torch.empty(0, dtype=torch.int64), [], [])

    assert case.run().shape == (0, 4, 16)


def test_a_batch_planned_for_other_rows_is_refused() -> None:
    case = make_case([5])
    rows = case.batch
    batch = plan_ragged(rows.positions, rows.num_rows, rows.kv_slots, torch.float32)
    with pytest.raises(ValueError, match=r"^q: expected 5 rows, got 4$"):
        ragged_attention(case.q[:4], case.k_pool, case.v_pool, batch, scale=1.0)


@pytest.mark.parametrize("num_rows", [[4], [6], [2, 2], []], ids=str)
def test_rows_that_do_not_add_up_are_refused(num_rows: list[int]) -> None:
    case = make_case([5])
    case.batch = Rows(case.batch.positions, num_rows, case.batch.kv_slots)

    with pytest.raises(ValueError, match=f"^num_rows: expected a sum of 5, got {sum(num_rows)}$"):
        case.run()


def test_a_request_without_slots_is_refused() -> None:
    case = make_case([5, 3])
    case.batch = Rows(case.batch.positions, [5, 3], case.batch.kv_slots[:1])

    with pytest.raises(ValueError, match="zip"):
        case.run()

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.kernels.query_attention import query_attention


def oracle(q: torch.Tensor, k: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Row by row, head by head, in float64."""
    group = q.shape[1] // k.shape[1]
    total = torch.zeros(k.shape[0], dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            visible = k[: first + row + 1, head // group].double()
            total[: first + row + 1] += (visible @ q[row, head].double() * scale).softmax(0)
    return total / (q.shape[0] * q.shape[1])


@given(
    rows=st.integers(1, 6),
    before=st.integers(0, 20),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_the_score_is_the_mean_attention(
    rows: int, before: int, kv_heads: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, kv_heads * group, 16, generator=generator)
    k = torch.randn(before + rows, kv_heads, 16, generator=generator)

    score = query_attention(q, k, before, scale=0.25)

    assert score.dtype == torch.float32
    torch.testing.assert_close(score.double(), oracle(q, k, before, 0.25), rtol=1e-5, atol=1e-7)
    assert float(score.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_row_pays_nothing_to_what_stands_after_it() -> None:
    q, k = torch.randn(2, 2, 8), torch.randn(9, 1, 8)
    assert query_attention(q, k, 3, scale=1.0)[5:].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("q", "k", "first", "sentence"),
    [
        ((2, 3, 8), (9, 2, 8), 0, "3 heads are no multiple of 2"),
        ((2, 2, 8), (9, 2, 8), 8, "2 rows from 8 leave 9 positions"),
        ((2, 2, 8), (9, 2, 4), 0, "k: expected shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], first: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        query_attention(torch.zeros(q), torch.zeros(k), first, scale=1.0)

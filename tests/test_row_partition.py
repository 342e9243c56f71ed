import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.kernels.row_partition import complement


@st.composite
def choices(draw: st.DrawFn) -> tuple[list[int], int]:
    num_rows = draw(st.integers(0, 300))
    chosen = draw(st.lists(st.integers(0, num_rows - 1), unique=True)) if num_rows else []
    return chosen, num_rows


@given(choices())
def test_it_is_the_set_difference_in_ascending_order(choice: tuple[list[int], int]) -> None:
    chosen, num_rows = choice

    rest = complement(torch.tensor(chosen, dtype=torch.int64), num_rows)

    assert rest.dtype == torch.int64
    assert rest.tolist() == sorted(set(range(num_rows)) - set(chosen))


@given(choices())
def test_the_complement_of_the_complement_is_the_choice(choice: tuple[list[int], int]) -> None:
    chosen, num_rows = choice

    rest = complement(torch.tensor(chosen, dtype=torch.int64), num_rows)

    assert complement(rest, num_rows).tolist() == sorted(chosen)


def test_order_survives_beyond_the_sizes_where_unstable_sorts_look_stable() -> None:
    num_rows = 100_003
    chosen = torch.randperm(num_rows)[: num_rows // 3]

    rest = complement(chosen, num_rows)

    assert rest.numel() == num_rows - chosen.numel()
    assert (rest.diff() > 0).all()
    assert not torch.isin(rest, chosen).any()

"""The Triton tables of a rotation against the torch ones, of which a float32 is the last bit."""

import pytest
import torch

from sgl_blend.kernels.delta_rope import _delta_rope_tables_torch
from sgl_blend.kernels.delta_rope_tables_triton import delta_rope_tables_triton
from support import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NUM_POSITIONS = 4000


def make_table(half: int, dtype: torch.dtype, *, scale: float = 1.0) -> torch.Tensor:
    frequencies = 10_000.0 ** -(torch.arange(half) / half)
    angle = torch.outer(torch.arange(NUM_POSITIONS).float(), frequencies)
    return (scale * torch.cat([angle.cos(), angle.sin()], dim=-1)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 133])
@pytest.mark.parametrize("half", [3, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_both_make_the_same_tables(num_tokens: int, half: int, dtype: torch.dtype) -> None:
    table = make_table(half, dtype, scale=1.27)  # as YaRN's, whose scale must fall out
    # Two rows of one tensor, as they come: the second does not begin on 16 bytes.
    both = torch.randint(0, NUM_POSITIONS, (2, num_tokens), device=DEVICE)
    both[1, : num_tokens // 4] = both[0, : num_tokens // 4]

    got = delta_rope_tables_triton(table, both[0], both[1])

    want = _delta_rope_tables_torch(table, both[0], both[1])
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=1e-9)
    cos, sin = got
    still = slice(0, num_tokens // 4)
    assert torch.equal(cos[still], torch.ones_like(cos[still]))
    assert torch.equal(sin[still], torch.zeros_like(sin[still]))


def test_a_table_may_be_a_part_of_a_wider_one() -> None:
    wide = make_table(8, torch.float32)
    table = torch.cat([wide, torch.full_like(wide, torch.nan)], dim=-1)[:, :16]
    old = torch.tensor([5, 9], device=DEVICE)
    new = torch.tensor([700, 2], device=DEVICE)
    for ours, theirs in zip(
        delta_rope_tables_triton(table, old, new),
        _delta_rope_tables_torch(wide, old, new),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=1e-9)

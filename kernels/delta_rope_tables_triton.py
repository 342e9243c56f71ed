"""The tables of delta_rope.py in one Triton launch instead of sixteen; formula there.

Two rows of the model's table are read for each token, in float64 as the formula wants it. Bound by
latency: a prompt's tables are a few hundred KB.
"""

# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 16


def delta_rope_tables_triton(
    cos_sin: torch.Tensor, old_position: torch.Tensor, new_position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the composition; arguments as delta_rope_tables."""
    num_tokens, half = old_position.shape[0], cos_sin.shape[1] // 2
    cos = torch.empty(num_tokens, half, dtype=torch.float32, device=cos_sin.device)
    sin = torch.empty_like(cos)
    if num_tokens:
        _tables[(triton.cdiv(num_tokens, BLOCK_TOKENS),)](
            cos_sin, old_position, new_position, cos, sin, num_tokens, cos_sin.stride(0),
            HALF=half, BLOCK_R=triton.next_power_of_2(half), BLOCK_T=BLOCK_TOKENS, num_warps=4,
        )  # fmt: skip
    return cos, sin


# Old and new positions are two rows of one upload: the second begins on 16 bytes every other time.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["old_ptr", "new_ptr"])
def _tables(  # type: ignore[no-untyped-def]
    table_ptr, old_ptr, new_ptr, cos_ptr, sin_ptr, num_tokens, table_stride,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < num_tokens
    old = tl.load(old_ptr + token, mask=valid, other=0).to(tl.int64)
    new = tl.load(new_ptr + token, mask=valid, other=0).to(tl.int64)
    pair = tl.arange(0, BLOCK_R)[None, :]
    mask = valid[:, None] & (pair < HALF)
    old_row = table_ptr + old[:, None] * table_stride + pair
    new_row = table_ptr + new[:, None] * table_stride + pair
    old_cos = tl.load(old_row, mask=mask, other=1.0).to(tl.float64)
    old_sin = tl.load(old_row + HALF, mask=mask, other=0.0).to(tl.float64)
    new_cos = tl.load(new_row, mask=mask, other=1.0).to(tl.float64)
    new_sin = tl.load(new_row + HALF, mask=mask, other=0.0).to(tl.float64)
    cos = new_cos * old_cos + new_sin * old_sin
    sin = new_sin * old_cos - new_cos * old_sin
    norm = tl.sqrt(cos * cos + sin * sin)
    same = (old == new)[:, None]
    cos = tl.where(same, 1.0, cos / norm)
    sin = tl.where(same, 0.0, sin / norm)
    place = token.to(tl.int64)[:, None] * HALF + pair
    tl.store(cos_ptr + place, cos.to(tl.float32), mask=mask)
    tl.store(sin_ptr + place, sin.to(tl.float32), mask=mask)

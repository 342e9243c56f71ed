"""Selection policies: which reused tokens are recomputed.

A policy is a plain function of scores, chunk lengths and budget; it never touches KV. All of them
select among the reused tokens of one request, numbered 0..n-1 in prompt order, chunk after chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from sgl_blend.kernels.row_partition import first_rows

_RANDOM_SEED = 2405


class Score(Enum):
    """What a policy ranks tokens by."""

    NOTHING = "nothing"
    V = "squared deviation of V"
    K = "squared deviation of K, after the cached key was moved"


Select = Callable[[torch.Tensor | None, list[int], int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to choose tokens.

    Attributes:
        score: What the fusor must measure at the check layer.
        select: (scores float32 [n] or None, tokens per chunk, budget) -> int64 [budget] distinct
            tokens, ascending.
        fixed_ratio: The only ratio the policy has, or None if the request chooses.
    """

    score: Score
    select: Select
    fixed_ratio: float | None = None


def select_hkvd(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Take the tokens whose cached KV deviates most (CacheBlend §4.3).

    Ties go to the earlier token, so a rerun of the same request selects the same tokens.
    """
    assert scores is not None, "hkvd needs scores"
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:budget].sort().values


def select_first_k(
    scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
) -> torch.Tensor:
    """Take the first tokens of every chunk, equally many as far as it goes (EPIC's LegoLink)."""
    by_offset = sorted(
        (offset, start + offset)
        for start, length in zip(first_rows(chunk_lengths), chunk_lengths, strict=True)
        for offset in range(length)
    )
    return torch.tensor(sorted(token for _, token in by_offset[:budget]), dtype=torch.int64)


def select_random(
    scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
) -> torch.Tensor:
    """Take tokens at random; the seed is fixed, so the same prompt gives the same tokens."""
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    return torch.randperm(sum(chunk_lengths), generator=generator)[:budget].sort().values


def select_leading(
    scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
) -> torch.Tensor:
    """Take the first tokens of the request; with a budget of all or nothing, all or nothing."""
    return torch.arange(budget)


POLICIES: dict[str, Policy] = {
    "hkvd": Policy(Score.V, select_hkvd),
    "hkvd-k": Policy(Score.K, select_hkvd),
    "first-k": Policy(Score.NOTHING, select_first_k),
    "random": Policy(Score.NOTHING, select_random),
    "none": Policy(Score.NOTHING, select_leading, fixed_ratio=0.0),
    "all": Policy(Score.NOTHING, select_leading, fixed_ratio=1.0),
}


def recompute_budget(policy: str, ratio: float, num_reused: int) -> int:
    """Return how many of num_reused tokens are recomputed: the ratio's share, rounded up."""
    fixed = POLICIES[policy].fixed_ratio
    share = (ratio if fixed is None else fixed) * num_reused
    # 0.15 * 20 is 3.0000000000000004 for some ratios; rounding that up would be a token too many.
    return min(num_reused, math.ceil(share - 1e-9))

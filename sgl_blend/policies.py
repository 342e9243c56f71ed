"""Selection policies: which reused tokens are recomputed, and in how many layers.

A policy is a plain function of scores, chunk lengths and budget; it never touches KV. It gives every
reused token of a request, numbered 0..n-1 in prompt order, chunk after chunk, a rank; the tokens of
the largest ranks are recomputed, of equal ranks the earlier one, so a rerun selects the same tokens.

    hkvd, hkvd-k    the largest deviation of V or of K          CacheBlend §4.3
    gradual         hkvd again in every layer, ever fewer       CacheBlend §4.3
    query-aware     what the question attends to                ProphetKV
    hybrid          the first tokens of each chunk, then hkvd
    first-k         the first tokens of each chunk              EPIC's LegoLink-k
    edge            both ends of each chunk
    oracle          the largest deviation from a full prefill   evaluation only
    random, none, all
    exact-NAME                          as NAME, but rows are dropped whose KV is the true one: the
                                        answer must be that of a full prefill; evaluation only
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch

from sgl_blend.kernels.row_partition import first_rows
from sgl_blend.kernels.segmented_topk import segmented_topk

_RANDOM_SEED = 2405
_HYBRID_FIRST = 8
"""Hybrid takes at most so many first tokens of a chunk, and at most half its budget for them."""
_GRADUAL_FIRST = 1.5
"""Gradual begins with this multiple of its ratio and ends as far below it."""


class Score(Enum):
    """What a policy ranks tokens by."""

    NOTHING = "nothing"
    V = "squared deviation of V"
    K = "squared deviation of K, after the cached key was moved"
    QUERY = "attention that the rows behind the last chunk pay to the token"
    FULL = "squared deviation of V from a full prefill, over all layers above the check layer"


Rank = Callable[[torch.Tensor | None, list[int], int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to choose tokens.

    Attributes:
        score: What the fusor must measure.
        rank: (scores float32 [n] or None, tokens per chunk, budget) -> float32 [n], not negative.
        fixed_ratio: The only ratio the policy has, or None if the request chooses.
        gradual: Whether the choice is made anew in every layer above the check layer, among the
            tokens of the layer before.
        skips_full_layers: Whether the rows it does not choose are dropped before the first layer,
            because nothing needs to be seen for the choice.
        evaluation_only: Whether it costs a full prefill, which no server should pay.
        true_kv: Whether the rows it drops keep the KV of that full prefill, not their chunk's.
    """

    score: Score
    rank: Rank
    fixed_ratio: float | None = None
    gradual: bool = False
    skips_full_layers: bool = False
    evaluation_only: bool = False
    true_kv: bool = False

    @property
    def prefills_first(self) -> bool:
        """Whether a full prefill comes before the blended forward."""
        return self.true_kv or self.score is Score.FULL

    def select(
        self, scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
    ) -> torch.Tensor:
        """Return the tokens that are recomputed, int64 [budget], distinct and ascending."""
        ranks = self.rank(scores, chunk_lengths, budget)
        return segmented_topk(ranks, [sum(chunk_lengths)], [budget])[0]


def rank_by_score(
    scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
) -> torch.Tensor:
    """Prefer the tokens whose cached KV deviates most (CacheBlend §4.3)."""
    assert scores is not None, "nothing was measured"
    return scores


def rank_hybrid(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the first tokens of every chunk, which lost their attention sink, then by score."""
    assert scores is not None, "nothing was measured"
    per_chunk = min(_HYBRID_FIRST, budget // (2 * len(chunk_lengths)))
    raised = scores.clone()
    for start, length in zip(first_rows(chunk_lengths), chunk_lengths, strict=True):
        raised[start : start + min(per_chunk, length)] = math.inf
    return raised


def rank_first(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the first tokens of every chunk, equally many as far as it goes (EPIC's LegoLink)."""
    return torch.cat([max(chunk_lengths) - _offsets(length) for length in chunk_lengths])


def rank_edges(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the tokens nearest to either end of their chunk."""
    inward = [torch.minimum(_offsets(n), n - 1 - _offsets(n)) for n in chunk_lengths]
    return max(chunk_lengths) - torch.cat(inward)


def rank_randomly(
    scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
) -> torch.Tensor:
    """Prefer tokens at random; the seed is fixed, so the same prompt gives the same tokens."""
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    ranks = torch.zeros(sum(chunk_lengths))
    ranks[torch.randperm(len(ranks), generator=generator)[:budget]] = 1.0
    return ranks


def rank_equally(
    scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
) -> torch.Tensor:
    """Prefer nothing: for budgets of all or nothing."""
    return torch.zeros(sum(chunk_lengths))


def _offsets(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)


POLICIES: dict[str, Policy] = {
    "hkvd": Policy(Score.V, rank_by_score),
    "hkvd-k": Policy(Score.K, rank_by_score),
    "gradual": Policy(Score.V, rank_by_score, gradual=True),
    "hybrid": Policy(Score.V, rank_hybrid),
    "query-aware": Policy(Score.QUERY, rank_by_score),
    "edge": Policy(Score.NOTHING, rank_edges, skips_full_layers=True),
    "first-k": Policy(Score.NOTHING, rank_first, skips_full_layers=True),
    "random": Policy(Score.NOTHING, rank_randomly),
    "none": Policy(Score.NOTHING, rank_equally, fixed_ratio=0.0),
    "all": Policy(Score.NOTHING, rank_equally, fixed_ratio=1.0),
    "oracle": Policy(Score.FULL, rank_by_score, evaluation_only=True),
}
NAMED = tuple(POLICIES)
"""What users choose among; the exact ones below are for tests of the engine."""
EXACT = "exact-"
POLICIES.update(
    {
        EXACT + name: replace(policy, evaluation_only=True, true_kv=True)
        for name, policy in POLICIES.items()
        if not policy.evaluation_only and policy.fixed_ratio != 1.0
    }
)


def recompute_budget(policy: str, ratio: float, num_reused: int) -> int:
    """Return how many of num_reused tokens are recomputed: the ratio's share, rounded up."""
    fixed = POLICIES[policy].fixed_ratio
    share = (ratio if fixed is None else fixed) * num_reused
    # 0.15 * 20 is 3.0000000000000004 for some ratios; rounding that up would be a token too many.
    return min(num_reused, math.ceil(share - 1e-9))


def keep_schedule(policy: str, ratio: float, num_reused: int, num_layers: int) -> list[int]:
    """Return how many reused tokens are computed in each of the layers above the check layer.

    A gradual policy's share falls on a straight line and has the ratio as its mean; it begins at
    all tokens if 1.5 times the ratio is more. All others keep their budget.

    Args:
        policy: Name of the policy.
        ratio: Share of the reused tokens.
        num_reused: Tokens to choose from.
        num_layers: Layers above the check layer, at least 1.
    """
    budget = recompute_budget(policy, ratio, num_reused)
    if not POLICIES[policy].gradual or num_layers == 1:
        return [budget] * num_layers
    begin = min(1.0, _GRADUAL_FIRST * ratio)
    end = 2 * ratio - begin
    shares = [begin + (end - begin) * i / (num_layers - 1) for i in range(num_layers)]
    return [min(num_reused, round(share * num_reused)) for share in shares]

"""What a selection policy is, and how many tokens it takes.

A policy is a plain description; it never touches KV. It gives every reused token of a request, numbered
0..n-1 in prompt order, chunk after chunk, a priority. The tokens of the largest priorities are
recomputed. Of equal priorities the earlier token wins, so a rerun selects the same tokens.

Programs describe policies where torch is not installed. So nothing here or in the modules beside it
imports torch at its top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sgl_blend.kernels.rounding import Rounding

_GRADUAL_FIRST = 1.5
"""A gradual policy begins with this multiple of its ratio and ends as far below it."""


class Sees(Enum):
    """What must have been computed before a policy can choose."""

    NOTHING = "nothing"
    LAYER = "the layer that selects"
    PREFILL = "a full prefill; for evaluations"


@dataclass(frozen=True, slots=True)
class LayerView:
    """What a score may look at: one request in one layer, with this rank's heads.

    Attributes:
        q: [rows of the batch, heads, head_dim], rotated queries. Empty after a full prefill.
        k: [rows of the batch, KV heads, head_dim], rotated keys that were just computed. With a pool of
            another dtype it is the pool, where they lie rounded as the stored ones are.
        v: Same shape, values that were just computed, likewise.
        k_pool: [slots, KV heads, head_dim], the layer's keys in the pool.
        v_pool: Same shape, the layer's values.
        rows: int64 [n], row of each reused token in k and v.
        stored_slots: int64 [n], slot of each reused token's stored KV in k_pool and v_pool.
        rotation: cos and sin, float32 [n, rotary_dim / 2], that move each stored key to its new
            position, and whether the style is NeoX.
        positions: int64 [n], positions in the request.
        question: Rows after the last chunk.
        own_slots: Returns int64 [tokens], the slots of the whole request, by position.
        scale: Factor on attention logits of q with keys in k_pool.
        k_scale: What stored keys, and k, are multiplied by to be in the model's units.
        v_scale: Likewise for values.
        v_rounding: How far coding may have moved the stored values; None if they are exact.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    rows: torch.Tensor
    stored_slots: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor, bool]
    positions: torch.Tensor
    question: range
    own_slots: Callable[[], torch.Tensor]
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0
    v_rounding: Rounding | None = None


Score = Callable[[LayerView], "torch.Tensor"]
"""Returns float32 [n]; the engine adds up what the tensor-parallel ranks return."""

Prioritise = Callable[["torch.Tensor | None", list[int], int], "torch.Tensor"]
"""Takes scores float32 [n] or None, tokens per chunk, and the budget; returns float32 [n], >= 0."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to choose tokens.

    Attributes:
        summary: Which tokens it prefers, for people.
        prioritise: Gives each token its priority.
        sees: What must be computed before.
        score: Measures the tokens; None for a policy that sees nothing. After a full prefill the
            engine calls it for each layer above the check layer and adds up the results, each
            divided by its mean.
        source: Paper and section it comes from.
        fixed_ratio: The only ratio the policy has, or None if the request chooses.
        gradual: Whether the choice is made anew in every layer above the check layer, among the
            tokens of the layer before.
        skips_full_layers: Whether the rows it does not choose are dropped before the first layer.
            Only a policy that sees nothing can do that.
        early_share: Share of the tokens with a memory that pass the layers up to the check layer; at
            least those that are recomputed do. The others are dropped before the first layer, by what
            is remembered of their deviation. None for a policy that trusts no memory. A token without
            a memory passes.
        evaluation_only: Whether it costs a full prefill, which no server should pay.
        true_kv: Whether the rows it drops keep the KV of that full prefill, not their chunk's.
        turned: Whether their keys are moved to where the chunk is stored and back before, rounded each
            time: what is lost then is what moving keys costs.
    """

    summary: str
    prioritise: Prioritise
    sees: Sees = Sees.NOTHING
    score: Score | None = None
    source: str | None = None
    fixed_ratio: float | None = None
    gradual: bool = False
    skips_full_layers: bool = False
    early_share: float | None = None
    evaluation_only: bool = False
    true_kv: bool = False
    turned: bool = False

    def __post_init__(self) -> None:
        assert (self.score is None) == (self.sees is Sees.NOTHING), "a score needs to see something"
        assert not self.skips_full_layers or self.sees is Sees.NOTHING, "it sees no layer"
        assert not self.trusts_memory or self.sees is Sees.LAYER, "a token may have no memory"

    @property
    def prefills_first(self) -> bool:
        """Whether a full prefill comes before the blended forward."""
        return self.true_kv or self.sees is Sees.PREFILL

    @property
    def trusts_memory(self) -> bool:
        """Whether tokens are dropped before the first layer by what is remembered of them."""
        return self.early_share is not None

    def select(
        self, scores: torch.Tensor | None, chunk_lengths: list[int], budget: int
    ) -> torch.Tensor:
        """Return the tokens that are recomputed, int64 [budget], distinct and ascending."""
        from sgl_blend.kernels.segmented_topk import segmented_topk

        priorities = self.prioritise(scores, chunk_lengths, budget)
        return segmented_topk(priorities, [sum(chunk_lengths)], [budget])[0]


def by_score(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the tokens of the largest scores."""
    assert scores is not None, "nothing was measured"
    return scores


def budget_of(policy: Policy, ratio: float, num_reused: int) -> int:
    """Return how many of num_reused tokens are recomputed: the ratio's share, rounded up."""
    return _share_of(num_reused, ratio if policy.fixed_ratio is None else policy.fixed_ratio)


def _share_of(count: int, share: float) -> int:
    """Return a share of so many, rounded up."""
    # 0.15 * 20 is 3.0000000000000004 for some shares; rounding that up would be one too many.
    return min(count, math.ceil(share * count * (1 - 1e-12)))


def early_of(policy: Policy, ratio: float, num_remembered: int) -> int:
    """Return how many tokens with a memory, of so many, pass the layers up to the check layer."""
    if policy.early_share is None:
        return num_remembered
    early = _share_of(num_remembered, policy.early_share)
    return max(early, budget_of(policy, ratio, num_remembered))


def schedule_of(policy: Policy, ratio: float, num_reused: int, num_layers: int) -> list[int]:
    """Return how many reused tokens are computed in each of the layers above the check layer.

    A gradual policy's share falls on a straight line and has the ratio as its mean; it begins at
    all tokens if 1.5 times the ratio is more. All others keep their budget.

    Args:
        policy: The policy.
        ratio: Share of the reused tokens.
        num_reused: Tokens to choose from.
        num_layers: Layers above the check layer, at least 1.
    """
    if not policy.gradual or num_layers == 1:
        return [budget_of(policy, ratio, num_reused)] * num_layers
    begin = min(1.0, _GRADUAL_FIRST * ratio)
    end = 2 * ratio - begin
    shares = [begin + (end - begin) * i / (num_layers - 1) for i in range(num_layers)]
    return [min(num_reused, round(share * num_reused)) for share in shares]

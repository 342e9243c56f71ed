"""Policies that recompute the tokens whose stored KV deviates most (CacheBlend §4.3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sgl_blend.policies.spec import LayerView, Policy, Sees, by_score

if TYPE_CHECKING:
    import torch

_HYBRID_FIRST = 8
"""Hybrid takes at most so many first tokens of a chunk, and at most half its budget for them."""


def v_deviation(view: LayerView) -> torch.Tensor:
    """Measure the squared distance of the stored V, as far as coding does not explain it."""
    from sgl_blend.kernels.kv_deviation import in_units, kv_deviation_at

    found = kv_deviation_at(
        view.v, view.rows, view.v_pool, view.stored_slots, rounding=view.v_rounding
    )
    return in_units(found, view.v_scale)


def k_deviation(view: LayerView) -> torch.Tensor:
    """Measure the squared distance of the stored K, after it was moved."""
    from sgl_blend.kernels.kv_deviation import in_units, kv_deviation_at

    found = kv_deviation_at(view.k, view.rows, view.k_pool, view.stored_slots, view.rotation)
    return in_units(found, view.k_scale)


def hybrid(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the first tokens of every chunk, which lost their attention sink, then by score."""
    from sgl_blend.kernels.row_partition import first_rows

    assert scores is not None, "nothing was measured"
    per_chunk = min(_HYBRID_FIRST, budget // (2 * len(chunk_lengths)))
    raised = scores.clone()
    for start, length in zip(first_rows(chunk_lengths), chunk_lengths, strict=True):
        raised[start : start + min(per_chunk, length)] = math.inf
    return raised


POLICIES = {
    "hkvd": Policy(
        "the largest deviation of V", by_score, Sees.LAYER, v_deviation, "CacheBlend §4.3"
    ),
    "hkvd-k": Policy(
        "the largest deviation of K", by_score, Sees.LAYER, k_deviation, "CacheBlend §4.3"
    ),
    "gradual": Policy(
        "as hkvd, chosen again in every layer, ever fewer",
        by_score,
        Sees.LAYER,
        v_deviation,
        "CacheBlend §4.3",
        gradual=True,
    ),
    "hybrid": Policy(
        "the first tokens of each chunk, then as hkvd", hybrid, Sees.LAYER, v_deviation
    ),
    "funnel": Policy(
        "as hkvd, among the tokens whose deviation was largest in other contexts",
        by_score,
        Sees.LAYER,
        v_deviation,
        early_share=0.3,
    ),
    "remembered": Policy(
        "the tokens whose deviation was largest in other contexts",
        by_score,
        Sees.LAYER,
        v_deviation,
        early_share=0.0,
    ),
}

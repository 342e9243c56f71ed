"""Policies that ask what the question looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_blend.policies.spec import LayerView, Policy, Sees, by_score

if TYPE_CHECKING:
    import torch

_MAX_QUESTION_ROWS = 128
"""The last so many rows of a long question are asked."""


def question_attention(view: LayerView) -> torch.Tensor:
    """Measure the attention that the rows after the last chunk pay to each token."""
    from sgl_blend.kernels.query_attention import query_attention

    slots = view.own_slots()
    rows = view.question[-_MAX_QUESTION_ROWS:]
    attention = query_attention(
        view.q[rows.start : rows.stop],
        view.k_pool[slots],
        slots.numel() - len(rows),
        scale=view.scale,
    )
    return attention[view.positions]


POLICIES = {
    "query-aware": Policy(
        "what the question attends to", by_score, Sees.LAYER, question_attention, "ProphetKV"
    ),
}

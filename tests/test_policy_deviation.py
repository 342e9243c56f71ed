"""Policies that compare KV: their scores once more in float64, and what hybrid adds to them."""

import torch
from reference import Seen, distances

from sgl_blend.policies import POLICIES


def v_deviation(seen: Seen) -> torch.Tensor:
    return distances(seen.new.v, seen.old.v)


def k_deviation(seen: Seen) -> torch.Tensor:
    return distances(seen.new.k, seen.old.k)


SCORES = {
    **dict.fromkeys(("hkvd", "gradual", "hybrid", "funnel", "remembered"), v_deviation),
    "hkvd-k": k_deviation,
}


def test_hybrid_takes_heads_of_chunks_and_then_what_deviates_most() -> None:
    scores = torch.arange(30.0)  # the last tokens deviate most
    # 6 // (2 * 3) = 1 first token per chunk, three by deviation
    assert POLICIES["hybrid"].select(scores, [10, 10, 10], 6).tolist() == [0, 10, 20, 27, 28, 29]
    assert POLICIES["hybrid"].select(scores, [10, 10, 10], 5).tolist() == [25, 26, 27, 28, 29]


def test_hybrid_takes_no_more_than_eight_first_tokens_of_a_chunk() -> None:
    scores = torch.arange(200.0)
    chosen = POLICIES["hybrid"].select(scores, [100, 100], 60).tolist()
    assert chosen == [*range(8), *range(100, 108), *range(156, 200)]


def test_hybrid_does_not_change_the_scores() -> None:
    scores = torch.arange(30.0)
    POLICIES["hybrid"].select(scores, [10, 10, 10], 12)
    assert torch.equal(scores, torch.arange(30.0))

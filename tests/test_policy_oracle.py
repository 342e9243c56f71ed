"""The policy that has seen a full prefill: its score once more in float64."""

import torch
from reference import Seen, distances


def deviation_above(seen: Seen) -> torch.Tensor:
    """Add up what V deviates in every layer above the check layer, each in units of its mean."""
    total = torch.zeros(len(seen.kept), dtype=torch.float64)
    for true, copy in zip(seen.truth, seen.stored, strict=True):
        deviation = distances(true.v[seen.kept], copy.v)
        total += deviation / deviation.mean()
    return total


SCORES = {"oracle": deviation_above}

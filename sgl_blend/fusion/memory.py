"""What is remembered of stored tokens: how much each deviated after other texts than its own.

Which tokens depend on their context is mostly a property of the token. So a token that deviated much
after one text is likely to deviate much after another, and a forward may choose by that before its
first layer. Kept is the largest deviation over all contexts a token was seen in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Probed:
    """A stored chunk that was prefilled once more after another text.

    Attributes:
        stored_slots: int64 [n], where its KV lies.
        begin: Where it begins in the request that prefills it.
        first: Whether nothing is remembered of it yet.
    """

    stored_slots: torch.Tensor
    begin: int
    first: bool


class DeviationMemory:
    """Per slot of the pool a deviation, on the pool's device; who reads it knows which slots have one.

    A deviation is the distance of V in the check layer, over all heads of all ranks. Its root is kept,
    so that float16 holds what a squared distance would not fit into.

    Args:
        num_slots: Slots of the pool.
        device: Where the pool lies.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._values = torch.zeros(num_slots, dtype=torch.float16, device=device)

    def write(self, slots: torch.Tensor, squared: torch.Tensor, *, first: bool) -> None:
        """Remember how much tokens deviated in one more context; waits for nothing.

        Args:
            slots: int64 [n], where their KV is stored.
            squared: float32 [n], squared distances.
            first: Whether nothing is known of these tokens yet.
        """
        distances = squared.sqrt().clamp(max=torch.finfo(torch.float16).max).half()
        if not first:
            distances = torch.maximum(distances, self._values[slots])
        self._values[slots] = distances

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the largest distance of each token so far, float32 [n]; slots is int64 [n]."""
        return self._values[slots].float()

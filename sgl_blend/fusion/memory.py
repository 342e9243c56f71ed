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
        place: Where in the memory its first token is.
        first: Whether nothing is remembered of it yet.
    """

    stored_slots: torch.Tensor
    begin: int
    place: int
    first: bool


class DeviationMemory:
    """Deviations of tokens, on the pool's device; who reads it knows what lies where.

    A token of the pool may have several: chunks that begin alike share slots, not memories.

    A deviation is the distance of V in the check layer, over all heads of all ranks. Its root is kept,
    so that float16 holds what a squared distance would not fit into.

    Args:
        num_tokens: How many it holds.
        device: Where the pool lies.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._values = torch.zeros(num_tokens, dtype=torch.float16, device=device)

    def __len__(self) -> int:
        return self._values.numel()

    def write(self, place: int, squared: torch.Tensor, *, first: bool) -> None:
        """Remember how much the tokens of a chunk deviated in one more context; waits for nothing.

        Args:
            place: Of the first token.
            squared: float32 [n], squared distances.
            first: Whether nothing is known of these tokens yet.
        """
        distances = squared.sqrt().clamp(max=torch.finfo(torch.float16).max).half()
        there = self._values[place : place + distances.numel()]
        if not first:
            distances = torch.maximum(distances, there)
        there.copy_(distances)

    def read(self, places: torch.Tensor) -> torch.Tensor:
        """Return the largest distance of each token so far, float32 [n]; places is int64 [n]."""
        return self._values[places].float()

"""Policies that look at nothing but where a token stands, and the two that take nothing or all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_blend.policies.spec import Policy

if TYPE_CHECKING:
    import torch

_RANDOM_SEED = 2405


def first(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the first tokens of every chunk, equally many as far as it goes."""
    import torch

    return torch.cat([max(chunk_lengths) - _offsets(length) for length in chunk_lengths])


def edges(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer the tokens nearest to either end of their chunk."""
    import torch

    inward = [torch.minimum(_offsets(n), n - 1 - _offsets(n)) for n in chunk_lengths]
    return max(chunk_lengths) - torch.cat(inward)


def at_random(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer tokens at random; the seed is fixed, so the same prompt gives the same tokens."""
    import torch

    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    priorities = torch.zeros(sum(chunk_lengths))
    priorities[torch.randperm(len(priorities), generator=generator)[:budget]] = 1.0
    return priorities


def equally(scores: torch.Tensor | None, chunk_lengths: list[int], budget: int) -> torch.Tensor:
    """Prefer nothing: for budgets of all or nothing."""
    import torch

    return torch.zeros(sum(chunk_lengths))


def _offsets(length: int) -> torch.Tensor:
    import torch

    return torch.arange(length, dtype=torch.float32)


POLICIES = {
    "edge": Policy("both ends of each chunk", edges, skips_full_layers=True),
    "first-k": Policy(
        "the first tokens of each chunk", first, source="EPIC's LegoLink-k", skips_full_layers=True
    ),
    "random": Policy("tokens at random", at_random),
    "none": Policy("no token", equally, fixed_ratio=0.0),
    "block": Policy(
        "no token in any layer, for models that were trained so",
        equally,
        source="Block-Attention",
        fixed_ratio=0.0,
        skips_full_layers=True,
    ),
    "all": Policy("every token", equally, fixed_ratio=1.0),
}

"""KV deviation: how far a token's cached KV is from its recomputed KV (CacheBlend §4.3).

    deviation[t] = sum over heads and dimensions of (fresh[t] - cached[t])^2

Measured on V it carries no position and so no rotation error; on K it must be taken after the
cached key was moved to its new position.
"""

import torch

from sgl_blend.kernels.checks import check_tensor


def kv_deviation(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance per token.

    Args:
        fresh: [num_tokens, num_kv_heads, head_dim], K or V just computed.
        cached: Same shape, K (already rotated) or V from the cache.

    Returns:
        float32 [num_tokens].

    Raises:
        ValueError: The shapes differ.
    """
    check_tensor("cached", cached, shape=tuple(fresh.shape))
    return (fresh.float() - cached.float()).square().flatten(1).sum(dim=1)

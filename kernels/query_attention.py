"""Query attention: how much the rows of a question attend to each token (ProphetKV's score).

score[t] = mean over rows and heads of softmax over positions <= p_row of (q_row . k_t) * scale
"""

import torch

from sgl_blend.kernels.checks import check_tensor


def query_attention(
    q: torch.Tensor, k: torch.Tensor, first_position: int, *, scale: float
) -> torch.Tensor:
    """Sum the attention that consecutive rows pay to every position.

    Args:
        q: [num_rows, num_heads, head_dim], rotated queries at first_position and after it.
        k: [num_positions, num_kv_heads, head_dim], rotated keys of positions 0, 1, ...
        first_position: Position of the first row.
        scale: Factor on the logits.

    Returns:
        float32 [num_positions], non-negative, sums to 1.

    Raises:
        ValueError: Rows reach beyond the keys, or heads do not divide.
    """
    num_rows, num_heads, head_dim = q.shape
    num_positions, num_kv_heads, _ = k.shape
    check_tensor("k", k, shape=(num_positions, num_kv_heads, head_dim))
    if num_heads % num_kv_heads:
        raise ValueError(f"q: {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    if first_position + num_rows > num_positions:
        raise ValueError(
            f"q: {num_rows} rows from {first_position} leave {num_positions} positions"
        )
    rows = first_position + torch.arange(num_rows, device=q.device)
    later = torch.arange(num_positions, device=q.device) > rows[:, None]
    total = torch.zeros(num_positions, dtype=torch.float32, device=q.device)
    grouped = q.reshape(num_rows, num_kv_heads, -1, head_dim)
    for number in range(num_kv_heads):  # one KV head at a time bounds the memory
        group = grouped[:, number].transpose(0, 1).float()
        logits = group @ k[:, number].float().T * scale
        total += logits.masked_fill(later, -torch.inf).softmax(dim=-1).sum(dim=(0, 1))
    return total / (num_heads * num_rows)

"""The optimiser of the test model's matrices."""

from collections.abc import Sequence

import torch


class Muon(torch.optim.Optimizer):
    """Muon in float32: momentum whose matrices are made orthogonal by Newton-Schulz steps.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
    quintic coefficients included. Matrices of one shape are stacked; tiny products are slow alone.
    """

    def __init__(self, params: Sequence[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for matrices in by_shape.values():
                self._step_stack(matrices, group["lr"], group["momentum"])

    def _step_stack(self, matrices: list[torch.Tensor], lr: float, momentum: float) -> None:
        updates = []
        for matrix in matrices:
            gradient = matrix.grad
            assert gradient is not None
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            state["momentum"].lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(state["momentum"], momentum))
        rows, columns = matrices[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, _orthogonal(torch.stack(updates)), strict=True):
            matrix.sub_(update, alpha=lr * scale)


def _orthogonal(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Move the singular values of [n, rows, columns] towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = stack.shape[1] > stack.shape[2]
    wide = stack.transpose(1, 2) if tall else stack
    x: torch.Tensor = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x

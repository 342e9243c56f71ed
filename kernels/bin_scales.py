"""What the bins of coded KV stand for; the formula is in unquantise.py."""

from dataclasses import dataclass

import torch

from sgl_blend.kernels.checks import check_tensor

ANCHOR_TOKENS = 10
"""As in sgl_blend/storage/codec/levels.py, which a test holds."""


@dataclass(frozen=True, slots=True)
class BinScales:
    """What the bins of K or V of one layer stand for; tensors are float32 [heads, dim].

    Attributes:
        step: Width of a bin.
        base: What bin 0 stands for.
        low: What anchor 0 stands for; not read without anchors.
        anchor_step: Width of an anchor's bin; likewise.
        bits: Of a bin: 4 or 8.
        has_anchors: Whether every tenth token of a page is an anchor.

    Raises:
        ValueError: A shape or dtype does not fit, or the bits are others.
    """

    step: torch.Tensor
    base: torch.Tensor
    low: torch.Tensor
    anchor_step: torch.Tensor
    bits: int
    has_anchors: bool

    def __post_init__(self) -> None:
        check_tensor("step", self.step, shape=(None, None), dtype=torch.float32)
        for name in ("base", "low", "anchor_step"):
            scale = getattr(self, name)
            check_tensor(name, scale, shape=tuple(self.step.shape), dtype=torch.float32)
        if self.step.shape[1] % 2:
            raise ValueError(f"step: expected an even dim, got {self.step.shape[1]}")
        if self.bits not in (4, 8):
            raise ValueError(f"bits: expected 4 or 8, got {self.bits}")

    def num_bytes(self, tokens: int) -> int:
        """Return the packed bytes of a page of so many tokens."""
        width = self.step.numel()
        anchors = num_anchors(tokens) if self.has_anchors else 0
        return anchors * width + (tokens - anchors) * width * self.bits // 8


def num_anchors(tokens: int) -> int:
    """Return how many of so many tokens are anchors."""
    return -(-tokens // ANCHOR_TOKENS)

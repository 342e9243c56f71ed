"""Moves cached KV to where a request wants it, in all layers at once, before those layers run.

What is copied does not depend on which rows a policy selects: every row that may be dropped gets its
cached KV, and a row that is kept writes its fresh KV over it. So on a GPU the copy runs on a stream of
its own while the layers up to the check layer compute, and nothing waits for the selection.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from sgl_blend.kernels.delta_rope import LayerPools, copy_rotated_layers


@dataclass(frozen=True, slots=True)
class Copy:
    """KV of some tokens, copied in a range of layers.

    Attributes:
        layers: Layers of the model.
        source_slots: int64 [n], where the KV lies.
        dest_slots: int64 [n], where it goes; disjoint from all sources.
        cos: float32 [n, rotary_dim / 2], rotation from the stored position to the new one.
        sin: float32, same shape.
    """

    layers: range
    source_slots: torch.Tensor
    dest_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class KVCopier:
    """Copies KV inside the pool; owned by the thread that runs forwards.

    Args:
        pools: All layers of the model.
        neox: Pairing of the rotary embedding, see rotate_keys.
    """

    def __init__(self, pools: LayerPools, *, neox: bool) -> None:
        self._pools = pools
        self._neox = neox
        self._stream: torch.cuda.Stream | None = None
        if pools.k[0].is_cuda:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy now: what runs next on this stream finds the KV in place."""
        for one in copies:
            copy_rotated_layers(
                self._pools,
                one.layers,
                one.source_slots,
                one.dest_slots,
                one.cos,
                one.sin,
                neox=self._neox,
            )

    def start(self, copies: Sequence[Copy]) -> None:
        """Copy beside what this stream does next; only after ``wait`` is the KV in place.

        The caller keeps the tensors of the copies until then.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.copy(copies)

    def wait(self) -> None:
        """Let this stream wait for what was started."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

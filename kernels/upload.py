"""Host memory on its way to the device, without anyone waiting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT_BYTES = 16
"""Every array begins on so many bytes, so kernels that note alignment are compiled once."""
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without waiting for the device.

    From pageable memory a copy to a GPU waits for the stream; from pinned memory it is queued, and
    torch's pinned allocator keeps the host side until the copy is done.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Put host integers on the device; see to_device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


class Staged:
    """A host array that goes to the device with others.

    Attributes:
        tensor: The array on the device, once the staging was sent.
    """

    __slots__ = ("tensor",)

    tensor: torch.Tensor


class Staging:
    """Host arrays that go to the device together: one buffer, one copy.

    Arrays are numpy's. Torch would dispatch an operation for each step of making them, and the host
    is what a short forward waits for.
    """

    def __init__(self) -> None:
        self._arrays: list[tuple[NDArray[Any], Staged]] = []

    def add(self, array: NDArray[Any]) -> Staged:
        """Take in an array of int32, int64 or float32; it must not change until it is sent."""
        staged = Staged()
        self._arrays.append((np.ascontiguousarray(array), staged))
        return staged

    def send(self, device: torch.device) -> None:
        """Copy all arrays, and give each its tensor: a part of one buffer, begun on 16 bytes."""
        starts, size = [], 0
        for array, _ in self._arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        flat = host.numpy()
        for start, (array, _) in zip(starts, self._arrays, strict=True):
            flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = to_device(host, device)
        for start, (array, staged) in zip(starts, self._arrays, strict=True):
            part = sent[start : start + array.nbytes].view(_TORCH[array.dtype])
            staged.tensor = part.view(array.shape)
        self._arrays.clear()

"""Small host tensors on their way to the device, without anyone waiting."""

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to the device without waiting for the device.

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

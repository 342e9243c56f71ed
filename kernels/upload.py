"""Host integers on their way to the device, without anyone waiting."""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Put host integers on the device.

    From pageable memory a copy to a GPU waits for the stream; from pinned memory it is queued, and
    torch's pinned allocator keeps the host side until the copy is done.
    """
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)

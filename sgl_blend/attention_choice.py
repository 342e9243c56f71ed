"""Which kernel attends for scattered rows: what the operator asked for, or the fastest one here."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import LayerPools
from sgl_blend.kernels.ragged_attention import RaggedKernel, TorchRagged
from sgl_blend.ranks import Ranks
from sgl_blend.timing import median_seconds

logger = logging.getLogger(__name__)

_TRIAL_POSITIONS = 8192
_TRIAL_STEP = 7
"""Of the trial's positions every seventh is a row, about what the default ratio keeps."""
_REPEATS = 5


def choose_kernel(
    wanted: str, pools: LayerPools, num_heads: int, dtype: torch.dtype, ranks: Ranks
) -> RaggedKernel:
    """Return the kernel for a server.

    Args:
        wanted: Value of ``--blend-attention``. ``auto`` is torch without a CUDA device; with one it
            tries every kernel that starts there on a prompt of 8,192 tokens and takes the fastest;
            all ranks take the first one's choice.
        pools: The server's KV pools, unused so far.
        num_heads: Query heads of this rank.
        dtype: Of the queries.
        ranks: Of the server.

    Raises:
        UnsupportedError: The kernel that was asked for does not run here; the message says why.
    """
    device = pools.k[0].device
    if wanted != "auto":
        return _start(wanted, device)
    if device.type != "cuda":
        return TorchRagged()
    found: list[RaggedKernel] = []
    for name in _KERNELS:
        try:
            found.append(_start(name, device))
        except UnsupportedError as err:
            logger.info("sgl-blend: %s", err)
    times = ranks.agree([_seconds(kernel, pools, num_heads, dtype) for kernel in found])
    shown = ", ".join(f"{k.name} {1e3 * t:.3f} ms" for k, t in zip(found, times, strict=True))
    logger.info("sgl-blend: attention of scattered rows takes %s a layer", shown)
    return found[times.index(min(times))]


def _start(name: str, device: torch.device) -> RaggedKernel:
    if name != TorchRagged.name and device.type != "cuda":
        raise UnsupportedError(f"enable_blend: --blend-attention {name} needs a CUDA device")
    return _KERNELS[name]()


def _start_triton() -> RaggedKernel:
    from sgl_blend.kernels.ragged_attention_triton import TritonRagged

    return TritonRagged()


_KERNELS: dict[str, Callable[[], RaggedKernel]] = {
    "triton": _start_triton,
    TorchRagged.name: TorchRagged,
}


def _seconds(kernel: RaggedKernel, pools: LayerPools, num_heads: int, dtype: torch.dtype) -> float:
    """Return the median time of one layer of the trial; a kernel that fails takes for ever."""
    k, v = pools.k[0], pools.v[0]
    length = min(_TRIAL_POSITIONS, k.shape[0] - 1)
    slots = torch.arange(1, length + 1, device=k.device)
    positions = slots[::_TRIAL_STEP] - 1
    q = torch.zeros(len(positions), num_heads, k.shape[-1], device=k.device, dtype=dtype)

    def attend() -> object:
        return kernel.run(q, k, v, plan, scale=1.0)

    try:
        plan: Any = kernel.plan(positions, [len(positions)], [slots], dtype)
        return median_seconds(attend, k.device, _REPEATS)
    except RuntimeError as err:
        logger.warning("sgl-blend: attention by %s fails on this machine: %s", kernel.name, err)
        return float("inf")

"""Which kernel attends for scattered rows: what the operator asked for, or the fastest one here."""

import logging
import math
import subprocess

import torch

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import LayerPools
from sgl_blend.kernels.ragged_attention import RaggedKernel, TorchRagged
from sgl_blend.kernels.ragged_attention_fixed import FixedKernel, TorchFixed
from sgl_blend.tuning.timing import median_seconds

logger = logging.getLogger(__name__)

NAMES = ("triton", "flashinfer", "torch")

_TRIAL_POSITIONS = 8192
_TRIAL_STEP = 7
"""Of the trial's positions every seventh is a row, about what the default ratio keeps."""
_REPEATS = 5
_FAILURES = (
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    OSError,
    subprocess.SubprocessError,
)
"""What a kernel that does not fit this machine has been seen to raise, or its compiler: a library that
is missing or older, a C compiler that is not there, a shape it does not take."""


def choose_kernel(
    wanted: str, pools: LayerPools, num_heads: int, dtype: torch.dtype, tp_group: TPGroup
) -> RaggedKernel:
    """Return the kernel for a server.

    Args:
        wanted: Value of ``--blend-attention``. ``auto`` is torch without a CUDA device; with one it
            tries every kernel that starts there on a prompt of 8,192 tokens and takes the fastest;
            all ranks take the first one's choice. FlashInfer compiles for minutes the first time:
            ``auto`` takes it only if that was done before, by ``flashinfer`` or ``precompile``.
        pools: The server's KV pools, unused so far.
        num_heads: Query heads of this rank.
        dtype: Of the queries.
        tp_group: Of the server.

    Raises:
        UnsupportedError: The kernel that was asked for does not run here; the message says why.
    """
    if wanted != "auto":
        return _start(wanted, pools, num_heads, dtype, may_compile=True)
    if not pools.k[0].is_cuda:
        return TorchRagged()
    times: list[float] = []
    found: list[RaggedKernel | None] = []
    for name in NAMES:
        kernel = None
        try:
            kernel = _start(name, pools, num_heads, dtype, may_compile=False)
        except UnsupportedError as err:
            logger.info("sgl-blend: %s", err)
        found.append(kernel)
        times.append(math.inf if kernel is None else _seconds(kernel, pools, num_heads, dtype))
    agreed = tp_group.agree(times)
    shown = ", ".join(f"{n} {1e3 * t:.3f} ms" for n, t in zip(NAMES, agreed, strict=True))
    logger.info("sgl-blend: attention of scattered rows takes %s a layer", shown)
    chosen = found[agreed.index(min(agreed))]
    if chosen is None:
        raise UnsupportedError(f"enable_blend: only some ranks can use {NAMES}, first has {shown}")
    return chosen


def fixed_kernel(kernel: RaggedKernel) -> FixedKernel | None:
    """Return what attends as a kernel does, but from fixed buffers; None if it cannot."""
    if kernel.name == TorchRagged.name:
        return TorchFixed()
    if kernel.name == "triton":
        from sgl_blend.kernels.ragged_attention_fixed_triton import TritonFixed

        return TritonFixed()
    return None  # FlashInfer plans each batch on the host


def _start(
    name: str, pools: LayerPools, num_heads: int, dtype: torch.dtype, *, may_compile: bool
) -> RaggedKernel:
    if name == TorchRagged.name:
        return TorchRagged()
    if not pools.k[0].is_cuda:
        raise UnsupportedError(f"enable_blend: --blend-attention {name} needs a CUDA device")
    if name == "triton":
        from sgl_blend.kernels.ragged_attention_triton import TritonRagged

        return TritonRagged()
    return _start_flashinfer(pools, num_heads, dtype, may_compile=may_compile)


def _start_flashinfer(
    pools: LayerPools, num_heads: int, dtype: torch.dtype, *, may_compile: bool
) -> RaggedKernel:
    from sgl_blend.kernels import ragged_attention_flashinfer as flashinfer

    k = pools.k[0]
    heads = flashinfer.HeadLayout(num_heads, k.shape[1], k.shape[2], dtype, k.dtype)
    backend = flashinfer.best_backend(k.device, heads)
    try:
        if not may_compile and not flashinfer.is_compiled(backend, heads):
            raise UnsupportedError(f"enable_blend: flashinfer {backend} is not compiled yet")
        return flashinfer.FlashInferRagged(backend, heads, k.device)
    except UnsupportedError:
        raise
    except _FAILURES as err:
        raise UnsupportedError(f"enable_blend: --blend-attention flashinfer: {err}") from err


def _seconds(kernel: RaggedKernel, pools: LayerPools, num_heads: int, dtype: torch.dtype) -> float:
    """Return the median time of one layer of the trial; a kernel that fails takes for ever."""
    from triton.errors import TritonError  # such as a tile that does not fit; no RuntimeError

    k, v = pools.k[0], pools.v[0]
    length = min(_TRIAL_POSITIONS, k.shape[0] - 1)
    slots = torch.arange(1, length + 1, device=k.device)
    positions = slots[::_TRIAL_STEP] - 1
    q = torch.zeros(len(positions), num_heads, k.shape[-1], device=k.device, dtype=dtype)

    def attend() -> object:
        return kernel.run(q, k, v, plan, scale=1.0)

    try:
        plan: object = kernel.plan(positions, [len(positions)], [slots], dtype)
        return median_seconds(attend, k.device, _REPEATS)
    except (*_FAILURES, TritonError) as err:
        logger.warning("sgl-blend: attention by %s fails on this machine: %s", kernel.name, err)
        return math.inf

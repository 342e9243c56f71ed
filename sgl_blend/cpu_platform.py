"""SGLang on a plain x86 CPU, with PyTorch's own kernels and no ``sgl_kernel``.

SGLang's in-tree CPU engine wants AMX and its own compiled kernels. As an out-of-tree platform the
stock engine takes its generic torch paths instead, which run anywhere. Slow, exact, and enough to
develop, test and try sgl-blend on a laptop.
"""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

_CLASS_PATH = "sgl_blend.cpu_platform.TorchCpuPlatform"


def activate() -> str | None:
    """Return the platform's class path, or None where an accelerator should serve instead.

    SGLang calls this from its ``sglang.srt.platforms`` entry points and accepts one active
    platform; it steps back for CUDA, ROCm, XPU and NPU.
    """
    accelerators = [torch.cuda.is_available(), torch.xpu.is_available()]
    npu = getattr(torch, "npu", None)
    if npu is not None:
        accelerators.append(npu.is_available())
    return None if any(accelerators) or _another_platform_is_installed() else _CLASS_PATH


def _another_platform_is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(
        not entry.value.startswith("sgl_blend.")
        for entry in entry_points(group="sglang.srt.platforms")
    )


class TorchCpuPlatform(SRTPlatform, CpuDeviceMixin):
    """Torch-native attention, plain KV pools, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """Name the attention backend that needs nothing but torch."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type[Any]:
        """Return SGLang's plain ``[slots, heads, dim]`` pool."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type[Any] = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type[Any]:
        """Return SGLang's stock paged slot allocator."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        allocator: type[Any] = PagedTokenToKVPoolAllocator
        return allocator

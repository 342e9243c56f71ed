"""SGLang's HiCache on a CPU: a host pool beside the "device" pool, and copies that overlap.

Stock HiCache pins its host memory for a GPU and moves KV with kernels of ``sgl_kernel``. On this
platform the host pool is plain memory. The moves are torch copies on streams of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch_cpu_streams
from torch_cpu_streams import current_stream

_WITH_STREAMS = (
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.l2_transfer",
)
"""Modules of SGLang that move KV on streams, in one version or another."""


def register() -> None:
    """Have HiCache use this; SGLang's entry point group ``sglang.srt.plugins`` calls it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls"
    HookRegistry.register(target, _around_host_pool_class, HookType.AROUND)


def _around_host_pool_class(orig: Callable[..., type[Any]], device_pool: object) -> type[Any]:
    stock = orig(device_pool)
    from sglang.srt.platforms import current_platform

    if getattr(current_platform, "device_type", None) != "cpu":
        return stock
    _use_streams()
    return host_pool_class(stock)


def _use_streams() -> None:
    for name in _WITH_STREAMS:
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "device_module"):
            module.device_module = torch_cpu_streams


def host_pool_class(stock: type[Any]) -> type[Any]:
    """Return SGLang's host pool for K and V per head, with torch copies in place of its kernels.

    Raises:
        NotImplementedError: For a pool whose K and V differ in size, or that holds scales.
    """
    if stock.__name__ != "MHATokenToKVPoolHost":
        raise NotImplementedError(f"no host pool for a CPU like {stock.__name__}")
    return type("TorchHostPool", (_TorchMoves, stock), {})


class _TorchMoves:
    """Moves KV in all of SGLang's layouts of host memory; stands before SGLang's host pool."""

    page_size: int
    page_num: int
    layer_num: int
    layout: str
    kv_buffer: torch.Tensor
    device_k_buffers: list[torch.Tensor]  # 0.5.23
    device_v_buffers: list[torch.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "pin_memory": False})

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        **more: Any,
    ) -> None:
        """Copy one layer from the host; host_indices and device_indices are int64 [n] slots."""
        layers = self._layers(device_pool, layer_id)

        def copy() -> None:
            pages, offsets = host_indices // self.page_size, host_indices % self.page_size
            for host, device in layers:
                device.index_copy_(0, device_indices, host[pages, offsets])

        current_stream().submit(copy)

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy all layers to the host."""

        def copy() -> None:
            pages, offsets = host_indices // self.page_size, host_indices % self.page_size
            for layer in range(self.layer_num):
                for host, device in self._layers(device_pool, layer):
                    host[pages, offsets] = device.index_select(0, device_indices)

        current_stream().submit(copy)

    def _layers(self, device_pool: Any, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of a layer, each on the host and on the device.

        On the host they are views [pages, page_size, heads, head_dim].
        """
        if hasattr(self, "device_k_buffers"):
            device = (self.device_k_buffers[layer], self.device_v_buffers[layer])
        else:
            device = (device_pool.k_buffer[layer], device_pool.v_buffer[layer])
        k_and_v, pages = self.kv_buffer, (2, self.page_num, self.page_size)
        if self.layout in ("layer_first", "page_first"):
            host = k_and_v[:, layer] if self.layout == "layer_first" else k_and_v[:, :, layer]
            host = host.view(*pages, *host.shape[2:])
        elif self.layout == "page_first_direct":
            host = k_and_v[:, :, layer]
        elif self.layout == "page_head":
            host = k_and_v[:, :, :, :, layer].transpose(2, 3)
        else:
            raise NotImplementedError(f"no layout {self.layout} of host memory on a CPU")
        return list(zip(host, device, strict=True))

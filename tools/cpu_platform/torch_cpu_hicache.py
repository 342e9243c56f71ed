"""SGLang's HiCache on a CPU: a host pool beside the "device" pool, and copies that overlap.

Stock HiCache pins its host memory for a GPU and moves KV with kernels of ``sgl_kernel``. On this
platform the host pool is plain memory. The moves are copies by numpy on streams of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch_cpu_streams
from numpy.typing import NDArray
from torch_cpu_streams import current_stream

_WITH_STREAMS = (
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.l2_transfer",
)
"""Modules of SGLang that move KV on streams, in one version or another."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FLAT_DIMS = 3
_MIN_RUN = 8
"""Tokens. Shorter runs are copied faster slot by slot."""


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


class _Slots:
    """Where tokens lie on the host and where on the device.

    Their KV is copied by numpy, on one core. That takes a fifth of the time of torch's indexing where
    slots follow each other, and starts no threads beside those that compute.

    Args:
        host: int64 [n].
        device: int64 [n], slots of the same tokens.
        page_size: Tokens of a page of the host.
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor, page_size: int) -> None:
        self._given = (host, device)
        self._host, self._device = host.numpy(), device.numpy()
        self._page_size = page_size
        self._runs = _runs(self._host, self._device)
        self._in_runs = len(self._runs) * _MIN_RUN <= len(self._host)

    def are(self, host: torch.Tensor, device: torch.Tensor) -> bool:
        """Tell whether these were made of the same tensors."""
        return self._given[0] is host and self._given[1] is device

    def load(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy to the device; see _TorchMoves._layers for both."""
        source, target = _bits(host), _bits(device)
        for there, here in self._places(source):
            target[here] = source[there]

    def back_up(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy to the host; see _TorchMoves._layers for both."""
        target, source = _bits(host), _bits(device)
        for there, here in self._places(target):
            target[there] = source[here]

    def _places(self, host: NDArray[Any]) -> Sequence[tuple[Any, Any]]:
        """Return what picks the tokens on the host and on the device, in as few steps as is fast."""
        if host.ndim > _FLAT_DIMS:
            pages = self._host // self._page_size, self._host % self._page_size
            return [(pages, self._device)]
        return self._runs if self._in_runs else [(self._host, self._device)]


def _runs(host: NDArray[Any], device: NDArray[Any]) -> list[tuple[slice, slice]]:
    """Cut tokens into runs whose slots follow each other on both sides."""
    breaks = 1 + np.flatnonzero((np.diff(host) != 1) | (np.diff(device) != 1))
    edges = [0, *breaks.tolist(), len(host)] if len(host) else []
    return [
        (slice(int(host[a]), int(host[a]) + b - a), slice(int(device[a]), int(device[a]) + b - a))
        for a, b in pairwise(edges)
    ]


def _bits(pool: torch.Tensor) -> NDArray[Any]:
    return pool.view(_BITS[pool.element_size()]).numpy()


class _TorchMoves:
    """Moves KV in all of SGLang's layouts of host memory; stands before SGLang's host pool."""

    page_size: int
    page_num: int
    layer_num: int
    layout: str
    kv_buffer: torch.Tensor
    device_k_buffers: list[torch.Tensor]  # 0.5.23
    device_v_buffers: list[torch.Tensor]
    _last: _Slots | None = None

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
        slots = self._slots(host_indices, device_indices)

        def copy() -> None:
            for host, device in layers:
                slots.load(host, device)

        current_stream().submit(copy)

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy all layers to the host."""
        slots = _Slots(host_indices, device_indices, self.page_size)

        def copy() -> None:
            for layer in range(self.layer_num):
                for host, device in self._layers(device_pool, layer):
                    slots.back_up(host, device)

        current_stream().submit(copy)

    def _slots(self, host: torch.Tensor, device: torch.Tensor) -> _Slots:
        """Return slots; a load asks for the same ones in every layer."""
        if self._last is None or not self._last.are(host, device):
            self._last = _Slots(host, device, self.page_size)
        return self._last

    def _layers(self, device_pool: Any, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of a layer, each on the host and on the device.

        On the device they are [slots, heads, head_dim], on the host as well where slots have one
        stride, else [pages, page_size, heads, head_dim].
        """
        if hasattr(self, "device_k_buffers"):
            device = (self.device_k_buffers[layer], self.device_v_buffers[layer])
        else:
            device = (device_pool.k_buffer[layer], device_pool.v_buffer[layer])
        k_and_v = self.kv_buffer
        if self.layout == "layer_first":
            host = k_and_v[:, layer]
        elif self.layout in ("page_first", "page_first_direct"):
            host = k_and_v[:, :, layer]
        elif self.layout == "page_head":
            host = k_and_v[:, :, :, :, layer].transpose(2, 3)
        else:
            raise NotImplementedError(f"no layout {self.layout} of host memory on a CPU")
        return list(zip(host, device, strict=True))

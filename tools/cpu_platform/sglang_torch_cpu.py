"""SGLang on a plain x86 CPU, with PyTorch's own kernels and no ``sgl_kernel``.

SGLang's in-tree CPU engine wants AMX and its own compiled kernels. As an out-of-tree platform the
stock engine takes its generic torch paths instead, which run anywhere. Slow, exact, and enough to
develop, test and try sgl-blend on a laptop.

This is a distribution of its own. Whoever installs it asks for this platform; sgl-blend itself brings
no platform.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

_CLASS_PATH = "sglang_torch_cpu.TorchCpuPlatform"


def activate() -> str | None:
    """Return the platform's class path, or None where another one should serve.

    SGLang calls this from its ``sglang.srt.platforms`` entry points and accepts one active platform.
    This one steps back for every accelerator that torch knows, for SGLang's own CPU engine, and for
    every other platform that is installed.
    """
    _resolve_vector_kernels()
    in_tree = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    if in_tree or torch.accelerator.is_available() or _another_platform_is_installed():
        return None
    return _CLASS_PATH


def _resolve_vector_kernels() -> None:
    """Call torch's vectorised functions once on one thread, before a first call runs on several.

    MKL 2024.2, which torch's wheels link, looks for the kernel of a function on its first call. If that
    call runs on several threads at once, one of them may take a kernel of low accuracy for its share
    (pytorch/pytorch#188792). One start among thousands so had a rotary table that was off by 3e-5.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.tanh, torch.exp, torch.log, torch.sqrt):
            function(one)


def _another_platform_is_installed() -> bool:
    return any(entry.module != __name__ for entry in entry_points(group="sglang.srt.platforms"))


class TorchCpuPlatform(SRTPlatform, CpuDeviceMixin):  # type: ignore[misc]
    """Torch-native attention, plain KV pools, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """Name the attention backend that needs nothing but torch."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Compile nothing: Inductor's C++ takes longer to build than tiny models to run."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """Name what ``/start_profile`` may record here; SGLang asks every platform of a plugin."""
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        """Return what it is to torch."""
        return torch.profiler.ProfilerActivity.CPU

    def get_speculative_cache_locs_fn(self) -> Any:
        """Return what finds the slots of drafts."""
        from torch_cpu_speculation import slots_of_drafts

        return slots_of_drafts

    def init_backend(self) -> None:
        """Let SGLang's LoRA, which pins memory on any device, do without; SGLang calls this once."""
        _pin_nothing()

    def get_mha_kv_pool_cls(self) -> type[Any]:
        """Return SGLang's plain ``[slots, heads, dim]`` pool."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        _replace_triton()  # here, because SGLang asks after it has imported all models
        pool: type[Any] = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type[Any]:
        """Return SGLang's paged slot allocator, with torch in place of its two Triton kernels."""
        return _torch_paged_allocator()


class _WithoutPinning:
    """The module torch, for code that asks for pinned memory where there is none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def _pin_nothing() -> None:
    setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)  # noqa: B010
    for name in ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend"):
        vars(import_module(name))["torch"] = _WithoutPinning()


def _replace_triton() -> None:
    """Give models that know no device but a GPU torch's operations in place of their own kernels."""
    for module, functions in _IN_TORCH.items():
        if loaded := sys.modules.get(f"sglang.srt.models.{module}"):
            for name, function in functions.items():
                setattr(loaded, name, function)
    # What records the load of experts calls these on any device.
    for name in ("is_current_stream_capturing", "empty_cache"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: None)


def _gate_and_add(
    hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor
) -> None:
    """Add the shared expert's rows to those of the routed ones, each by its gate."""
    routed += torch.sigmoid(hidden.float() @ gate.float())[:, None].to(shared.dtype) * shared


def _sums_of_squares(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of each row of q, then of k, padded to a multiple of four."""
    sums = torch.cat([one.float().square().sum(-1) for one in (q, k)])
    return torch.nn.functional.pad(sums, (0, -len(sums) % 4))


def _norm_by_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    sums: torch.Tensor,
    num_ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    """Apply RMSNorm to q and k by the sums of squares over all ranks."""
    rows = len(q)
    return tuple(
        (x.float() * torch.rsqrt(one / x.shape[1] / num_ranks + eps)[:, None] * weight.float()).to(
            x.dtype
        )
        for x, weight, one in ((q, q_weight, sums[:rows]), (k, k_weight, sums[rows : 2 * rows]))
    )


_IN_TORCH: dict[str, dict[str, Any]] = {
    "minimax_m2": {"rms_sumsq_serial": _sums_of_squares, "rms_apply_serial": _norm_by_sums},
    "qwen2_moe": {"fused_gate_sigmoid_mul_add": _gate_and_add},
}
"""Functions that launch Triton, by the module of SGLang's models that calls them."""


def _torch_paged_allocator() -> type[Any]:
    # The base class can only be imported once SGLang has settled on a platform.
    from sglang.srt.mem_cache.allocator.paged import (
        PagedTokenToKVPoolAllocator,
        alloc_extend_naive,
    )

    class TorchPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
        """Allocates pages for several requests at once; SGLang's contract, in plain torch."""

        free_pages: torch.Tensor

        def alloc_extend(
            self,
            prefix_lens: torch.Tensor,
            prefix_lens_cpu: torch.Tensor,
            seq_lens: torch.Tensor,
            seq_lens_cpu: torch.Tensor,
            last_loc: torch.Tensor,
            extend_num_tokens: int,
            num_new_pages: int | None = None,
        ) -> torch.Tensor | None:
            before, after = self._pages(prefix_lens), self._pages(seq_lens)
            needed = int((after - before).sum()) if num_new_pages is None else num_new_pages
            if not self._have_pages(needed):
                return None
            slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
            alloc_extend_naive(
                prefix_lens.to(torch.int64),
                seq_lens.to(torch.int64),
                last_loc.to(torch.int64),
                self.free_pages,
                slots,
                self.page_size,
                self.device,
            )
            self.free_pages = self.free_pages[needed:]
            return slots

        def alloc_decode(
            self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
        ) -> torch.Tensor | None:
            opens_page = self._pages(seq_lens) > self._pages(seq_lens - 1)
            needed = int(opens_page.sum())
            if not self._have_pages(needed):
                return None
            slots = last_loc.to(torch.int64) + 1
            slots[opens_page] = self.free_pages[:needed] * self.page_size
            self.free_pages = self.free_pages[needed:]
            return slots

        def _pages(self, lengths: torch.Tensor) -> torch.Tensor:
            page_size: int = self.page_size
            return (lengths + page_size - 1) // page_size

        def _have_pages(self, needed: int) -> bool:
            if needed > len(self.free_pages):
                self.merge_and_sort_free()
            return needed <= len(self.free_pages)

    return TorchPagedAllocator

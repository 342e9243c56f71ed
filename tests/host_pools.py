"""SGLang's own host pools with KV in them, and storage configurations for its backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sgl_blend.engine.storage import make_storage, weights_in_use
from sgl_blend.engine.tiers import storage_keys_hold_namespaces
from sgl_blend.storage.breaker import Breaker, GuardedCalls

STORED = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not storage_keys_hold_namespaces(), reason="storage is refused on this SGLang"
    ),
]
"""Marks of tests that store something."""

PAGE, LAYERS, HEADS, DIM = 16, 3, 2, 8
PAGES = 8
WEIGHTS = "w" * 32


def make_host_pool(
    layout: str = "layer_first",
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = PAGE,
    seed: int = 0,
    layers: int = LAYERS,
    kind: type[Any] = MHATokenToKVPoolHost,
) -> Any:
    """Return a host pool of SGLang with random bits in it, on plain memory."""
    size = page * PAGES
    device = MHATokenToKVPool(size, page, dtype, HEADS, DIM, layers, "cpu", False)
    common = (2.0, 0, page, layout)
    if hasattr(device, "get_device_pool_infos"):  # 0.5.23
        pool = kind(
            device.get_device_pool_infos()[0].buffer_info,
            *common,
            pin_memory=False,
            device_capacity_tokens=size,
            start_layer=0,
            end_layer=layers,
        )
    else:
        pool = kind(device, *common, pin_memory=False)
    fill(pool, seed)
    return pool


def fill(pool: Any, seed: int) -> None:
    """Put KV with a few special values into a pool, by token, so that layouts hold the same."""
    generator = torch.Generator().manual_seed(seed)
    pages = pool.page_num
    shape = (pages, 2, pool.layer_num, pool.page_size, pool.head_num, pool.head_dim)
    kv = torch.randn(shape, generator=generator)
    kv.view(pages, -1)[:, :6] = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40]
    )
    kv = kv.to(pool.dtype)
    for index in range(pages):
        canonical = kv[index]
        if pool.layout == "page_first":
            canonical = canonical.transpose(1, 2)
        pool.set_from_flat_data_page(index * pool.page_size, canonical.flatten())


def page_bits(pool: Any, index: int) -> bytes:
    """Return the bits of a page by K/V, layer, token: read without our code."""
    layers, tokens = pool.layer_num, pool.page_size
    flat = pool.get_data_page(index * tokens)
    if pool.layout == "page_first":
        flat = flat.view(2, tokens, layers, -1).transpose(1, 2).flatten()
    return bytes(flat.view(torch.uint8).numpy())


def storage_config(
    *, rank: int = 0, size: int = 1, model: str = "some/path", **extra: Any
) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=model,
        extra_config=extra,
    )


def file_backend(folder: Path) -> Any:
    """Return a create_backend that makes SGLang's own file backend in a folder."""

    def create(name: str, config: HiCacheStorageConfig, pool: Any) -> HiCacheFile:
        assert name == "file"
        return HiCacheFile(config, str(folder))

    return create


def stock_backend(name: str, config: HiCacheStorageConfig, pool: Any) -> Any:
    """Make a backend as SGLang does."""
    return StorageBackendFactory.create_backend(name, config, pool)


def guarded(timeout_s: float = 5.0, **breaker: Any) -> GuardedCalls:
    return GuardedCalls(Breaker(**breaker), timeout_s=timeout_s)


def file_storage(
    folder: Path,
    pool: Any,
    *,
    weights: str | None = WEIGHTS,
    config: HiCacheStorageConfig | None = None,
    calls: GuardedCalls | None = None,
    **more: Any,
) -> Any:
    """Return checked storage over SGLang's file backend, as HiCache would be given it."""
    weights_in_use(pool).renew(weights, "rotary")
    made = make_storage(
        file_backend(folder),
        "file",
        config or storage_config(),
        pool,
        calls=calls or guarded(),
        **more,
    )
    made.register_mem_pool_host(pool)
    return made


def faults_of(storage: Any) -> dict[str, int]:
    """Return the faults that a storage has counted, by reason."""
    return dict(storage.counters.snapshot()["faults"])


def hashes(count: int = PAGES, tenant: str = "a") -> list[str]:
    return [f"{tenant}{i:063x}" for i in range(count)]


def save(storage: Any, pool: Any, keys: list[str]) -> bool:
    """Write the first pages of a pool, as SGLang's controller does."""
    return all(storage.batch_set_v1(keys, _slots(pool, keys)))


def load(storage: Any, pool: Any, keys: list[str]) -> int:
    """Read pages to the beginning of a pool, as SGLang's controller does."""
    found = storage.batch_get_v1(keys, _slots(pool, keys))
    count = next((i for i, there in enumerate(found) if not there), len(keys))
    assert not any(found[count:])
    return count


def _slots(pool: Any, keys: list[str]) -> torch.Tensor:
    return torch.arange(len(keys) * pool.page_size)


def save_flat(storage: Any, pool: Any, keys: list[str]) -> bool:
    """Write pages through SGLang's flat ones."""
    flat = [pool.get_data_page(torch.tensor(i * pool.page_size)) for i in range(len(keys))]
    return bool(storage.batch_set(keys, flat))


def load_flat(storage: Any, pool: Any, keys: list[str]) -> int:
    """Read pages through SGLang's flat ones."""
    targets = [pool.get_dummy_flat_data_page() for _ in keys]
    found = storage.batch_get(keys, targets)
    count = next((i for i, page in enumerate(found) if page is None), len(keys))
    assert all(page is None for page in found[count:])
    for index in range(count):
        pool.set_from_flat_data_page(torch.tensor(index * pool.page_size), found[index])
    return count

"""HiCache's host pool on a CPU: what goes to the host and comes back, in every layout of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_cpu_hicache
from host_pools import DIM, HEADS, LAYERS, PAGE, PAGES, make_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

pytestmark = pytest.mark.engine

TOKENS = 3 * PAGE
RUNS = torch.cat([torch.arange(start, start + PAGE) for start in (5 * PAGE, 2 * PAGE, 3 * PAGE)])
SCATTERED = torch.randperm(PAGE * PAGES, generator=torch.Generator().manual_seed(1))[:TOKENS]
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def _device(dtype: torch.dtype, seed: int) -> Any:
    pool = MHATokenToKVPool(PAGE * PAGES, PAGE, dtype, HEADS, DIM, LAYERS, "cpu", False)
    generator = torch.Generator().manual_seed(seed)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        values = torch.randn(buffer.shape, generator=generator)
        buffer.copy_(values.masked_fill(values > 2.5, float("nan")))
    return pool


def _host(layout: str, dtype: torch.dtype, device: Any) -> Any:
    kind = torch_cpu_hicache.host_pool_class(MHATokenToKVPoolHost)
    pool = make_host_pool(layout, dtype=dtype, kind=kind)
    if hasattr(pool, "device_k_buffers"):  # 0.5.23 moves KV of the pool it was made with
        pool.device_k_buffers, pool.device_v_buffers = device.k_buffer, device.v_buffer
    return pool


def _all(pool: Any) -> torch.Tensor:
    """Return the bits of all KV of a device pool, [2 * layers, slots, bytes]."""
    both = torch.stack([*pool.k_buffer, *pool.v_buffer])
    return both.view(torch.uint8).flatten(2).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("host_slots", [RUNS, SCATTERED], ids=["runs", "scattered"])
@pytest.mark.parametrize(
    "device_slots", [RUNS.roll(PAGE), SCATTERED.flip(0)], ids=["runs", "scattered"]
)
def test_kv_comes_back_to_other_slots_bit_by_bit(
    dtype: torch.dtype, layout: str, host_slots: torch.Tensor, device_slots: torch.Tensor
) -> None:
    device = _device(dtype, 0)
    host = _host(layout, dtype, device)
    before, held = _all(device), host.kv_buffer.clone()
    source = torch.arange(TOKENS) + PAGE

    host.backup_from_device_all_layer(device, host_slots, source, "direct")
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, host_slots, device_slots, layer, "direct")

    expected = before.clone()
    expected[:, device_slots] = before[:, source]
    assert torch.equal(_all(device), expected)
    where = host_slots // PAGE, host_slots % PAGE
    kv_of_layer = host._layers(device, 1)
    for kept, pool in zip(kv_of_layer, (before[1], before[LAYERS + 1]), strict=True):
        rows = kept[0][host_slots] if kept[0].dim() == 3 else kept[0][where]
        assert torch.equal(rows.contiguous().view(torch.uint8).flatten(1), pool[source])
    changed = (host.kv_buffer.view(torch.uint8) != held.view(torch.uint8)).sum()
    assert 0 < int(changed) <= TOKENS * 2 * LAYERS * HEADS * DIM * dtype.itemsize


def test_a_load_of_other_slots_does_not_take_the_last_ones() -> None:
    device = _device(torch.float32, 0)
    host = _host("layer_first", torch.float32, device)
    first, second = torch.arange(PAGE), torch.arange(PAGE) + PAGE
    for slots in (first, second):
        host.load_to_device_per_layer(device, slots, slots, 0, "direct")
        there, here = host.kv_buffer[0, 0][slots], device.k_buffer[0][slots]
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))


def test_nothing_is_moved_without_slots() -> None:
    device = _device(torch.float32, 0)
    host = _host("layer_first", torch.float32, device)
    before, none = _all(device), torch.empty(0, dtype=torch.int64)

    host.backup_from_device_all_layer(device, none, none, "direct")
    host.load_to_device_per_layer(device, none, none, 0, "direct")

    assert torch.equal(_all(device), before)

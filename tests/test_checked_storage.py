"""Checked storage over SGLang's own file backend and host pools: what is read is what was written."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from host_pools import (
    PAGES,
    STORED,
    faults_of,
    file_backend,
    file_storage,
    fill,
    hashes,
    load,
    load_flat,
    make_host_pool,
    page_bits,
    save,
    save_flat,
    storage_config,
)

from sgl_blend.engine.checked_pages import CheckedPages
from sgl_blend.engine.host_pages import LAYOUTS
from sgl_blend.engine.storage import make_storage, weights_in_use
from sgl_blend.errors import UnsupportedError
from sgl_blend.storage.names import StoreKey

pytestmark = STORED  # pytest.mark.engine

KEY = StoreKey.of(bytes(32))
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])


def _bits(pool: Any, count: int = PAGES) -> list[bytes]:
    return [page_bits(pool, index) for index in range(count)]


def _files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- round trips --------------------------------------------------------------------------------


@KEYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("written", "read"), list(itertools.product(LAYOUTS, repeat=2)))
def test_layouts_read_each_others_pages_bit_for_bit(
    tmp_path: Path, written: str, read: str, dtype: torch.dtype, key: StoreKey | None
) -> None:
    source, target = make_host_pool(written, dtype=dtype), make_host_pool(read, dtype=dtype, seed=1)
    keys = hashes()
    assert save(file_storage(tmp_path, source, key=key), source, keys)

    assert load(file_storage(tmp_path, target, key=key), target, keys) == PAGES

    assert _bits(target) == _bits(source)
    assert _bits(source) == _bits(make_host_pool(written, dtype=dtype))  # untouched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ways_of_sglang_to_move_pages_meet(tmp_path: Path, layout: str) -> None:
    source, target = make_host_pool(layout), make_host_pool(layout, seed=1)
    storage, keys = file_storage(tmp_path, source), hashes()
    slots = torch.arange(PAGES * source.page_size)
    assert save(storage, source, keys[:4])
    assert save_flat(storage, source, keys)
    reader = file_storage(tmp_path, target)
    order = slots.view(PAGES, -1).flip(0).flatten()  # pages come to lie elsewhere
    assert reader.batch_get_v1(keys, order, None) == [True] * PAGES
    assert _bits(target) == _bits(source)[::-1]
    assert load_flat(reader, target, keys) == PAGES
    assert _bits(target) == _bits(source)


def test_single_pages_go_the_same_way(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage, (key, other) = file_storage(tmp_path, pool), hashes(2)
    assert not storage.exists(key)
    assert storage.set(key, pool.get_data_page(0))
    assert storage.exists(key)
    target = pool.get_dummy_flat_data_page()
    assert storage.get(key, target) is target
    assert target.view(torch.uint8).numpy().tobytes() == page_bits(pool, 0)
    assert storage.get(other, target) is None


def test_it_is_a_backend_of_sglangs(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    storage = file_storage(tmp_path, make_host_pool())
    assert isinstance(storage, HiCacheStorage)
    assert isinstance(storage, CheckedPages)
    for name in vars(HiCacheStorage):
        if not name.startswith("_"):
            assert getattr(type(storage), name) is not getattr(HiCacheStorage, name), name


def test_what_is_missing_ends_a_prefix(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage, keys = file_storage(tmp_path, pool), hashes()
    assert save(storage, pool, keys[:5])
    assert storage.batch_exists(keys) == 5
    assert storage.batch_exists(keys[5:]) == 0
    assert storage.batch_exists([]) == 0
    assert load(storage, pool, keys) == 5
    assert load(storage, pool, keys[4:]) == 1
    snapshot = storage.counters.snapshot()
    assert (snapshot["hits"], snapshot["misses"], snapshot["writes"]) == (6, 2, 5)
    assert not faults_of(storage)


# --- who shares with whom -----------------------------------------------------------------------


def test_a_restarted_server_and_one_with_another_path_find_the_pages(tmp_path: Path) -> None:
    source, target = make_host_pool(), make_host_pool(seed=1)
    keys = hashes()
    assert save(file_storage(tmp_path, source), source, keys)
    other = file_storage(tmp_path, target, config=storage_config(model="/mnt/elsewhere/m"))
    assert load(other, target, keys) == PAGES
    assert _bits(target) == _bits(source)
    assert not [name for name in _files(tmp_path) if "some" in name or "path" in name]


def test_servers_that_may_not_share_have_no_name_in_common(tmp_path: Path) -> None:
    keys, pool = hashes(), make_host_pool()
    found: list[set[str]] = []
    variants: list[dict[str, Any]] = [
        {},
        {"weights": "v" * 32},
        {"key": KEY},
        {"key": StoreKey.of(bytes(range(32)))},
        {"config": storage_config(rank=0, size=2)},
        {"config": storage_config(rank=1, size=2)},
    ]
    servers: list[tuple[Any, dict[str, Any]]] = [(pool, variant) for variant in variants]
    servers += [
        (make_host_pool(dtype=torch.float16), {}),
        (make_host_pool(page=32), {}),
        (make_host_pool(layers=4), {}),
    ]
    for mine, variant in servers:
        storage = file_storage(tmp_path, mine, **variant)
        assert storage.batch_exists(keys) == 0
        assert save(storage, mine, keys)
        found.append(set(_files(tmp_path)) - set().union(*found))
        assert len(found[-1]) == PAGES
    names = [name.split("_")[0] for group in found for name in group]
    assert len(set(names)) == PAGES * len(servers)
    # Two tenants ask for the same tokens: SGLang's hashes differ, and so do ours.
    storage = file_storage(tmp_path, pool)
    assert storage.batch_exists(hashes(tenant="b")) == 0


def test_after_a_weight_update_nothing_old_is_found(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage, keys = file_storage(tmp_path, pool), hashes()
    assert save(storage, pool, keys)
    weights_in_use(pool).renew("v" * 32, "rotary")
    assert storage.batch_exists(keys) == 0
    assert load(storage, pool, keys) == 0
    weights_in_use(pool).renew(None)
    assert storage.batch_exists(keys) == 0
    assert load(storage, pool, keys) == 0
    assert not save(storage, pool, keys)
    assert len(_files(tmp_path)) == PAGES
    weights_in_use(pool).renew("w" * 32, "rotary")
    assert load(storage, pool, keys) == PAGES


def test_storage_that_is_attached_later_knows_the_weights(tmp_path: Path) -> None:
    pool = make_host_pool()
    weights_in_use(pool).renew("w" * 32, "rotary")
    first = make_storage(file_backend(tmp_path), "file", storage_config(), pool)
    assert save(first, pool, hashes())
    first.close()
    assert not save(first, pool, hashes(tenant="b"))
    second = make_storage(file_backend(tmp_path), "file", storage_config(), pool)
    assert second.batch_exists(hashes()) == PAGES


# --- SGLang's own management of files -----------------------------------------------------------


def test_sglangs_limit_of_size_counts_containers(tmp_path: Path) -> None:
    pool = make_host_pool()
    unlimited = file_storage(tmp_path / "all", pool)
    keys = hashes()
    assert save(unlimited, pool, keys)
    sizes = [path.stat().st_size for path in (tmp_path / "all").iterdir()]
    assert len(sizes) == PAGES

    limit = sum(sizes) // 2
    config = storage_config(max_size=limit, eviction_ratio=1.0)
    storage = file_storage(tmp_path / "half", pool, config=config)
    for key, page in zip(keys, range(PAGES), strict=True):
        assert storage.set(key, pool.get_data_page(page * pool.page_size))
    kept = sum(path.stat().st_size for path in (tmp_path / "half").iterdir())
    assert limit - 2 * max(sizes) < kept <= limit
    assert storage.exists(keys[-1])
    assert not storage.exists(keys[0])
    # A new server counts what lies there.
    again = file_storage(tmp_path / "half", pool, config=config)
    assert save(again, pool, hashes(tenant="b"))
    assert sum(path.stat().st_size for path in (tmp_path / "half").iterdir()) <= limit


def test_a_removed_object_is_off_the_account(tmp_path: Path) -> None:
    pool = make_host_pool()
    config = storage_config(max_size="10M", enable_metadata_cache=True, metadata_ttl=-1)
    storage, keys = file_storage(tmp_path, pool, config=config), hashes(1)
    evictor = storage._store.made._files._evictor
    for _ in range(3):
        assert save(storage, pool, keys)
        (path,) = tmp_path.iterdir()
        assert evictor._total_bytes == path.stat().st_size
        path.write_bytes(path.read_bytes()[:-1])
        assert load(storage, pool, keys) == 0
        assert not list(tmp_path.iterdir())
        assert evictor._total_bytes == 0
        assert not storage.exists(keys[0])


def test_a_file_that_somebody_removed_is_a_miss_and_written_again(tmp_path: Path) -> None:
    pool = make_host_pool()
    config = storage_config(enable_metadata_cache=True, metadata_ttl=-1)
    storage, keys = file_storage(tmp_path, pool, config=config), hashes(2)
    assert save(storage, pool, keys)
    for path in tmp_path.iterdir():
        path.unlink()
    assert storage.batch_exists(keys) == 2  # SGLang's cache of names
    assert load(storage, pool, keys) == 0
    assert not storage.exists(keys[0])
    assert storage.set(keys[0], pool.get_data_page(0))
    assert load(storage, pool, keys[:1]) == 1


def test_old_unfinished_files_are_removed_at_start(tmp_path: Path) -> None:
    old, young = f".{1:032x}.tmp", f".{2:032x}.tmp"
    names = {old: 7200, young: 60, "mine.tmp": 7200, ".keep": 7200}
    for name, age_s in names.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    file_storage(tmp_path, make_host_pool())
    assert set(_files(tmp_path)) == names.keys() - {old}


def test_clear_empties_the_store(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage = file_storage(tmp_path, pool)
    assert save(storage, pool, hashes())
    assert storage.clear()
    assert not _files(tmp_path)
    assert storage.batch_exists(hashes()) == 0
    assert save(storage, pool, hashes())


# --- counting -----------------------------------------------------------------------------------


def test_reads_and_writes_are_counted_and_reported(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage, keys, seen = file_storage(tmp_path, pool), hashes(), []
    storage.observe(lambda num_bytes, seconds: seen.append((num_bytes, seconds)))
    page_bytes = len(page_bits(pool, 0))
    assert save(storage, pool, keys)
    assert save(storage, pool, keys)  # which are there already
    assert load(storage, pool, keys) == PAGES
    assert load(storage, pool, hashes(tenant="b")) == 0
    found = storage.counters.snapshot()
    assert found["writes"] == found["hits"] == PAGES
    assert found["written_bytes"] == found["read_bytes"] == PAGES * page_bytes
    assert found["not_stored"] == 0
    assert 0 < found["read_seconds"] < 5
    assert 0 < found["write_seconds"] < 5
    ((num_bytes, seconds),) = seen
    assert num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.bin"))
    assert 0.5 * PAGES * page_bytes < num_bytes < PAGES * page_bytes
    assert seconds == pytest.approx(found["read_seconds"])


# --- what is refused ----------------------------------------------------------------------------


def _make(pool: Any, folder: Path, backend: str = "file", **more: Any) -> Any:
    return make_storage(
        lambda name, config, pool: ("raw", name, config.model_name),
        backend,
        more.pop("config", storage_config()),
        pool,
        **more,
    )


@pytest.mark.parametrize("backend", ["nixl", "hf3fs", "dynamic", "shm", "no-such"])
def test_other_backends_are_refused_by_name_or_run_raw(tmp_path: Path, backend: str) -> None:
    pool = make_host_pool()
    with pytest.raises(UnsupportedError, match=f"--hicache-storage-backend {backend} is not che"):
        _make(pool, tmp_path, backend)
    raw = _make(pool, tmp_path, backend, unchecked=True)
    assert raw == ("raw", backend, "some/path")


def test_small_pages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--page-size must be at least 16"):
        _make(make_host_pool(page=8), tmp_path)


def test_other_layouts_and_pools_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--hicache-mem-layout page_head is not supported"):
        _make(make_host_pool("page_head"), tmp_path)
    pool = make_host_pool()
    other = type("MambaPoolHost", (), {"layout": "layer_first", "page_size": 16})()
    with pytest.raises(UnsupportedError, match="host pool MambaPoolHost is not supported"):
        _make(other, tmp_path)
    pool.kv_buffer = pool.kv_buffer[:, :2]
    with pytest.raises(UnsupportedError, match="host pool MHATokenToKVPoolHost is not supported"):
        _make(pool, tmp_path)
    pool.dtype = torch.float8_e4m3fn
    with pytest.raises(UnsupportedError, match="pages of float8_e4m3fn are not supported"):
        _make(pool, tmp_path)


@pytest.mark.parametrize("name", ["pp_size", "attn_cp_size", "should_split_heads"])
def test_split_pages_are_refused(tmp_path: Path, name: str) -> None:
    config = storage_config()
    setattr(config, name, 2)
    with pytest.raises(UnsupportedError, match=f"{name} is not supported"):
        _make(make_host_pool(), tmp_path, config=config)


def test_a_sglang_whose_keys_do_not_hold_the_tenant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import utils

    monkeypatch.delattr(utils, "get_storage_hash_str")
    with pytest.raises(UnsupportedError, match="do not hold the tenant"):
        _make(make_host_pool(), tmp_path, unchecked=True)


def test_side_pools_are_refused_by_name_and_kill_no_thread(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    pool = make_host_pool()
    storage = file_storage(tmp_path, pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    with pytest.raises(UnsupportedError, match="side pool mamba is not supported"):
        storage.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    keys = hashes()
    assert save(storage, pool, keys)
    transfer = PoolTransfer(PoolName.MAMBA, keys=keys)
    assert storage.batch_get_v2([transfer]) == {PoolName.MAMBA: [False] * PAGES}
    assert storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [False] * PAGES}
    assert storage.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert storage.batch_exists_v2(keys).kv_hit_pages == PAGES


def test_the_pools_of_these_tests_differ() -> None:
    first, second = make_host_pool(), make_host_pool(seed=1)
    assert not set(_bits(first)) & set(_bits(second))
    fill(second, 0)
    assert _bits(first) == _bits(second)

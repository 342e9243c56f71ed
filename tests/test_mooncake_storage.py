"""Checked storage over a real Mooncake, TCP on loopback: a master, and a process with the memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mooncake_store
import pytest
import torch
from host_pools import (
    PAGES,
    STORED,
    guarded,
    hashes,
    make_host_pool,
    page_bits,
    stock_backend,
    storage_config,
)
from mooncake_store import Mooncake

from sgl_blend.engine.storage import make_storage, weights_in_use
from sgl_blend.engine.storage_backends import StoreDownError, probe_mooncake
from sgl_blend.storage.breaker import GuardedCalls
from sgl_blend.storage.names import StoreKey

pytestmark = [
    *STORED,  # pytest.mark.engine
    pytest.mark.skipif(mooncake_store.why_not() is not None, reason=str(mooncake_store.why_not())),
]

KEY = StoreKey.of(bytes(32))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with mooncake_store.running(tmp_path_factory.mktemp("mooncake")) as found:
        yield found


def open_storage(store: Mooncake, pool: Any, *, weights: str = "w" * 32, **more: Any) -> Any:
    weights_in_use(pool).renew(weights, "rotary")
    more.setdefault("calls", guarded())
    config = more.pop("config", None) or storage_config(**store.extra_config())
    made = make_storage(stock_backend, "mooncake", config, pool, **more)
    made.register_mem_pool_host(pool)
    return made


def _slots(pool: Any, count: int = PAGES) -> torch.Tensor:
    return torch.arange(count * pool.page_size)


def _write(storage: Any, pool: Any, keys: list[str]) -> bool:
    return all(storage.batch_set_v1(keys, _slots(pool, len(keys)), None))


def _read(storage: Any, pool: Any, keys: list[str]) -> int:
    return sum(storage.batch_get_v1(keys, _slots(pool, len(keys)), None))


def _wait_until_idle(calls: GuardedCalls) -> None:
    """Python must not end while a thread is in Mooncake's code: it would abort."""
    deadline = time.monotonic() + 15
    while calls.num_unfinished:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _faults(storage: Any) -> dict[str, int]:
    return dict(storage.counters.snapshot()["faults"])


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize(("written", "read"), [("layer_first", "page_first_direct")])
def test_pages_come_back_bit_for_bit_in_another_layout_and_from_another_server(
    store: Mooncake, written: str, read: str, key: StoreKey | None
) -> None:
    source, target = make_host_pool(written), make_host_pool(read, seed=1)
    writer, keys = open_storage(store, source, key=key), hashes()
    assert writer.batch_exists(keys) == 0
    assert _write(writer, source, keys[:5])
    elsewhere = storage_config(model="/mnt/elsewhere/m", **store.extra_config())
    reader = open_storage(store, target, key=key, config=elsewhere)
    assert reader.batch_exists(keys) == 5
    assert _read(reader, target, keys) == 5
    assert [page_bits(target, i) for i in range(5)] == [page_bits(source, i) for i in range(5)]
    assert _write(writer, source, keys)  # the first five are there
    assert _read(reader, target, keys) == PAGES
    assert writer.counters.snapshot()["writes"] == PAGES
    assert reader.counters.snapshot()["misses"] == 1
    assert not _faults(writer) | _faults(reader)


def test_other_weights_and_an_operators_tag_are_apart(store: Mooncake) -> None:
    pool, keys = make_host_pool(), hashes(tenant="c")
    assert _write(open_storage(store, pool), pool, keys)
    tagged = storage_config(extra_backend_tag="blue", **store.extra_config())
    assert open_storage(store, pool, config=tagged).batch_exists(keys) == 0
    assert open_storage(store, pool, weights="v" * 32).batch_exists(keys) == 0
    assert open_storage(store, pool).batch_exists(keys) == PAGES


def test_a_damaged_object_is_a_miss_and_written_again(store: Mooncake) -> None:
    pool, keys = make_host_pool(), hashes(tenant="d")
    storage = open_storage(store, pool)
    raw = storage._store.get()._store  # Mooncake's own client
    for damage in (
        lambda good: good[:-1] + bytes([good[-1] ^ 1]),
        lambda good: good[: len(good) // 2],
        lambda good: good + bytes(300_000),  # longer than any object of ours
        lambda good: b"x",
    ):
        assert _write(storage, pool, keys)
        name = storage._objects.names.label(keys[2]).name
        good = raw.get(name)
        assert raw.remove(name, True) == 0
        assert raw.put(name, damage(good)) == 0
        assert _read(storage, pool, keys) == 2
        assert storage.batch_exists(keys) == 2
    assert _write(storage, pool, keys)
    assert _read(storage, pool, keys) == PAGES
    assert _faults(storage) == {"corrupt": 4}
    assert storage.counters.snapshot()["removed"] == 4


@pytest.mark.slow  # Mooncake takes its time to notice
def test_a_full_store_stores_what_it_can(store: Mooncake) -> None:
    pool = make_host_pool(layers=2000, dtype=torch.float32)  # pages of 4 MB
    storage = open_storage(store, pool)
    for tenant in "efghi":
        keys = hashes(tenant=tenant)
        storage.batch_set_v1(keys, _slots(pool), None)
        storage.batch_exists(keys)  # Mooncake evicts nothing that was just asked for
    found = storage.counters.snapshot()
    assert found["writes"] > 10
    assert found["not_stored"] > 0
    assert not _faults(storage)
    assert _read(storage, pool, hashes(tenant="e")) > 0


@pytest.mark.slow  # Mooncake takes its time to notice
def test_a_master_that_hangs_holds_nobody_up_and_is_used_again(store: Mooncake) -> None:
    now = [100.0]
    pool, keys = make_host_pool(), hashes(tenant="k")
    calls = guarded(timeout_s=0.5, clock=lambda: now[0])
    storage = open_storage(store, pool, calls=calls)
    assert _write(storage, pool, keys)
    began = time.monotonic()
    with store.master_stopped():
        for _ in range(6):
            assert _read(storage, pool, keys) == 0
            assert storage.batch_exists(keys) == 0
        waited = time.monotonic() - began
    assert waited < 4
    faults = _faults(storage)
    assert faults["timeout"] + faults.get("busy", 0) + faults.get("error", 0) == 5
    assert faults["open"] == 7
    deadline = time.monotonic() + 90  # Mooncake may have to mount its memory again
    while _read(storage, pool, keys) < PAGES:
        now[0] += 60
        time.sleep(0.1)
        assert time.monotonic() < deadline
    _wait_until_idle(calls)


def test_a_probe_tells_whether_anybody_answers(store: Mooncake) -> None:
    probe_mooncake(storage_config(**store.extra_config()))
    (closed,) = mooncake_store.free_ports(1)
    gone = f"127.0.0.1:{closed}"
    for change in ({"master_server_address": gone}, {"metadata_server": f"http://{gone}/metadata"}):
        with pytest.raises(StoreDownError, match=f"{closed}.* does not answer"):
            probe_mooncake(storage_config(**{**store.extra_config(), **change}))


@pytest.mark.slow  # Mooncake takes its time to notice
def test_a_store_that_is_down_at_start_delays_nothing_and_is_used_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    down = mooncake_store.at_free_ports(tmp_path)
    pool, keys = make_host_pool(), hashes(tenant="l")
    began = time.monotonic()
    calls = guarded(timeout_s=2, clock=lambda: now[0])
    storage = open_storage(down, pool, calls=calls)
    assert time.monotonic() - began < 5  # Mooncake itself would try for 90 seconds
    assert "is down, the server starts without" in caplog.text
    assert storage.batch_exists(keys) == 0
    assert not _write(storage, pool, keys)
    try:
        down.start_master()
        down.start_owner()
        deadline = time.monotonic() + 20
        while not _write(storage, pool, keys):
            now[0] += 60
            time.sleep(0.1)
            assert time.monotonic() < deadline
        assert _read(storage, pool, keys) == PAGES

        down.kill_master()
        before = sum(_faults(storage).values())
        assert storage.batch_exists(keys) == 0
        assert sum(_faults(storage).values()) == before + 1  # an error is no miss
        for _ in range(6):
            assert _read(storage, pool, keys) == 0
        assert _faults(storage)["open"] >= 1
        assert storage.batch_exists(keys) == 0
    finally:
        down.stop()
        _wait_until_idle(calls)


def test_an_object_outlives_the_next_one_that_is_read(store: Mooncake) -> None:
    pool, keys = make_host_pool(), hashes(tenant="o")
    storage = open_storage(store, pool)
    assert _write(storage, pool, keys)
    objects = storage._objects._store.get()
    names = [storage._objects.names.label(key).name for key in keys]
    found = [objects.read(name) for name in names]
    assert [bytes(each) for each in found] == [bytes(objects.read(name)) for name in names]
    assert len({bytes(each) for each in found}) == len(names)

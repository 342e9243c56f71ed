"""Whatever goes wrong in a folder of stored pages is a miss, is counted, and heals."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from host_pools import (
    PAGES,
    STORED,
    faults_of,
    file_storage,
    guarded,
    hashes,
    load,
    make_host_pool,
    page_bits,
    save,
    storage_config,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from stored_files import longest_file
from xxhash import xxh3_128_digest

from sgl_blend.engine.storage import make_storage
from sgl_blend.errors import ConfigError
from sgl_blend.storage.breaker import GuardedCalls
from sgl_blend.storage.names import StoreKey

pytestmark = STORED  # pytest.mark.engine

KEY = StoreKey.of(bytes(32))


def _one_object(folder: Path, pool: Any, storage: Any) -> tuple[Path, bytes]:
    assert save(storage, pool, hashes(1))
    (path,) = folder.glob("*.bin")
    return path, path.read_bytes()


def _is_noticed(storage: Any, pool: Any, path: Path, damaged: bytes | bytearray) -> None:
    """Put a damaged object where a good one was: a miss, and gone; a page buffer stays as it is."""
    path.write_bytes(damaged)
    target = pool.get_dummy_flat_data_page()
    assert storage.batch_get(hashes(1), [target]) == [None], len(damaged)
    assert not target.view(torch.uint8).any()
    assert not path.exists()


# --- damaged objects ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_every_flipped_byte_is_a_miss_and_the_object_goes(
    tmp_path: Path, key: StoreKey | None
) -> None:
    pool = make_host_pool(layers=1)
    storage = file_storage(tmp_path, pool, key=key)
    path, good = _one_object(tmp_path, pool, storage)
    for index in range(len(good)):
        damaged = bytearray(good)
        damaged[index] ^= 1 << index % 8
        _is_noticed(storage, pool, path, damaged)
    assert faults_of(storage) == {"corrupt": len(good)}
    assert storage.counters.snapshot()["removed"] == len(good)
    assert save(storage, pool, hashes(1))
    assert load(storage, pool, hashes(1)) == 1


def test_every_cut_is_a_miss_and_the_object_goes(tmp_path: Path) -> None:
    pool = make_host_pool(layers=1)
    storage = file_storage(tmp_path, pool)
    path, good = _one_object(tmp_path, pool, storage)
    for length in range(len(good)):
        _is_noticed(storage, pool, path, good[:length])
    assert faults_of(storage) == {"corrupt": len(good)}


def test_garbage_and_absurd_lengths_are_misses(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage = file_storage(tmp_path, pool)
    path, good = _one_object(tmp_path, pool, storage)
    for damaged in (
        b"\0",
        os.urandom(len(good)),
        good + b"\0",
        good[:8] + b"\xff" * 8 + good[16:],
        good[:8] + (1 << 32).to_bytes(8, "little") + good[16:],
        good + bytes(1 << 20),
    ):
        _is_noticed(storage, pool, path, damaged)
    assert faults_of(storage) == {"corrupt": 6}


def _make_folder(path: Path) -> None:
    path.mkdir()
    (path / "letter").write_text("somebody's")


NO_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": _make_folder,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_a_miss_and_goes(tmp_path: Path, kind: str) -> None:
    pool = make_host_pool()
    storage = file_storage(tmp_path, pool)
    path, _ = _one_object(tmp_path, pool, storage)
    for _ in range(6):  # more than there are threads
        path.unlink()
        NO_FILES[kind](path)
        assert load(storage, pool, hashes(1)) == 0
        assert not path.exists()
        assert save(storage, pool, hashes(1))
        assert load(storage, pool, hashes(1)) == 1
    assert faults_of(storage) == {"corrupt": 6}
    letters = [kept.read_text() for kept in tmp_path.glob("*/letter")]
    assert letters == ["somebody's"] * 6 * (kind == "folder")


def test_an_object_of_another_version_than_its_name_says_is_written_again(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage = file_storage(tmp_path, pool)
    path, good = _one_object(tmp_path, pool, storage)
    later = good[:4] + b"\x02\0" + good[6:-16]
    path.write_bytes(later + xxh3_128_digest(later))
    assert load(storage, pool, hashes(1)) == 0
    assert faults_of(storage) == {"version": 1}
    assert not path.exists()
    assert save(storage, pool, hashes(1))
    assert path.read_bytes() == good
    assert load(storage, pool, hashes(1)) == 1


@pytest.mark.parametrize(("key", "fault"), [(None, "mismatch"), (KEY, "corrupt")])
def test_another_page_under_this_name_is_noticed(
    tmp_path: Path, key: StoreKey | None, fault: str
) -> None:
    pool = make_host_pool()
    storage = file_storage(tmp_path, pool, key=key)
    path, _ = _one_object(tmp_path, pool, storage)
    assert storage.set(hashes(2)[1], pool.get_data_page(pool.page_size))
    (other,) = set(tmp_path.glob("*.bin")) - {path}
    _is_noticed(storage, pool, path, other.read_bytes())
    assert faults_of(storage) == {fault: 1}


def test_a_bad_page_in_the_middle_ends_the_prefix_there(tmp_path: Path) -> None:
    pool, target = make_host_pool(), make_host_pool(seed=1)
    storage, keys = file_storage(tmp_path, pool), hashes()
    paths: list[Path] = []
    for index, key in enumerate(keys):
        before = set(tmp_path.iterdir())
        assert storage.set(key, pool.get_data_page(index * pool.page_size))
        paths += set(tmp_path.iterdir()) - before
    paths[3].write_bytes(paths[3].read_bytes()[:-100])
    reader = file_storage(tmp_path, target)
    untouched = [page_bits(target, index) for index in range(3, PAGES)]
    slots = torch.arange(PAGES * pool.page_size)
    assert reader.batch_get_v1(keys, slots) == [True] * 3 + [False] * 5
    assert [page_bits(target, i) for i in range(3)] == [page_bits(pool, i) for i in range(3)]
    assert [page_bits(target, i) for i in range(3, PAGES)] == untouched
    assert storage.batch_exists(keys) == 3
    assert save(storage, pool, keys)
    assert load(reader, target, keys) == PAGES


# --- a folder that takes nothing, or is not there -----------------------------------------------


def test_a_full_disk_stores_nothing_and_reads_go_on(tmp_path: Path) -> None:
    pool = make_host_pool(layers=80)
    storage, keys = file_storage(tmp_path, pool), hashes()
    assert save(storage, pool, keys[:2])
    with longest_file(30_000):
        for _ in range(20):
            assert not save(storage, pool, keys[2:])
        assert load(storage, pool, keys) == 2
    assert len(list(tmp_path.iterdir())) == 2  # and no unfinished file
    assert storage.counters.snapshot()["not_stored"] == 20
    assert not faults_of(storage)
    assert save(storage, pool, keys)
    assert load(storage, pool, keys) == PAGES


def test_a_quota_stores_nothing_and_reads_go_on(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage = file_storage(tmp_path, pool, config=storage_config(max_size=100))
    assert not save(storage, pool, hashes())
    assert storage.batch_set_v1(hashes(), torch.arange(PAGES * pool.page_size)) == [False] * PAGES
    assert storage.counters.snapshot()["not_stored"] == 2
    assert load(storage, pool, hashes()) == 0
    assert not faults_of(storage)


@contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    """Let this process read a folder and not write to it; root may always, so it is somebody else."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_folder_that_cannot_be_written_is_read() -> None:
    pool, keys = make_host_pool(), hashes()
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        storage = file_storage(Path(name), pool)
        assert save(storage, pool, keys[:2])
        with _read_only(Path(name)):
            assert not save(storage, pool, keys)
            assert load(storage, pool, keys) == 2
        assert storage.counters.snapshot()["not_stored"] == 1
        assert not faults_of(storage)
        assert save(storage, pool, keys)


def test_a_store_that_is_down_at_start_is_used_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    (tmp_path / "mount").touch()  # where a folder should be
    pool, keys = make_host_pool(), hashes()
    calls = guarded(clock=lambda: now[0])
    storage = file_storage(tmp_path / "mount" / "store", pool, calls=calls)
    assert "is down, the server starts without" in caplog.text
    for _ in range(6):
        assert storage.batch_exists(keys) == 0
    assert not save(storage, pool, keys)
    assert load(storage, pool, keys) == 0
    assert faults_of(storage)["error"] == 5
    assert faults_of(storage)["open"] >= 3

    (tmp_path / "mount").unlink()
    assert not save(storage, pool, keys)  # left alone for a second
    now[0] += 1
    assert save(storage, pool, keys)
    assert load(storage, pool, keys) == PAGES


def test_a_folder_that_vanishes_is_only_empty(tmp_path: Path) -> None:
    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path / "store", pool)
    assert save(storage, pool, keys)
    shutil.rmtree(tmp_path / "store")
    assert storage.batch_exists(keys) == 0
    assert load(storage, pool, keys) == 0
    assert not save(storage, pool, keys)
    (tmp_path / "store").mkdir()
    assert save(storage, pool, keys)
    assert load(storage, pool, keys) == PAGES


def test_a_wrong_setting_is_no_store_that_is_down(tmp_path: Path) -> None:
    def create(*args: Any) -> Any:
        raise ValueError("no such option")

    with pytest.raises(ConfigError, match="--hicache-storage-backend file: no such option"):
        make_storage(create, "file", storage_config(), make_host_pool())


# --- exceptions and time ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, RuntimeError, AssertionError, MemoryError, KeyError])
def test_every_exception_of_a_backend_is_a_miss_or_a_failed_write(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> Any:
        raise error("boom")

    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path, pool)
    assert save(storage, pool, keys)
    with monkeypatch.context() as patch:
        patch.setattr(HiCacheFile, "get", fail)
        assert load(storage, pool, keys) == 0
        patch.setattr(HiCacheFile, "set", fail)
        assert not storage.set("f" * 64, pool.get_data_page(0))
        patch.setattr(HiCacheFile, "exists", fail)
        assert storage.batch_exists(keys) == 0
        assert not storage.exists(keys[0])
        patch.setattr(HiCacheFile, "clear", fail)
        assert not storage.clear()
    assert faults_of(storage)["error"] == 5
    assert storage.counters.snapshot()["not_stored"] == 1
    assert len(list(tmp_path.iterdir())) == PAGES  # a store that fails is no faulty object
    assert load(storage, pool, keys) == PAGES


def _hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let all reads wait until somebody sets the event that is returned."""
    stock, may_go_on = HiCacheFile.get, threading.Event()

    def hanging(self: Any, *args: Any) -> Any:
        may_go_on.wait()
        return stock(self, *args)

    monkeypatch.setattr(HiCacheFile, "get", hanging)
    return may_go_on


def _let_go(calls: GuardedCalls, may_go_on: threading.Event) -> None:
    """Let all reads go on, and wait until they have ended."""
    may_go_on.set()
    while calls.num_unfinished:
        time.sleep(0.01)


def test_a_store_that_hangs_holds_nobody_up_and_its_late_answers_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_host_pool()
    calls = guarded(timeout_s=0.2)
    storage = file_storage(tmp_path, pool, calls=calls)
    _one_object(tmp_path, pool, storage)
    threads = threading.active_count()
    hung = _hang(monkeypatch)
    target = pool.get_dummy_flat_data_page()
    began = time.monotonic()
    for _ in range(20):
        assert storage.batch_get(hashes(1), [target]) == [None]
    assert time.monotonic() - began < 3
    assert threading.active_count() - threads <= 3
    assert calls.num_threads <= 4
    faults = faults_of(storage)
    assert faults["timeout"] + faults.get("busy", 0) == 5
    assert faults["open"] == 15
    _let_go(calls, hung)
    time.sleep(0.05)
    assert not target.view(torch.uint8).any()
    assert storage.counters.snapshot()["hits"] == 0


def test_a_store_that_hung_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pool = make_host_pool()
    calls = guarded(timeout_s=0.2, clock=lambda: now[0])
    storage = file_storage(tmp_path, pool, calls=calls)
    _one_object(tmp_path, pool, storage)
    hung = _hang(monkeypatch)
    for _ in range(6):
        assert load(storage, pool, hashes(1)) == 0
    _let_go(calls, hung)
    assert load(storage, pool, hashes(1)) == 0
    now[0] += 1
    assert load(storage, pool, hashes(1)) == 1


def test_a_page_that_is_slow_is_not_waited_for_by_those_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path, pool, calls=guarded(timeout_s=0.3))
    assert save(storage, pool, keys)
    stock = HiCacheFile.get
    asked: list[str] = []
    third = storage._objects.names.label(keys[2]).name

    def slow(self: Any, key: str, *rest: Any) -> Any:
        asked.append(key)
        time.sleep(2 if key == third else 0)
        return stock(self, key, *rest)

    monkeypatch.setattr(HiCacheFile, "get", slow)
    began = time.monotonic()
    assert load(storage, pool, keys) == 2
    assert time.monotonic() - began < 1
    assert len(asked) <= 4  # nobody asks for what SGLang will not use

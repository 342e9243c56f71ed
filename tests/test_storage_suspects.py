"""An object that is wrong, or not whole, is not taken for a page that is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_pools import (
    PAGES,
    STORED,
    faults_of,
    file_storage,
    hashes,
    load,
    make_host_pool,
    save,
)
from stored_files import longest_file

from sgl_blend.engine import page_objects
from sgl_blend.engine.storage_backends import FileStore
from sgl_blend.storage.container import unpack
from sgl_blend.storage.envelope import Fault

pytestmark = STORED  # pytest.mark.engine


def _paths(folder: Path, storage: Any, keys: list[str]) -> list[Path]:
    found = []
    for key in keys:
        (path,) = folder.glob(f"{storage._objects.names.label(key).name}*")
        found.append(path)
    return found


def _not_stored(storage: Any) -> int:
    return int(storage.counters.snapshot()["not_stored"])


def _unpack_but(name: str, outcome: Fault | type[Exception]) -> Callable[..., bytearray | Fault]:
    """Return an unpack that does something else for an object of this name."""

    def reading(data: Any, label: Any, *rest: Any) -> bytearray | Fault:
        if label.name != name:
            return unpack(data, label, *rest)
        if isinstance(outcome, Fault):
            return outcome
        raise outcome

    return reading


@pytest.mark.parametrize("wrong", [2, 4], ids=["first", "behind another"])
def test_a_wrong_object_that_cannot_be_removed_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    def fail(self: Any, name: str) -> None:
        raise PermissionError(name)

    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path, pool)
    assert save(storage, pool, keys)
    paths = _paths(tmp_path, storage, keys)
    good = {index: paths[index].read_bytes() for index in (2, wrong)}
    for index, data in good.items():
        paths[index].write_bytes(data[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "remove", fail)
        assert load(storage, pool, keys) == 2
        if wrong != 2:
            paths[2].write_bytes(good[2])  # somebody else wrote it
        for attempt in range(1, 3):
            assert not save(storage, pool, keys)
            assert _not_stored(storage) == attempt
        assert storage.counters.snapshot()["removed"] == 0
    assert save(storage, pool, keys)
    assert paths[wrong].read_bytes() == good[wrong]
    assert load(storage, pool, keys) == PAGES
    assert _not_stored(storage) == 2


def test_an_object_at_a_position_beyond_this_server_s_stays_and_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path, pool)
    assert save(storage, pool, keys)
    path = _paths(tmp_path, storage, keys)[2]
    written = path.read_bytes()
    third = storage._objects.names.label(keys[2]).name

    with monkeypatch.context() as patch:
        patch.setattr(page_objects, "unpack", _unpack_but(third, Fault.POSITION))
        assert load(storage, pool, keys) == 2
        assert not save(storage, pool, keys)
    assert _not_stored(storage) == 1
    assert faults_of(storage) == {"position": 2}
    assert path.read_bytes() == written
    assert save(storage, pool, keys)
    assert load(storage, pool, keys) == PAGES


def test_a_page_whose_decoding_raises_is_counted_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path, pool)
    assert save(storage, pool, keys)
    third = storage._objects.names.label(keys[2]).name

    with monkeypatch.context() as patch:
        patch.setattr(page_objects, "unpack", _unpack_but(third, MemoryError))
        assert load(storage, pool, keys) == 2
    assert faults_of(storage) == {"error": 1}
    assert storage.batch_exists(keys) == load(storage, pool, keys) == PAGES


@pytest.mark.parametrize("room", [0, 1000], ids=["nothing", "a part"])
def test_a_small_object_that_a_full_disk_cut_is_not_stored(tmp_path: Path, room: int) -> None:
    pool, keys = make_host_pool(), hashes()
    storage = file_storage(tmp_path, pool)
    assert save(storage, pool, keys[:1])
    (path,) = tmp_path.iterdir()
    # A disk refuses whole buffers of 4 KiB, and SGLang's file store hears of it; not of the last one.
    assert room < path.stat().st_size < 4096
    with longest_file(room):
        assert not save(storage, pool, keys)
        assert storage.batch_exists(keys) == load(storage, pool, keys) == 1
    assert list(tmp_path.iterdir()) == [path]
    assert _not_stored(storage) == 1
    assert not faults_of(storage)
    assert save(storage, pool, keys)
    assert load(storage, pool, keys) == PAGES

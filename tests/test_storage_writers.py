"""Several writers of one folder, and one that is killed: readers see whole pages alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from host_pools import PAGES, STORED, file_storage, hashes, load, make_host_pool, page_bits, save

pytestmark = STORED  # pytest.mark.engine


def _faults(storage: Any) -> dict[str, int]:
    return dict(storage.counters.snapshot()["faults"])


def test_two_writers_and_a_reader_see_whole_pages_alone(tmp_path: Path) -> None:
    pools = [make_host_pool(), make_host_pool(), make_host_pool(seed=1)]
    first, second, reader = (file_storage(tmp_path, pool) for pool in pools)
    keys = hashes()
    want = [page_bits(pools[0], index) for index in range(PAGES)]
    stop = threading.Event()

    def write(storage: Any, pool: Any, order: int) -> None:
        while not stop.is_set():
            for key, index in list(zip(keys, range(PAGES), strict=True))[::order]:
                storage.set(key, pool.get_data_page(index * pool.page_size))
            for path in tmp_path.glob("*.bin"):
                path.unlink(missing_ok=True)

    threads = [
        threading.Thread(target=write, args=(first, pools[0], 1)),
        threading.Thread(target=write, args=(second, pools[1], -1)),
    ]
    for thread in threads:
        thread.start()
    deadline, hits = time.monotonic() + 2, 0
    while time.monotonic() < deadline:
        count = load(reader, pools[2], keys)
        assert [page_bits(pools[2], index) for index in range(count)] == want[:count]
        hits += count
    stop.set()
    for thread in threads:
        thread.join()
    assert hits
    assert "corrupt" not in _faults(reader)
    assert save(first, pools[0], keys)
    assert load(reader, pools[2], keys) == PAGES


def test_a_writer_that_is_killed_leaves_only_whole_pages(tmp_path: Path) -> None:
    pool = make_host_pool(layers=200)
    keys = hashes()
    for round_ in range(4):
        child = os.fork()
        if child == 0:
            storage = file_storage(tmp_path, pool)
            while True:
                save(storage, pool, keys)
                for path in tmp_path.glob("*.bin"):
                    path.unlink()
        while not list(tmp_path.glob("*.bin")):
            time.sleep(0.005)
        time.sleep(0.02 * round_)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL

        target = make_host_pool(seed=1, layers=200)
        reader = file_storage(tmp_path, target)
        count = load(reader, target, keys)
        assert [page_bits(target, i) for i in range(count)] == [
            page_bits(pool, i) for i in range(count)
        ]
        assert not _faults(reader)
    for path in tmp_path.glob(".*.tmp"):
        os.utime(path, (time.time() - 7200,) * 2)
    assert save(file_storage(tmp_path, pool), pool, keys)
    assert not list(tmp_path.glob(".*.tmp"))

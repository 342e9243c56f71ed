"""Faults of a store behind a whole engine: every request is answered, and the store is used again."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import ENGINE_ARGS, Answer, Driver, Engine
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from stored_chunks import CHUNKS, ask, ask_for_stored, fill, flush, same
from stored_files import NEEDS_NAMESPACES, longest_file, settings, store
from tiny_models import head_dim_for, make_model

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]


def _unlocked(driver: Driver) -> bool:
    pool = driver.runtime.describe()["pool"]
    whole = pool["free"] + pool["evictable"] == pool["capacity"]
    return bool(whole and pool["locked"] == 0 and driver.runtime.storage.num_coming == 0)


def _fill_a_full_disk(driver: Driver, salt: str) -> tuple[Answer, Answer, dict[str, Any]]:
    """Build chunks while no file can be written, ask for them, and again with room on the disk."""
    plain = ask(driver, f"{salt}: never stored")
    before = driver.runtime.storage.describe()["not_stored"]
    with longest_file(100):
        fill(driver, salt)
    found = driver.runtime.storage.describe()
    lost, _, built = ask_for_stored(driver, salt)
    assert built == len(CHUNKS), "what could not be stored is built again"
    assert lost.logprobs == plain.logprobs
    assert _unlocked(driver)
    fill(driver, salt)
    back, _, _ = ask_for_stored(driver, salt)
    return lost, back, {"not_stored": found["not_stored"] - before, "faults": found["faults"]}


def test_on_a_full_disk_chunks_are_computed(start_engine: StartEngine) -> None:
    lost, back, found = start_engine(**settings()).call(_fill_a_full_disk, "full disk")
    assert lost.report["storage_tokens"] == 0
    assert found["not_stored"] > 0
    assert back.report["chunk_hits"] == len(CHUNKS)
    assert back.report["storage_tokens"] > 0


def _ask_with_a_full_host(driver: Driver, salt: str) -> tuple[Answer, float, Answer]:
    """Ask while all host memory is held by somebody who does not give it back."""
    fill(driver, salt)
    pool = driver.scheduler.tree_cache.cache_controller.mem_pool_host
    held = pool.alloc(pool.available_size())
    begun = time.monotonic()
    without = ask(driver, salt)
    taken = time.monotonic() - begun
    pool.free(held)
    flush(driver)
    after = ask(driver, salt)
    assert _unlocked(driver)
    return without, taken, after


def test_host_memory_that_is_full_holds_nobody_up(start_engine: StartEngine) -> None:
    without, taken, after = start_engine(**settings()).call(_ask_with_a_full_host, "full host")
    assert without.report["storage_tokens"] == 0
    assert taken < 10.0
    assert after.report["chunk_hits"] == len(CHUNKS)


def _engine(model_folder: Path, name: str) -> Engine:
    more = {"enable_blend": True, "blend_check_layer": 1, "blend_when": "always"}
    path = make_model("llama", model_folder / name, head_dim=head_dim_for(ENGINE_ARGS))
    return Engine(path, **settings(**more))


def _write_slowly(driver: Driver, salt: str) -> None:
    """Begin to store chunks in a way that is not over when the process is killed."""
    stock = HiCacheFile.set

    def slow(*args: Any, **more: Any) -> Any:
        found = stock(*args, **more)
        time.sleep(0.05)
        return found

    patch.object(HiCacheFile, "set", slow).start()
    ask(driver, salt, (0, 1, 2))


@pytest.mark.slow
def test_a_server_that_is_killed_in_mid_write_leaves_a_good_store(
    start_engine: StartEngine, model_folder: Path, store: Path
) -> None:
    survivor = start_engine(**settings())
    plain, kv, _ = survivor.call(fill, "reference")
    before = len(list(store.iterdir()))
    victim = _engine(model_folder, "victim")
    victim.send(_write_slowly, "killed")
    deadline = time.monotonic() + 60.0
    while len(list(store.iterdir())) < before + 5:
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.01)
    assert victim._process.pid is not None
    os.kill(victim._process.pid, signal.SIGKILL)
    victim._process.join()
    answer, kv_back, _ = survivor.call(ask_for_stored, "killed")
    assert answer.report["storage_tokens"] > 0, "nothing that was written is found"
    assert survivor.call(_faults) == {}
    survivor.call(fill, "killed")
    answer, kv_back, built = survivor.call(ask_for_stored, "killed")
    assert built == 0
    assert answer.logprobs == plain.logprobs
    assert same(kv, kv_back)
    victim.close()


def _faults(driver: Driver) -> dict[str, int]:
    return dict(driver.runtime.storage.describe()["faults"])


@pytest.mark.slow
def test_servers_that_start_and_stop_share_a_store(
    start_engine: StartEngine, model_folder: Path
) -> None:
    lasting = start_engine(**settings())
    before = lasting.call(_faults)
    warm, kv, _ = lasting.call(fill, "shared 0")
    for turn in range(2):
        other = _engine(model_folder, f"other {turn}")
        theirs, kv_back, built = other.call(ask_for_stored, f"shared {turn}")
        assert built == 0
        assert theirs.logprobs == warm.logprobs
        assert same(kv, kv_back)
        other.call(fill, f"shared {turn + 1}")
        other.close()
        ours, kv_back, built = lasting.call(ask_for_stored, f"shared {turn + 1}")
        assert built == 0
        assert ours.logprobs == warm.logprobs
        assert same(kv, kv_back)
    assert lasting.call(_faults) == before

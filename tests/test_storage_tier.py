"""Chunks that left device and host come back from storage, also in another process."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engines import model_folder
from harness import ENGINE_ARGS, Answer, Driver, Engine, Prompt, rag_prompt, random_tokens
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from tiny_models import head_dim_for, make_model

__all__ = ["model_folder"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 72) for i in range(3)]
QUESTION = random_tokens(99, 12)
PAGE = 16


def settings(**more: Any) -> dict[str, Any]:
    return {
        "enable_blend": True,
        "blend_check_layer": 1,
        "blend_when": "always",
        "max_total_tokens": 1024,
        "page_size": PAGE,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "blend_min_chunk_tokens": 32,
        **more,
    }


class Servers:
    """Engines that come one after the other, or side by side, on one folder."""

    def __init__(self, models: Path, folder: Path) -> None:
        self._models = models
        self.folder = folder
        self._running: list[Engine] = []

    def start(self, **more: Any) -> Engine:
        made = settings(**more)
        head_dim = head_dim_for({**ENGINE_ARGS, **made})
        with patch.dict(os.environ, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.folder)}):
            engine = Engine(make_model("llama", self._models, head_dim=head_dim), **made)
        self._running.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._running:
            engine.close()
        self._running.clear()


@pytest.fixture
def servers(model_folder: Path, tmp_path: Path) -> Iterator[Servers]:
    found = Servers(model_folder, tmp_path / "store")
    yield found
    found.close()


def _ask(driver: Driver, order: tuple[int, ...] = (2, 0, 1), **rest: Any) -> Answer:
    prompt = rag_prompt(SYSTEM, [CHUNKS[i] for i in order], QUESTION, **rest)
    (answer,) = driver.ask(prompt)
    driver.settle()
    return answer


def _kv(driver: Driver) -> list[Any]:
    return driver.kv(SYSTEM + CHUNKS[1], driver.chunk_salt())


def _same(kv: list[Any], other: list[Any]) -> bool:
    return all(
        x.equal(y)
        for layer, layer_2 in zip(kv, other, strict=True)
        for x, y in zip(layer, layer_2, strict=True)
    )


def test_chunks_come_back_after_a_restart(servers: Servers) -> None:
    first = servers.start()
    first.call(_ask, (0, 1, 2))
    warm, kv = first.call(_ask), first.call(_kv)
    servers.close()

    second = servers.start()
    back, kv_back = second.call(_ask), second.call(_kv)

    shared, whole = len(SYSTEM) // PAGE * PAGE, len(SYSTEM + CHUNKS[0])
    stored = shared + len(CHUNKS) * (whole - shared)
    assert back.report["storage_tokens"] == back.report["host_tokens"] == stored
    assert back.report["load_ms"] > 0
    assert _alike(back.report) == _alike(warm.report)
    assert back.report["chunk_hits"] == 3
    assert back.logprobs == warm.logprobs
    assert _same(kv, kv_back)


def _alike(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without what tells where the KV came from."""
    return {
        name: value
        for name, value in report.items()
        if name not in ("host_tokens", "storage_tokens", "load_ms")
    }


def _names(servers: Servers) -> set[str]:
    return {path.name for path in servers.folder.iterdir()}


def _built(driver: Driver) -> int:
    return int(driver.runtime.describe()["chunks_built"])


def _flush(driver: Driver) -> None:
    """Let nothing be left but what is stored."""
    driver.settle()
    driver.flush()


@contextmanager
def _slow_reads(seconds: float) -> Iterator[None]:
    """Let each page take so long to be read."""
    stock = HiCacheFile.get

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return stock(*args, **more)

    with patch.object(HiCacheFile, "get", slow):
        yield


def _fill_and_ask(driver: Driver) -> tuple[Answer, Answer]:
    _ask(driver, (0, 1, 2))
    warm = _ask(driver)
    _flush(driver)
    return warm, _ask(driver)


def test_chunks_come_back_after_a_flush(servers: Servers) -> None:
    engine = servers.start()
    warm, back = engine.call(_fill_and_ask)
    assert back.report["storage_tokens"] > 0
    assert _alike(back.report) == _alike(warm.report)
    assert back.logprobs == warm.logprobs
    assert engine.call(_built) == len(CHUNKS), "what is stored was built again"


def test_no_blended_prompt_is_stored(servers: Servers) -> None:
    servers.start().call(_fill_and_ask)
    pages = len(SYSTEM) // PAGE + len(CHUNKS) * (
        len(SYSTEM + CHUNKS[0]) // PAGE - len(SYSTEM) // PAGE
    )
    assert len(_names(servers)) == pages


def _ask_as(driver: Driver, salt: str) -> Answer:
    _flush(driver)
    return _ask(driver, salt=salt)


def test_tenants_share_nothing_that_is_stored(servers: Servers) -> None:
    engine = servers.start()
    engine.call(_ask_as, "a")
    names = _names(servers)
    assert engine.call(_ask_as, "b").report["storage_tokens"] == 0
    assert len(_names(servers)) == 2 * len(names)
    assert engine.call(_ask_as, "a").report["storage_tokens"] > 0


def _ask_with_a_history(driver: Driver) -> tuple[Answer, Answer]:
    """Ask with the beginning of the prompt computed exactly before, on the device and in storage."""
    _flush(driver)
    driver.ask(Prompt([SYSTEM + CHUNKS[2] + CHUNKS[0]]))
    warm = _ask(driver)
    _flush(driver)
    return warm, _ask(driver)


def test_an_exact_prefix_comes_back(servers: Servers) -> None:
    warm, back = servers.start().call(_ask_with_a_history)
    assert warm.report["prefix_tokens"] == len(SYSTEM + CHUNKS[2] + CHUNKS[0]) // PAGE * PAGE
    assert back.report["prefix_tokens"] == warm.report["prefix_tokens"]
    assert back.report["storage_tokens"] >= back.report["prefix_tokens"]


def _ask_of_a_slow_store(driver: Driver) -> tuple[Answer, float, int, Answer]:
    _ask(driver, (0, 1, 2))
    _flush(driver)
    built = _built(driver)
    with _slow_reads(1.0):
        begun = time.monotonic()
        (late,) = driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))
        taken = time.monotonic() - begun
        driver.settle()
    return late, taken, _built(driver) - built, _ask(driver)


@pytest.mark.slow
def test_nobody_waits_for_a_slow_store(servers: Servers) -> None:
    late, taken, built, after = servers.start().call(_ask_of_a_slow_store)
    assert late.report["chunk_hits"] == 0
    assert taken < 3.0
    assert built == 0, "what was on its way was built"
    assert after.report["chunk_hits"] == len(CHUNKS)


def _interrupt(driver: Driver, how: str) -> Answer:
    """Do something while a request waits for storage, and ask again."""
    _ask(driver, (0, 1, 2))
    _flush(driver)
    with _slow_reads(0.02):
        req = driver.submit(rag_prompt(SYSTEM, CHUNKS, QUESTION))
        while not driver.scheduler.tree_cache.cache_controller.prefetch_tokens_occupied:
            driver.step()
        assert driver.runtime.storage.num_coming > 0
        if how == "abort":
            driver.scheduler.abort_request(AbortReq(rid=req.rid))
        elif how == "flush":
            driver.scheduler.abort_request(AbortReq(rid=req.rid))
            assert driver.scheduler.flush_cache(), "what nobody waits for keeps the server busy"
        else:
            driver.runtime.weights_changed()
            driver.run_until(req.finished)
            assert req.sgl_blend.report.storage_tokens == 0
            return driver.answer(req)
        driver.settle()
    assert driver.runtime.storage.num_coming == 0
    return _ask(driver)


@pytest.mark.parametrize("how", ["abort", "flush", "weights"])
def test_what_is_on_its_way_can_be_given_up(servers: Servers, how: str) -> None:
    engine = servers.start()
    answer = engine.call(_interrupt, how)
    if how == "weights":
        assert answer.report["chunk_hits"] == 0
    else:
        assert answer.report["chunk_hits"] == len(CHUNKS)
    engine.call(_flush)


def test_build_mode_answers_alike(servers: Servers) -> None:
    engine = servers.start(blend_on_miss="build")
    warm, back = engine.call(_fill_and_ask)
    assert back.report["storage_tokens"] > 0
    assert _alike(back.report) == _alike(warm.report)
    assert back.logprobs == warm.logprobs
    assert engine.call(_built) == len(CHUNKS), "what is stored was built again"

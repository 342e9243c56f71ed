"""Chunks in a real Mooncake behind a whole engine: they come back, and its faults hold nobody up."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mooncake_store
import pytest
from engines import StartEngine, model_folder, start_engine
from harness import ENGINE_ARGS, Answer, Driver, Engine
from mooncake_store import Mooncake
from stored_chunks import (
    CHUNKS,
    SYSTEM,
    alike,
    ask,
    ask_for_stored,
    fill,
    flush,
    num_pages,
    prompt_of,
    same,
)
from stored_files import NEEDS_NAMESPACES, PAGE, settings
from tiny_models import head_dim_for, make_model

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = [
    pytest.mark.engine,
    NEEDS_NAMESPACES,
    pytest.mark.skipif(mooncake_store.why_not() is not None, reason=str(mooncake_store.why_not())),
]

USED_AGAIN_S = 90.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with mooncake_store.running(tmp_path_factory.mktemp("mooncake")) as found:
        yield found


def _settings(store: Mooncake, **more: Any) -> dict[str, Any]:
    config = json.dumps(store.extra_config())
    backend = {
        "hicache_storage_backend": "mooncake",
        "hicache_storage_backend_extra_config": config,
    }
    return settings(**backend, **more)


@pytest.fixture(scope="module")
def another(model_folder: Path, store: Mooncake) -> Iterator[Engine]:
    """Return a server of the same model, which calls it by another path."""
    more = {"enable_blend": True, "blend_check_layer": 1, "blend_when": "always"}
    path = make_model("llama", model_folder / "elsewhere", head_dim=head_dim_for(ENGINE_ARGS))
    engine = Engine(path, **_settings(store, max_total_tokens=1040, **more))
    yield engine
    engine.close()


@pytest.mark.parametrize("where", ["flushed", "another"])
def test_chunks_come_back(
    start_engine: StartEngine, store: Mooncake, request: pytest.FixtureRequest, where: str
) -> None:
    engine = start_engine(**_settings(store))
    warm, kv, built = engine.call(fill, where)
    assert built == len(CHUNKS)
    if where == "another":
        engine = request.getfixturevalue("another")
    back, kv_back, built = engine.call(ask_for_stored, where)
    assert back.report["storage_tokens"] == PAGE * num_pages(*(SYSTEM + c for c in CHUNKS))
    assert alike(back.report) == alike(warm.report)
    assert back.report["chunk_hits"] == len(CHUNKS)
    assert back.logprobs == warm.logprobs
    assert same(kv, kv_back)
    assert built == 0, "what is stored was built again"
    other, _, built = engine.call(ask_for_stored, f"not {where}")
    assert other.report["storage_tokens"] == 0, "another tenant found them"
    assert built == len(CHUNKS)


def _ask_of_a_failing_master(
    driver: Driver, salt: str, master: int, how: int
) -> tuple[Answer, float]:
    """Signal the master while a request waits for chunks; return the answer and its seconds."""
    fill(driver, salt)
    req = driver.submit(prompt_of(salt))
    deadline = time.monotonic() + 30.0
    while not driver.runtime.storage.num_coming:
        assert time.monotonic() < deadline, "nothing was asked for"
        driver.step()
    os.kill(master, how)
    begun = time.monotonic()
    driver.run_until(req.finished, limit=10**7)
    return driver.answer(req), time.monotonic() - begun


def _ask_until_used(driver: Driver, salt: str) -> Answer:
    deadline = time.monotonic() + USED_AGAIN_S
    while True:
        flush(driver)
        answer = ask(driver, salt)
        if answer.report["chunk_hits"] == len(CHUNKS) or time.monotonic() > deadline:
            return answer
        time.sleep(0.5)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_a_master_that_fails_holds_no_request_up_and_is_used_again(
    start_engine: StartEngine, store: Mooncake, how: signal.Signals
) -> None:
    engine = start_engine(**_settings(store))
    assert store.master is not None
    _, taken = engine.call(_ask_of_a_failing_master, how.name, store.master.pid, int(how))
    assert taken < 10.0
    if how is signal.SIGSTOP:
        store.master.send_signal(signal.SIGCONT)
    else:
        store.stop()
        store.start_master()
        store.start_owner()
    after = engine.call(_ask_until_used, how.name)
    assert after.report["storage_tokens"] > 0
    assert after.report["chunk_hits"] == len(CHUNKS)

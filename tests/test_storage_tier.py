"""Chunks that left device and host come back from storage, also in another process."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import ENGINE_ARGS, Answer, Driver, Engine, Prompt, random_tokens
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from stored_chunks import (
    CHUNKS,
    SYSTEM,
    alike,
    ask,
    ask_for_stored,
    fill,
    flush,
    num_built,
    num_pages,
    prompt_of,
    same,
)
from stored_files import NEEDS_NAMESPACES, PAGE, settings, slow_reads, store
from tiny_models import head_dim_for, make_model

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]


def _names(store: Path) -> set[str]:
    return {path.name for path in store.iterdir()}


@pytest.fixture(scope="module")
def another(model_folder: Path) -> Iterator[Engine]:
    """Return a server of the same model, which calls it by another path."""
    more = {"enable_blend": True, "blend_check_layer": 1, "blend_when": "always"}
    made = settings(max_total_tokens=1040, **more)
    path = make_model("llama", model_folder / "elsewhere", head_dim=head_dim_for(ENGINE_ARGS))
    engine = Engine(path, **made)
    yield engine
    engine.close()


@pytest.mark.parametrize("where", ["flushed", "another"])
def test_chunks_come_back(
    start_engine: StartEngine, request: pytest.FixtureRequest, where: str
) -> None:
    engine = start_engine(**settings())
    warm, kv, built = engine.call(fill, where)
    assert built == len(CHUNKS)
    if where == "another":
        engine = request.getfixturevalue("another")
    back, kv_back, built = engine.call(ask_for_stored, where)
    stored = PAGE * num_pages(*(SYSTEM + chunk for chunk in CHUNKS))
    assert back.report["storage_tokens"] == back.report["host_tokens"] == stored
    assert back.report["load_ms"] > 0
    assert alike(back.report) == alike(warm.report)
    assert back.report["chunk_hits"] == len(CHUNKS)
    assert back.logprobs == warm.logprobs
    assert same(kv, kv_back)
    assert built == 0, "what is stored was built again"


def _fill_and_ask_without_flat_pages(driver: Driver, salt: str) -> Answer:
    """Write and read pages where SGLang cannot make flat ones."""

    def fail(*args: object) -> None:
        raise AssertionError("a page was copied once more")

    pool = type(driver.scheduler.tree_cache.cache_controller.storage_host_pool)
    with (
        patch.object(pool, "get_dummy_flat_data_page", fail),
        patch.object(pool, "get_data_page", fail),
        patch.object(pool, "set_from_flat_data_page", fail),
    ):
        fill(driver, salt)
        return ask_for_stored(driver, salt)[0]


def test_pages_move_straight_between_host_memory_and_files(start_engine: StartEngine) -> None:
    back = start_engine(**settings()).call(_fill_and_ask_without_flat_pages, "straight")
    assert back.report["chunk_hits"] == len(CHUNKS)
    assert back.report["storage_tokens"] > 0


def _ask_twice_and_push_out_chunks(driver: Driver, salt: str) -> tuple[Answer, int]:
    """Ask for a prompt that is still there itself, while its chunks are in storage alone."""
    fill(driver, salt)
    with patch("sgl_blend.scheduler.builds.ChunkBuilder.enqueue", lambda self, keys: None):
        with patch("sgl_blend.scheduler.storage_tier.has_storage", lambda tree: False):
            ask(driver, salt)
        read = driver.runtime.storage.describe()["read_bytes"]
        again = ask(driver, salt)
    return again, driver.runtime.storage.describe()["read_bytes"] - read


def test_a_prompt_that_is_there_asks_storage_for_nothing(start_engine: StartEngine) -> None:
    again, read = start_engine(**settings()).call(_ask_twice_and_push_out_chunks, "there")
    assert again.report["fallback"] == "cached"
    assert again.report["load_ms"] == read == 0


def _ask_with_the_whole_prompt_on_the_device(driver: Driver, salt: str) -> tuple[Answer, int]:
    """Ask for chunks that are in storage alone, after the same prompt without marks."""
    fill(driver, salt)
    tokens = prompt_of(salt).tokens
    driver.ask(Prompt([tokens], salt=salt))
    read = driver.runtime.storage.describe()["read_bytes"]
    again = ask(driver, salt)
    driver.settle()
    return again, driver.runtime.storage.describe()["read_bytes"] - read


@pytest.mark.parametrize("when", ["always", "faster"])
def test_a_prompt_of_which_all_is_exact_here_waits_for_no_chunks(
    start_engine: StartEngine, when: str
) -> None:
    engine = start_engine(**settings(blend_when=when))
    again, read = engine.call(_ask_with_the_whole_prompt_on_the_device, f"exact {when}")
    assert again.report["fallback"] == "cached"
    assert again.report["load_ms"] == read == 0


def test_no_blended_prompt_is_stored(start_engine: StartEngine, store: Path) -> None:
    before = _names(store)
    start_engine(**settings()).call(fill, "blended prompts")
    stored = _names(store) - before
    assert len(stored) == num_pages(*(SYSTEM + chunk for chunk in CHUNKS))


def test_tenants_share_nothing_that_is_stored(start_engine: StartEngine, store: Path) -> None:
    engine = start_engine(**settings())
    before = _names(store)
    engine.call(fill, "a")
    of_a = _names(store) - before
    answer, _, built = engine.call(ask_for_stored, "b")
    assert answer.report["storage_tokens"] == 0
    assert built == len(CHUNKS)
    assert len(_names(store) - before) == 2 * len(of_a)


def _ask_with_a_history(driver: Driver, salt: str) -> tuple[Answer, Answer]:
    """Ask with the beginning of the prompt computed exactly before, on the device and in storage."""
    fill(driver, salt)
    driver.ask(Prompt([SYSTEM + CHUNKS[2] + CHUNKS[0]], salt=salt))
    warm = ask(driver, salt)
    flush(driver)
    return warm, ask(driver, salt)


def test_an_exact_prefix_comes_back(start_engine: StartEngine) -> None:
    warm, back = start_engine(**settings()).call(_ask_with_a_history, "history")
    assert warm.report["prefix_tokens"] == len(SYSTEM + CHUNKS[2] + CHUNKS[0]) // PAGE * PAGE
    assert alike(back.report) == alike(warm.report)
    assert back.report["storage_tokens"] >= back.report["prefix_tokens"]


def _ask_plainly(driver: Driver, salt: str) -> tuple[list[int], int]:
    """Ask for a short prompt that is stored, before and after a blended one; return what was read."""
    plain = Prompt([random_tokens(77, 200)], salt=salt)
    driver.ask(plain)
    read = []
    for again in (False, True):
        if again:
            fill(driver, salt)
        flush(driver)
        before = driver.runtime.storage.describe()["read_bytes"]
        driver.ask(plain)
        driver.settle()
        read.append(driver.runtime.storage.describe()["read_bytes"] - before)
    return read, driver.scheduler.tree_cache.prefetch_threshold


def test_a_short_plain_prompt_asks_storage_for_nothing_as_on_stock(
    start_engine: StartEngine,
) -> None:
    read, limit = start_engine(**settings()).call(_ask_plainly, "plain")
    assert limit == PAGE, "no chunk was asked for"
    assert read == [0, 0]


def _ask_of_a_slow_store(driver: Driver, salt: str) -> tuple[Answer, float, int, Answer]:
    fill(driver, salt)
    built = num_built(driver)
    with slow_reads(0.5):
        begun = time.monotonic()
        req = driver.submit(prompt_of(salt))
        driver.run_until(req.finished, limit=10**6)
        late, taken = driver.answer(req), time.monotonic() - begun
        driver.settle()
    return late, taken, num_built(driver) - built, ask(driver, salt, (1, 2, 0))


def test_nobody_waits_for_a_slow_store(start_engine: StartEngine) -> None:
    late, taken, built, after = start_engine(**settings()).call(_ask_of_a_slow_store, "slow")
    assert late.report["chunk_hits"] == 0
    assert taken < 5.0  # all pages would take longer than eight seconds
    assert built == 0, "what was on its way was built"
    assert after.report["chunk_hits"] == len(CHUNKS)


def _interrupt(driver: Driver, salt: str) -> Answer:
    """Do something while a request waits for storage, and ask again."""
    fill(driver, salt)
    with slow_reads(0.02):
        req = driver.submit(prompt_of(salt))
        while not driver.scheduler.tree_cache.cache_controller.prefetch_tokens_occupied:
            driver.step()
        assert driver.runtime.storage.num_coming > 0
        if salt == "new weights":
            driver.runtime.weights_changed()
            driver.run_until(req.finished)
            assert req.sgl_blend.report.storage_tokens == 0
            answer: Answer = driver.answer(req)
        else:
            driver.scheduler.abort_request(AbortReq(rid=req.rid))
            if salt == "flush":
                driver.runtime.storage.leave()
                assert driver.scheduler.flush_cache(), "what nobody waits for keeps the server busy"
            driver.settle()
            answer = ask(driver, salt)
    assert driver.runtime.storage.num_coming == 0
    flush(driver)
    return answer


def _order_beside_a_decoding_request(driver: Driver, salt: str) -> float:
    """Let a request decode while writes hang, and return how long an order holds it up."""
    flush(driver)
    with patch.object(HiCacheFile, "exists", lambda *args: time.sleep(0.2)):
        req = driver.submit(Prompt([random_tokens(7, 200)], salt=salt, max_new_tokens=400))
        tree = driver.scheduler.tree_cache
        driver.run_until(lambda: bool(tree.ongoing_backup), limit=10**6)
        assert not req.finished()
        begun = time.monotonic()
        driver.runtime.storage.leave()
        taken = time.monotonic() - begun
    driver.run_until(req.finished)
    driver.settle()
    return taken


def test_an_order_waits_for_no_writes_while_somebody_is_served(start_engine: StartEngine) -> None:
    assert start_engine(**settings()).call(_order_beside_a_decoding_request, "decodes") < 0.1


@pytest.mark.parametrize(
    ("how", "hits"), [("abort", len(CHUNKS)), ("flush", len(CHUNKS)), ("new weights", 0)]
)
def test_what_is_on_its_way_can_be_given_up(start_engine: StartEngine, how: str, hits: int) -> None:
    assert start_engine(**settings()).call(_interrupt, how).report["chunk_hits"] == hits


@pytest.mark.slow
def test_build_mode_answers_alike(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(blend_on_miss="build"))
    warm, kv, _ = engine.call(fill, "build")
    back, kv_back, built = engine.call(ask_for_stored, "build")
    assert back.report["storage_tokens"] > 0
    assert alike(back.report) == alike(warm.report)
    assert back.logprobs == warm.logprobs
    assert same(kv, kv_back)
    assert built == 0, "what is stored was built again"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda data: data[:-40] + bytes([data[-40] ^ 4]) + data[-39:],
    "the end": lambda data: data[:-7],
    "all": lambda data: b"",
    "a length": lambda data: data[:8] + b"\xff" * 8 + data[16:],
}


def _ask_with_damage(driver: Driver, salt: str, store: Path) -> tuple[Answer, Answer, Answer, int]:
    """Ask a store in which every object of a tenant was damaged, and ask again when it has healed."""
    before = _names(store)
    fill(driver, salt)
    for name in _names(store) - before:
        path = store / name
        path.write_bytes(DAMAGE[salt](path.read_bytes()))
    flush(driver)
    plain = ask(driver, f"{salt}: never asked before")
    faults = driver.runtime.storage.describe()["faults"].get("corrupt", 0)
    hurt = ask(driver, salt)
    faults = driver.runtime.storage.describe()["faults"]["corrupt"] - faults
    for _ in range(2):  # a chunk is read when its build prefix has healed
        flush(driver)
        ask(driver, salt)
    flush(driver)
    return plain, hurt, ask(driver, salt), faults


@pytest.mark.parametrize(
    "damage",
    ["a bit", *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE if name != "a bit")],
)
def test_damaged_pages_are_missing_and_heal(
    start_engine: StartEngine, store: Path, damage: str
) -> None:
    engine = start_engine(**settings())
    plain, hurt, healed, faults = engine.call(_ask_with_damage, damage, store)
    assert faults > 0
    assert hurt.report["chunk_hits"] == 0
    assert hurt.logprobs == plain.logprobs
    assert healed.report["chunk_hits"] == len(CHUNKS)


def _ask_without_store(driver: Driver, salt: str) -> tuple[Answer, Answer, dict[str, int]]:
    """Ask while every call of the store fails, and again when it answers."""
    fill(driver, salt)
    with patch.object(HiCacheFile, "exists", side_effect=OSError("gone")):
        begun = time.monotonic()
        down = ask(driver, salt)
        assert time.monotonic() - begun < 5.0
        faults = driver.runtime.storage.describe()["faults"]
    deadline = time.monotonic() + 60.0
    while True:  # it is left alone for a second, or longer if it failed again
        flush(driver)
        after = ask(driver, salt)
        if after.report["chunk_hits"] or time.monotonic() > deadline:
            return down, after, faults
        time.sleep(0.5)


def test_a_store_that_is_gone_is_missed_and_used_again(start_engine: StartEngine) -> None:
    down, after, faults = start_engine(**settings()).call(_ask_without_store, "gone")
    assert faults["error"] > 0
    assert down.report["chunk_hits"] == 0
    assert after.report["chunk_hits"] == len(CHUNKS)

"""LoRA: background work takes no adapter's place, and nothing is done for an adapter that is gone."""

import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from finding_prompts import unmarked
from harness import Driver, Prompt, largest_difference, rag_prompt, random_tokens
from law_prompts import CHUNKS, QUESTION, SYSTEM, full_prefill
from sparse_path import TOLERANCE
from test_adapters import _reload, adapters, ids_of, make_adapter, start

__all__ = ["adapters", "model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

PATIENCE_S = 20.0


def _decoding(seed: int, adapter: str | None, count: int) -> Prompt:
    return Prompt([random_tokens(seed, 20)], adapter=adapter, max_new_tokens=count, logprobs=False)


def _key(driver: Driver, adapter: str | None, chunk: list[int]) -> Any:
    from sgl_blend.radix_ext.chunk_store import ChunkKey

    prefix, tokens = (array("q", ids).tobytes() for ids in (SYSTEM, chunk))
    return ChunkKey(driver.chunk_salt(), adapter, prefix, tokens)


def _builds_beside_others(driver: Driver) -> tuple[int, int]:
    """Let two adapters decode that fill a batch; return what is built and pending of base and third."""
    ids = ids_of(driver)
    driver.settle()
    driver.flush()
    before = driver.runtime.builder.num_built
    users = [None, ids["one"]]
    running = [driver.submit(_decoding(seed, user, 2000)) for seed, user in enumerate(users)]
    for _ in range(3):
        driver.step()
    builder = driver.runtime.builder
    builder.enqueue([_key(driver, None, CHUNKS[0]), _key(driver, None, CHUNKS[1])])
    builder.enqueue([_key(driver, ids["two"], CHUNKS[2])])  # what was missed last stands first
    until_s = time.monotonic() + PATIENCE_S
    while builder.num_built - before < 2 and time.monotonic() < until_s:
        driver.step()
        time.sleep(0.002)
    assert not any(req.finished() for req in running)
    found = builder.num_built - before, builder.num_pending
    for req in running:
        req.to_finish = _abort_reason()
    driver.run_until(lambda: all(req.finished() for req in running))
    driver.settle()
    assert builder.num_pending == 0, "what did not fit is never built"
    return found


def _abort_reason() -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT()


def test_a_build_whose_adapter_does_not_fit_holds_up_no_other(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    engine = start(start_engine, adapters, blend_on_miss="compute", max_loras_per_batch=2)
    assert engine.call(_builds_beside_others) == (2, 1)


def _rounds_until_admitted(driver: Driver) -> int:
    """Ask for an adapter four times while a build of another has no room; count the rounds."""
    ids = ids_of(driver)
    driver.settle()
    driver.flush()
    decoding = driver.submit(Prompt([random_tokens(500, 500)], max_new_tokens=390, logprobs=False))
    driver.step()
    driver.step()
    driver.runtime.builder.enqueue([_key(driver, ids["one"], random_tokens(501, 300))])
    driver.runtime.builder._budget.affords_step = lambda: True
    for _ in range(40):
        driver.step()
        time.sleep(0.01)
    assert driver.runtime.builder.num_pending == 1, "the build fits"
    rounds = 0
    for seed in range(502, 506):
        small = driver.submit(_decoding(seed, ids["two"], 1))
        while not small.output_ids:
            driver.step()
            rounds += 1
        time.sleep(0.1)  # until first tokens are out
    assert not decoding.finished()
    driver.run_until(decoding.finished)
    driver.settle()
    return rounds


def test_a_build_takes_no_place_of_an_adapter_that_a_client_asks_for(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    engine = start(
        start_engine,
        adapters,
        blend_on_miss="compute",
        max_loras_per_batch=2,
        max_total_tokens=960,
    )
    assert engine.call(_rounds_until_admitted) == 4


def _waiting_s(driver: Driver) -> float:
    from sgl_blend.scheduler.internal_requests import new_internal_request

    req = new_internal_request(driver.scheduler, "x", array("q", [1, 2]), salt=None, extra_key=None)
    waiting: float = time.monotonic() - req.time_stats.wait_queue_entry_time
    return waiting


def test_a_request_of_ours_has_not_waited_since_the_machine_booted(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    # SGLang's drainer of adapters would make room for it at once.
    engine = start(start_engine, adapters, blend_on_miss="compute", max_loras_per_batch=2)
    assert 0 <= engine.call(_waiting_s) < 1


def _unload_with_shadows(driver: Driver, path: str) -> dict[str, Any]:
    """Unload an adapter while the canary has shadows of it; return what the canary says."""
    old = ids_of(driver)["one"]
    prompts = [
        rag_prompt(SYSTEM, [CHUNKS[i] for i in order], QUESTION, adapter=old)
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 2))
    ]
    driver.ask(prompts[0])
    driver.settle()
    reqs = [driver.submit(prompt) for prompt in prompts[1:]]
    while not all(req.finished() for req in reqs):
        driver.step()
    waiting = driver.runtime.describe()["canary"]["pending"]
    assert waiting > 0, "no shadow was left for the time after"
    before = driver.runtime.describe()["canary"]["compared"]
    _reload(driver, "one", path)
    driver.settle()
    after = driver.runtime.describe()["canary"]
    assert after["compared"] == before
    return {**after, "waiting": waiting}


def test_nothing_is_compared_with_the_base_model_when_an_adapter_is_gone(
    start_engine: StartEngine, adapters: list[str], model_folder: Path
) -> None:
    engine = start(
        start_engine,
        adapters,
        blend_on_miss="compute",
        blend_recompute_ratio=0.95,
        blend_canary_rate=1.0,
        max_loaded_loras=8,
    )
    other = make_adapter(model_folder / "adapter-fourth", 12)

    found = engine.call(_unload_with_shadows, str(other))

    assert not found["tripped"]
    assert found["pending"] == 0
    assert found["skipped"] >= found["waiting"]


def _build_of_one_that_is_gone(driver: Driver, path: str) -> tuple[int, int]:
    """Unload an adapter while a build of it waits; return what is built and what still waits."""
    old = ids_of(driver)["one"]
    driver.ask(_decoding(1, old, 1))
    driver.settle()
    builder = driver.runtime.builder
    builder.enqueue([_key(driver, old, CHUNKS[4])])
    before = builder.num_built
    _reload(driver, "one", path)
    driver.settle()
    return builder.num_built - before, builder.num_pending


def test_nothing_is_built_for_an_adapter_that_is_gone(
    start_engine: StartEngine, adapters: list[str], model_folder: Path
) -> None:
    engine = start(start_engine, adapters, blend_on_miss="compute", max_loaded_loras=8)
    other = make_adapter(model_folder / "adapter-fifth", 13)
    assert engine.call(_build_of_one_that_is_gone, str(other)) == (0, 0)


def test_the_class_of_an_adapter_that_is_gone_is_no_way_to_its_kv(
    start_engine: StartEngine, adapters: list[str], model_folder: Path
) -> None:
    engine = start(start_engine, adapters, blend_on_miss="compute", max_loaded_loras=8)
    old = engine.call(ids_of)["one"]
    engine.flush()
    chunks = [CHUNKS[i] for i in (0, 2, 3)]
    engine.ask(rag_prompt(SYSTEM, chunks, QUESTION, adapter=old))
    engine.settle()
    other = make_adapter(model_folder / "adapter-third", 11)
    assert engine.call(_reload, "one", str(other))[1] != old

    pretender = rag_prompt(SYSTEM, chunks, QUESTION, extra_key=old)
    answer = engine.ask(pretender)[0]

    assert answer.report["fallback"] == "malformed"
    assert answer.report["prefix_tokens"] == 0
    want = full_prefill(engine, rag_prompt(SYSTEM, chunks, QUESTION))
    assert largest_difference(answer.logprobs[0], want.logprobs[0]) <= TOLERANCE


def _learned(driver: Driver, adapter: str | None, other: str | None) -> list[dict[str, Any]]:
    """Let text be learned with one adapter; return reports of it, and of a prompt of another."""
    driver.settle()
    driver.flush()
    reports = []
    for seed, user in ((1, adapter), (2, adapter), (3, adapter), (4, other), (5, None)):
        prompt = unmarked(0, 1, 2, seed=seed, adapter=user, params={"sgl_blend_ratio": 1.0})
        answer = driver.ask(prompt)[0]
        driver.settle()
        reports.append(answer.report)
        plain = {"sgl_blend": False}
        full = driver.ask(Prompt([prompt.tokens], adapter=user, params=plain, salt="full"))[0]
        assert largest_difference(answer.logprobs[0], full.logprobs[0]) <= 2 * TOLERANCE
    return reports


def test_what_was_learned_with_one_adapter_is_not_found_with_another(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    engine = start(
        start_engine,
        adapters,
        blend_on_miss="compute",
        blend_find="learned",
        blend_learn_share=1.0,
        chunked_prefill_size=2048,
    )
    ids = engine.call(ids_of)

    reports = engine.call(_learned, ids["one"], ids["two"])

    assert [report["found_tokens"] > 0 for report in reports] == [False, False, True, False, False]

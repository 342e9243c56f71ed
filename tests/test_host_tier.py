"""Chunks that were evicted to host memory come back, the same bytes, beside the forward."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, rag_prompt, random_tokens
from pushed_out import (
    CHUNKS,
    POOL,
    QUESTION,
    SYSTEM,
    Warm,
    ask_warm,
    other_order,
    push_out,
    settings,
    slow_loads,
    slow_moves,
    store_chunks,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_blend.engine.admission import stop_verdict
from sgl_blend.engine.tiers import finish_loads
from sgl_blend.radix_ext.chunk_store import ChunkStore

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])

A_POLICY_OF_EACH_KIND = ("funnel", "hkvd", "gradual", "remembered", "first-k", "query-aware")
FOR_EVALUATION = ("oracle", "exact-hkvd")


@OVERLAP
def test_evicted_chunks_come_back(start_engine: StartEngine, overlap: bool) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    warm = engine.call(ask_warm, "device")
    back = engine.call(ask_warm, "host")

    assert (warm.answer.report["chunk_hits"], warm.answer.report["host_tokens"]) == (3, 0)
    assert back.answer.report == {**warm.answer.report, "host_tokens": 200}
    assert back.answer.logprobs == warm.answer.logprobs
    for layer, layer_back in zip(warm.kv, back.kv, strict=True):
        assert all(x.equal(y) for x, y in zip(layer, layer_back, strict=True))


WAYS = [
    ("layer_first", "direct", "write_back", 1),
    ("page_first", "kernel", "write_through", 16),
    ("page_first_direct", "direct", "write_back", 16),
]
"""Layout of host memory, how it is moved, when it is written, and tokens of a page."""


def _fragment(driver: Driver) -> None:
    """Leave free slots in small pieces."""
    driver.settle()
    driver.flush()
    for number in range(16):
        prompt = random_tokens(900 + number, 20 + 7 * number % 50)
        driver.ask(rag_prompt(prompt, [], QUESTION, params={"sgl_blend": False}))
        driver.settle()
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=POOL // 2))
    driver.settle()


def _answer_among_pieces(driver: Driver, where: str) -> Answer:
    _fragment(driver)
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))
    driver.settle()
    if where == "host":
        capacity = driver.runtime.describe()["pool"]["capacity"]
        driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
        driver.settle()
    (answer,) = driver.ask(other_order())
    driver.settle()
    return answer


@pytest.mark.parametrize(("layout", "io", "policy", "page"), WAYS, ids=lambda value: str(value))
def test_however_they_are_kept_chunks_come_back_to_any_slots(
    start_engine: StartEngine, layout: str, io: str, policy: str, page: int
) -> None:
    engine = start_engine(
        **settings(
            hicache_mem_layout=layout,
            hicache_io_backend=io,
            hicache_write_policy=policy,
            page_size=page,
            chunked_prefill_size=64,
        )
    )
    warm = engine.call(_answer_among_pieces, "device")
    back = engine.call(_answer_among_pieces, "host")

    assert (warm.report["chunk_hits"], warm.report["host_tokens"]) == (3, 0)
    assert back.report["host_tokens"] > 0
    assert back.report == {**warm.report, "host_tokens": back.report["host_tokens"]}
    assert back.logprobs == warm.logprobs


def _ask_with_each_policy(
    driver: Driver, where: str, policies: tuple[str, ...] = A_POLICY_OF_EACH_KIND
) -> dict[str, list[float]]:
    found = {}
    for name in policies:
        params = {"sgl_blend_policy": name}
        answer = ask_warm(driver, where, 0.005 if where == "host" else 0.0, params=params).answer
        assert answer.report["host_tokens"] == (200 if where == "host" else 0), name
        found[name] = answer.logprobs[0]
    return found


def test_a_forward_waits_for_each_layer(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    assert engine.call(_ask_with_each_policy, "host") == engine.call(
        _ask_with_each_policy, "device"
    )


@pytest.mark.slow
def test_a_prefill_before_the_forward_waits_for_all_layers(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(blend_eval=True))
    answers = [
        engine.call(_ask_with_each_policy, where, FOR_EVALUATION) for where in ("host", "device")
    ]
    assert answers[0] == answers[1]


def _ask_without_waiting(driver: Driver) -> Warm:
    with patch("sgl_blend.engine.tiers.LayerLoads.wait", lambda loads, layer: None):
        return ask_warm(driver, "host", 0.02)


def test_an_answer_shows_that_nobody_waited(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    warm, hasty = engine.call(ask_warm, "device"), engine.call(_ask_without_waiting)
    assert hasty.answer.report["host_tokens"] == 200
    assert largest_difference(hasty.answer.logprobs[0], warm.answer.logprobs[0]) > 1e-3


def _ask_in_pieces(driver: Driver, where: str) -> list[Answer]:
    """Ask twice at once, cut into steps; the second finds on the device what the first brings back."""
    store_chunks(driver)
    if where == "host":
        push_out(driver)
    orders = ([2, 0, 1], [1, 2, 0])
    with slow_loads(0.02 if where == "host" else 0.0):
        return driver.ask(*(rag_prompt(SYSTEM, [CHUNKS[i] for i in o], QUESTION) for o in orders))


@OVERLAP
def test_later_steps_and_others_wait_too(start_engine: StartEngine, overlap: bool) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap, chunked_prefill_size=64))
    warm = engine.call(_ask_in_pieces, "device")
    back = engine.call(_ask_in_pieces, "host")
    assert [answer.report["host_tokens"] for answer in back] == [200, 0]
    assert [answer.logprobs for answer in back] == [answer.logprobs for answer in warm]


def _ask_for_what_has_no_room(driver: Driver) -> tuple[Answer, int]:
    """Ask for chunks beside a prompt that leaves no room for them."""
    store_chunks(driver)
    push_out(driver)
    long = driver.submit(Prompt([random_tokens(500, POOL - 420)], max_new_tokens=60))
    driver.step()
    (answer,) = driver.ask(other_order())
    pending = driver.runtime.builder.num_pending
    driver.run_until(long.finished)
    driver.settle()
    return answer, pending


def test_chunks_without_room_stay_on_the_host(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    answer, pending = engine.call(_ask_for_what_has_no_room)
    assert answer.report["host_tokens"] < 200
    assert answer.report["chunk_misses"] == 0
    assert pending == 0, "what lies on the host is built again"


def _ask_again(driver: Driver) -> Answer:
    """Ask twice for the same prompt, which is evicted between."""
    store_chunks(driver)
    driver.ask(other_order())
    driver.settle()
    push_out(driver)
    (answer,) = driver.ask(other_order())
    driver.settle()
    return answer


def test_a_prompt_that_is_on_the_host_itself_needs_no_chunk(start_engine: StartEngine) -> None:
    report = start_engine(**settings()).call(_ask_again).report
    assert report["prefix_tokens"] == report["prompt_tokens"] - 1
    assert report["host_tokens"] == 0


def _ask_late(driver: Driver, how: str) -> Answer:
    """Queue loads for a request that no batch takes along, which then waits or is aborted."""
    store_chunks(driver)
    push_out(driver)
    with (
        patch("sgl_blend.scheduler.attempt.AdmissionAttempt.run", lambda self: stop_verdict()),
        patch("sgl_blend.scheduler.hooks.finish_loads", lambda tree: None),
    ):
        req = driver.submit(other_order())
        driver.step()
    queue = driver.scheduler.tree_cache.cache_controller.load_queue
    assert queue, "nothing is on its way"
    if how == "abort":
        driver.scheduler.waiting_queue.remove(req)
        driver.step()
        assert not queue, "nobody brings it back"
        driver.settle()
        (answer,) = driver.ask(other_order())
    else:
        driver.run_until(req.finished)
        answer = driver.answer(req)
    driver.settle()
    return answer


@pytest.mark.parametrize(("how", "tokens"), [("abort", 0), ("wait", 200)])
def test_loads_that_no_batch_takes_along_end(
    start_engine: StartEngine, how: str, tokens: int
) -> None:
    engine = start_engine(**settings())
    answer, warm = engine.call(_ask_late, how), engine.call(ask_warm, "device").answer
    assert answer.logprobs == warm.logprobs
    assert answer.report == {**warm.report, "host_tokens": tokens}


def _ask_when_pushed_out(driver: Driver, *, and_back: bool) -> Answer:
    """Look a request up while its chunks are on the device, and admit it when they are not.

    Or when they are there again, in other slots.
    """
    store_chunks(driver)
    with patch("sgl_blend.scheduler.attempt.AdmissionAttempt.run", lambda self: stop_verdict()):
        req = driver.submit(other_order())
        driver.step()
    push_out(driver)
    tree, keys = driver.scheduler.tree_cache, req.sgl_blend.keys
    if and_back:
        driver.scheduler.waiting_queue.remove(req)
        driver.ask(Prompt([random_tokens(700, 300)], logprobs=False))
        store = ChunkStore(tree, 1)
        for key in keys:
            found = store.find_on_host(key)
            assert found is not None
            assert store.load(found)
        finish_loads(tree)
        driver.scheduler.waiting_queue.append(req)
    driver.run_until(req.finished)
    answer = driver.answer(req)
    driver.settle()
    return answer


@pytest.mark.parametrize(("and_back", "tokens"), [(False, 200), (True, 0)])
def test_what_was_looked_up_may_be_pushed_out(
    start_engine: StartEngine, and_back: bool, tokens: int
) -> None:
    engine = start_engine(**settings())
    answer = engine.call(partial(_ask_when_pushed_out, and_back=and_back))
    warm = engine.call(ask_warm, "device").answer
    assert answer.logprobs == warm.logprobs
    assert answer.report == {**warm.report, "host_tokens": tokens}


def _ask_in_build_mode(driver: Driver, where: str) -> tuple[Warm, int]:
    warm = ask_warm(driver, where)
    steps = driver.runtime.describe()["build_steps"]
    return warm, steps


def test_nothing_is_built_twice_in_build_mode(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(blend_on_miss="build"))
    warm, built = engine.call(_ask_in_build_mode, "device")
    back, built_twice = engine.call(_ask_in_build_mode, "host")
    assert built_twice == 2 * built, "chunks that lie on the host were built again"
    assert back.answer.logprobs == warm.answer.logprobs
    assert back.answer.report == {**warm.answer.report, "host_tokens": 200}


def _tokens_on_host(driver: Driver) -> tuple[int, int]:
    """Return how many tokens are in host memory after chunks were built and probed, and the probes."""
    before = driver.runtime.describe()["probes_run"]
    store_chunks(driver)
    host = driver.scheduler.tree_cache.cache_controller.mem_pool_host
    used = host.size - host.available_size()
    return used, driver.runtime.describe()["probes_run"] - before


def test_probes_stay_off_the_host(start_engine: StartEngine) -> None:
    used, probes = start_engine(**settings()).call(_tokens_on_host)
    assert probes > 0
    chunks = sum(map(len, (SYSTEM, *CHUNKS)))
    assert used <= chunks + chunks + len(QUESTION) + 1  # the chunks, and the prompt itself


def _ask_for_room_in_build_mode(driver: Driver) -> tuple[Answer, int]:
    """Ask for chunks while a prompt that still decodes leaves no room for them."""
    store_chunks(driver)
    push_out(driver)
    steps = driver.runtime.describe()["build_steps"]
    long = driver.submit(Prompt([random_tokens(500, POOL - 310)], max_new_tokens=60))
    driver.step()
    (answer,) = driver.ask(other_order())
    assert long.finished(), "there was room"
    driver.settle()
    return answer, driver.runtime.describe()["build_steps"] - steps


def test_an_answer_waits_for_room_in_build_mode(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(blend_on_miss="build"))
    answer, steps = engine.call(_ask_for_room_in_build_mode)
    warm = engine.call(ask_warm, "device").answer
    assert answer.logprobs == warm.logprobs
    assert answer.report == {**warm.report, "host_tokens": 200}
    assert steps == 0, "what lies on the host was built again"


def _ask_beside_a_backup(driver: Driver) -> Answer:
    """Ask for chunks while the copy of a long prompt to the host locks most of the pool."""
    store_chunks(driver)
    with slow_moves("backup_from_device_all_layer", 0.3):
        driver.ask(Prompt([random_tokens(600, POOL - 300)], logprobs=False))
        req = driver.submit(other_order())
        driver.run_until(req.finished, limit=10**6)  # an idle step takes next to no time
        answer = driver.answer(req)
    driver.settle()
    return answer


def test_chunks_wait_for_memory_that_a_backup_locks(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    answer, warm = engine.call(_ask_beside_a_backup), engine.call(ask_warm, "device").answer
    assert answer.report["fallback"] is None
    assert answer.logprobs == warm.logprobs


def _ask_as_another_tenant(driver: Driver) -> list[dict[str, Any]]:
    """Ask for one tenant's chunks, which are on the host, as another one and as itself."""
    store_chunks(driver, salt="a")
    push_out(driver)
    return [driver.ask(other_order(salt=salt))[0].report for salt in ("b", None, "a")]


def test_nothing_comes_back_for_another_tenant(start_engine: StartEngine) -> None:
    *others, own = start_engine(**settings()).call(_ask_as_another_tenant)
    assert [(r["host_tokens"], r["chunk_hits"], r["prefix_tokens"]) for r in others] == [
        (0, 0, 0)
    ] * 2
    assert own["host_tokens"] == 200


def _order_beside_a_backup(driver: Driver) -> bool:
    """Tell whether the server is idle for an operator while what builds stored is being copied."""
    driver.settle()
    driver.flush()
    with slow_moves("backup_from_device_all_layer", 0.2):
        driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))
        for _ in range(200):
            driver.step()
            if driver.runtime.describe()["build_steps"] and not driver.runtime.builder.is_running:
                break
        assert not driver.scheduler.is_fully_idle(), "no copy is in flight"
        driver.runtime.step_aside(driver.scheduler)
        idle: bool = driver.scheduler.is_fully_idle()
    driver.settle()
    return idle


@OVERLAP
def test_an_order_finds_no_copy_in_flight(start_engine: StartEngine, overlap: bool) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    assert engine.call(_order_beside_a_backup)

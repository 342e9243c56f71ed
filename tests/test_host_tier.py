"""Chunks that were evicted to host memory come back, the same bytes, beside the forward."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch_cpu_hicache
import torch_cpu_streams
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, rag_prompt, random_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_blend.engine.admission import stop_verdict
from sgl_blend.engine.tiers import finish_loads
from sgl_blend.radix_ext.chunk_store import ChunkStore

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 20)
CHUNKS = [random_tokens(10 + i, 60) for i in range(3)]
QUESTION = random_tokens(99, 12)
POOL = 1000
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])

A_POLICY_OF_EACH_KIND = ("funnel", "hkvd", "gradual", "remembered", "first-k", "query-aware")
FOR_EVALUATION = ("oracle", "exact-hkvd")


@dataclass
class Warm:
    """An answer that reused all chunks, and KV of one of them afterwards, by layer."""

    answer: Answer
    kv: list[Any]


def settings(**more: Any) -> dict[str, Any]:
    return {
        "max_total_tokens": POOL,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "blend_min_chunk_tokens": 32,
        **more,
    }


def _push_out(driver: Driver) -> None:
    """Let the device hold nothing any more."""
    capacity = driver.runtime.describe()["pool"]["capacity"]
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
    assert driver.runtime.describe()["pool"]["free"] == capacity


@contextmanager
def _slow(move: str, seconds: float) -> Iterator[None]:
    """Let each call of a host pool's function take so long."""
    moves = torch_cpu_hicache._TorchMoves
    stock = getattr(moves, move)

    def slow(*args: Any, **more: Any) -> None:
        torch_cpu_streams.current_stream().submit(lambda: time.sleep(seconds))
        stock(*args, **more)

    with patch.object(moves, move, slow):
        yield


def _slow_loads(layer_s: float) -> AbstractContextManager[None]:
    """Let each layer take so long to come back."""
    return _slow("load_to_device_per_layer", layer_s)


def _store(driver: Driver, **rest: Any) -> None:
    """Have all chunks built, and nothing else."""
    driver.settle()
    driver.flush()
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, **rest))
    driver.settle()


def _other_order(**rest: Any) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in (2, 0, 1)], QUESTION, **rest)


def _ask_warm(driver: Driver, where: str, layer_s: float = 0.0, **rest: Any) -> Warm:
    """Ask for chunks that were built, on the device or in host memory."""
    _store(driver, **rest)
    if where == "host":
        _push_out(driver)
    with _slow_loads(layer_s):
        (answer,) = driver.ask(_other_order(**rest))
    driver.settle()
    return Warm(answer, driver.kv(SYSTEM + CHUNKS[1], driver.chunk_salt()))


@OVERLAP
def test_evicted_chunks_come_back(start_engine: StartEngine, overlap: bool) -> None:
    engine = start_engine(**settings(disable_overlap_schedule=not overlap))
    warm = engine.call(_ask_warm, "device")
    back = engine.call(_ask_warm, "host")

    assert (warm.answer.report["chunk_hits"], warm.answer.report["host_tokens"]) == (3, 0)
    assert back.answer.report == {**warm.answer.report, "host_tokens": 200}
    assert back.answer.logprobs == warm.answer.logprobs
    for layer, layer_back in zip(warm.kv, back.kv, strict=True):
        assert all(x.equal(y) for x, y in zip(layer, layer_back, strict=True))


def _ask_with_each_policy(
    driver: Driver, where: str, policies: tuple[str, ...] = A_POLICY_OF_EACH_KIND
) -> dict[str, list[float]]:
    found = {}
    for name in policies:
        params = {"sgl_blend_policy": name}
        answer = _ask_warm(driver, where, 0.005 if where == "host" else 0.0, params=params).answer
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
        return _ask_warm(driver, "host", 0.02)


def test_an_answer_shows_that_nobody_waited(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    warm, hasty = engine.call(_ask_warm, "device"), engine.call(_ask_without_waiting)
    assert hasty.answer.report["host_tokens"] == 200
    assert largest_difference(hasty.answer.logprobs[0], warm.answer.logprobs[0]) > 1e-3


@contextmanager
def _slow_layers(driver: Driver, seconds: float) -> Iterator[None]:
    """Let each layer take so long to compute."""
    layers = driver.scheduler.tp_worker.model_runner.model.model.layers
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *args: time.sleep(seconds)) for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seconds(driver: Driver, where: str, load_s: float, compute_s: float) -> float:
    """Return how long a prefill takes whose layers take so long to come back and to compute."""
    _store(driver)
    if where == "host":
        _push_out(driver)
    with _slow_loads(load_s), _slow_layers(driver, compute_s):
        begun = time.monotonic()
        (answer,) = driver.ask(_other_order(max_new_tokens=1))
        taken = time.monotonic() - begun
    assert answer.report["host_tokens"] == (200 if where == "host" else 0)
    driver.settle()
    return taken


@pytest.mark.parametrize(("load_s", "compute_s"), [(0.12, 0.06), (0.1, 0.1), (0.06, 0.12)])
def test_a_load_hides_behind_the_layers(
    start_engine: StartEngine, load_s: float, compute_s: float
) -> None:
    engine = start_engine(**settings())
    layers = 4
    compute = engine.call(_seconds, "device", 0.0, compute_s)
    taken = engine.call(_seconds, "host", load_s, compute_s)
    assert compute > layers * compute_s
    bar = 1.15 * max(layers * load_s, compute) + load_s
    assert bar < layers * load_s + compute, "one after the other would pass too"
    assert taken <= bar


def _ask_in_pieces(driver: Driver, where: str) -> list[Answer]:
    """Ask twice at once, cut into steps; the second finds on the device what the first brings back."""
    _store(driver)
    if where == "host":
        _push_out(driver)
    orders = ([2, 0, 1], [1, 2, 0])
    with _slow_loads(0.02 if where == "host" else 0.0):
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
    _store(driver)
    _push_out(driver)
    long = driver.submit(Prompt([random_tokens(500, POOL - 420)], max_new_tokens=60))
    driver.step()
    (answer,) = driver.ask(_other_order())
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
    _store(driver)
    driver.ask(_other_order())
    driver.settle()
    _push_out(driver)
    (answer,) = driver.ask(_other_order())
    driver.settle()
    return answer


def test_a_prompt_that_is_on_the_host_itself_needs_no_chunk(start_engine: StartEngine) -> None:
    report = start_engine(**settings()).call(_ask_again).report
    assert report["prefix_tokens"] == report["prompt_tokens"] - 1
    assert report["host_tokens"] == 0


def _ask_late(driver: Driver, how: str) -> Answer:
    """Queue loads for a request that no batch takes along, which then waits or is aborted."""
    _store(driver)
    _push_out(driver)
    with (
        patch("sgl_blend.scheduler.attempt.AdmissionAttempt.run", lambda self: stop_verdict()),
        patch("sgl_blend.scheduler.hooks.finish_loads", lambda tree: None),
    ):
        req = driver.submit(_other_order())
        driver.step()
    queue = driver.scheduler.tree_cache.cache_controller.load_queue
    assert queue, "nothing is on its way"
    if how == "abort":
        driver.scheduler.waiting_queue.remove(req)
        driver.step()
        assert not queue, "nobody brings it back"
        driver.settle()
        (answer,) = driver.ask(_other_order())
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
    answer, warm = engine.call(_ask_late, how), engine.call(_ask_warm, "device").answer
    assert answer.logprobs == warm.logprobs
    assert answer.report == {**warm.report, "host_tokens": tokens}


def _ask_when_pushed_out(driver: Driver, *, and_back: bool) -> Answer:
    """Look a request up while its chunks are on the device, and admit it when they are not.

    Or when they are there again, in other slots.
    """
    _store(driver)
    with patch("sgl_blend.scheduler.attempt.AdmissionAttempt.run", lambda self: stop_verdict()):
        req = driver.submit(_other_order())
        driver.step()
    _push_out(driver)
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
    warm = engine.call(_ask_warm, "device").answer
    assert answer.logprobs == warm.logprobs
    assert answer.report == {**warm.report, "host_tokens": tokens}


def _ask_in_build_mode(driver: Driver, where: str) -> tuple[Warm, int]:
    warm = _ask_warm(driver, where)
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
    _store(driver)
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
    _store(driver)
    _push_out(driver)
    steps = driver.runtime.describe()["build_steps"]
    long = driver.submit(Prompt([random_tokens(500, POOL - 310)], max_new_tokens=60))
    driver.step()
    (answer,) = driver.ask(_other_order())
    assert long.finished(), "there was room"
    driver.settle()
    return answer, driver.runtime.describe()["build_steps"] - steps


def test_an_answer_waits_for_room_in_build_mode(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(blend_on_miss="build"))
    answer, steps = engine.call(_ask_for_room_in_build_mode)
    warm = engine.call(_ask_warm, "device").answer
    assert answer.logprobs == warm.logprobs
    assert answer.report == {**warm.report, "host_tokens": 200}
    assert steps == 0, "what lies on the host was built again"


def _ask_beside_a_backup(driver: Driver) -> Answer:
    """Ask for chunks while the copy of a long prompt to the host locks most of the pool."""
    _store(driver)
    with _slow("backup_from_device_all_layer", 0.3):
        driver.ask(Prompt([random_tokens(600, POOL - 300)], logprobs=False))
        (answer,) = driver.ask(_other_order())
    driver.settle()
    return answer


def test_chunks_wait_for_memory_that_a_backup_locks(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    answer, warm = engine.call(_ask_beside_a_backup), engine.call(_ask_warm, "device").answer
    assert answer.report["fallback"] is None
    assert answer.logprobs == warm.logprobs


def _ask_as_another_tenant(driver: Driver) -> list[dict[str, Any]]:
    """Ask for one tenant's chunks, which are on the host, as another one and as itself."""
    _store(driver, salt="a")
    _push_out(driver)
    return [driver.ask(_other_order(salt=salt))[0].report for salt in ("b", None, "a")]


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
    with _slow("backup_from_device_all_layer", 0.2):
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

"""The loading controller on the real engine: it loads what its formulas say."""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, rag_prompt, random_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from stored_files import NEEDS_NAMESPACES, store

from sgl_blend.engine.tiers import host_token_bytes
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.scheduler.loading_controller import LoadingController
from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.load_choice import Ratios, choose
from sgl_blend.tuning.loading import Chunk, Links, ModelTimes, Place, Prompt

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 20)
CHUNKS = [random_tokens(10 + i, length) for i, length in enumerate((40, 80, 160))]
QUESTION = random_tokens(99, 12)
ROW_S, LEAST_ROWS = 1e-4, 100
"""Seconds that a row takes in a layer, as far as the controller knows; fewer rows take no less time."""
LAYERS, CHECK = 4, 1
PAGE = 16
MODEL_TOKEN_BYTES = 1024
RATIO = 0.15


def settings(**more: Any) -> dict[str, Any]:
    return {
        "max_total_tokens": 1000,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "blend_min_chunk_tokens": 32,
        "blend_check_layer": CHECK,
        **more,
    }


def _layer_s(rows: int) -> float:
    return ROW_S * max(rows, LEAST_ROWS)


def model_times(token_bytes: int) -> ModelTimes:
    return ModelTimes(LAYERS, CHECK, token_bytes // LAYERS, _layer_s)


def _give_controller(driver: Driver, host: LinkSpeed, storage: LinkSpeed | None = None) -> None:
    token_bytes = host_token_bytes(driver.scheduler.tree_cache)
    controller = LoadingController(model_times(token_bytes), host, token_bytes, TPGroup())
    if storage is not None:
        with patch("sgl_blend.scheduler.loading_controller.UNKNOWN_STORAGE", storage):
            controller = LoadingController(model_times(token_bytes), host, token_bytes, TPGroup())
    driver.runtime.admission._host._controller = controller
    driver.runtime.storage._controller = controller


def _store(driver: Driver, salt: str) -> None:
    driver.settle()
    driver.flush()
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, salt=salt))
    driver.settle()


def _ask_by_link(
    driver: Driver, tokens_per_s: float, params: dict[str, Any] | None = None
) -> tuple[Answer, int]:
    """Ask for chunks in host memory that is as fast as this, as far as the controller knows."""
    _store(driver, "host")
    capacity = driver.runtime.describe()["pool"]["capacity"]
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
    token_bytes = host_token_bytes(driver.scheduler.tree_cache)
    _give_controller(driver, LinkSpeed(1e-4, tokens_per_s * token_bytes))
    order = [CHUNKS[i] for i in (2, 0, 1)]
    (answer,) = driver.ask(rag_prompt(SYSTEM, order, QUESTION, salt="host", params=params or {}))
    driver.settle()
    return answer, token_bytes


def _predicted(bytes_per_s: float, token_bytes: int) -> tuple[tuple[int, ...], float]:
    chunks = tuple(Chunk(len(CHUNKS[i]), Place.HOST) for i in (2, 0, 1))
    prompt = Prompt(chunks, len(QUESTION))  # SGLang itself brings the beginning back
    links = Links(LinkSpeed(1e-4, bytes_per_s))
    choice = choose(prompt, model_times(token_bytes), links, Ratios(RATIO))
    return choice.loaded, choice.ratio


def test_the_choice_flips_where_the_formulas_say(start_engine: StartEngine) -> None:
    engine = start_engine(**settings())
    outcomes = set()
    for exponent in (1, 9.5, 12.25, 13):
        tokens_per_s = 2.0**exponent
        answer, token_bytes = engine.call(_ask_by_link, tokens_per_s)
        loaded, ratio = _predicted(tokens_per_s * token_bytes, token_bytes)
        lengths = [len(CHUNKS[i]) for i in (2, 0, 1)]
        expected = sum(lengths[index] for index in loaded)
        came = answer.report["host_tokens"]
        # The build prefix comes along with the first chunk.
        assert came == (expected + len(SYSTEM) if loaded else 0), tokens_per_s
        assert answer.report["ratio"] == (pytest.approx(ratio) if loaded else RATIO)
        outcomes.add((bool(loaded), ratio > RATIO))
    assert {loaded for loaded, _ in outcomes} == {False, True}, "nothing flipped"
    assert (True, True) in outcomes, "no load left time to recompute more"
    assert (True, False) in outcomes


def test_a_policy_of_one_ratio_recomputes_no_more_while_kv_is_loaded(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(**settings())
    hides = 2.0**12.25  # tokens per second at which a load hides more than RATIO, see above
    assert engine.call(_ask_by_link, hides)[0].report["ratio"] > RATIO
    answer, _ = engine.call(_ask_by_link, hides, {"sgl_blend_policy": "none"})
    assert answer.report["host_tokens"] > 0
    assert answer.report["ratio"] == answer.report["recomputed_tokens"] == 0


def _ask_storage_by_link(driver: Driver, bytes_per_s: float) -> tuple[Answer, float]:
    """Ask for chunks in storage that is so fast; return the answer and a token's stored bytes."""
    salt = f"storage {bytes_per_s}"
    _give_controller(driver, LinkSpeed(1e-5, 1e12), LinkSpeed(1e-5, 1e12))
    _store(driver, salt)
    driver.settle()
    driver.flush()
    _give_controller(driver, LinkSpeed(1e-5, 1e12), LinkSpeed(1e-4, bytes_per_s))
    stored_bytes = (
        host_token_bytes(driver.scheduler.tree_cache) * driver.runtime.storage._least_share
    )
    # A machine that is busy reads a file in more than the 50 ms that a request waits for it.
    with patch("sgl_blend.scheduler.loading_controller.deadline_s", lambda expected_s: 60.0):
        (answer,) = driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, salt=salt))
    driver.settle()
    return answer, stored_bytes


@NEEDS_NAMESPACES
@pytest.mark.parametrize(("bytes_per_s", "hits"), [(1e4, 0), (1e12, 3)])
def test_a_slow_store_is_not_asked(
    start_engine: StartEngine, bytes_per_s: float, hits: int
) -> None:
    engine = start_engine(**settings(page_size=16, hicache_storage_backend="file"))
    report = engine.call(_ask_storage_by_link, bytes_per_s)[0].report
    assert report["chunk_hits"] == hits
    assert (report["storage_tokens"] > 0) == (hits > 0)


def _predicted_of_storage(bytes_per_s: float, stored_bytes: float) -> tuple[int, ...]:
    """Return which chunks are worth asking storage for, by the formulas alone.

    Args:
        bytes_per_s: Of storage.
        stored_bytes: What a token takes there.
    """
    pages = [(len(SYSTEM) + len(chunk)) // PAGE * PAGE for chunk in CHUNKS]
    shared = len(SYSTEM) // PAGE * PAGE  # the build prefix comes with the first
    lacking = [pages[0], *(num_tokens - shared for num_tokens in pages[1:])]
    first, *others = [
        Chunk(len(chunk), Place.STORAGE, round(num_tokens * stored_bytes))
        for chunk, num_tokens in zip(CHUNKS, lacking, strict=True)
    ]
    # With the first chunk everything before it comes, as the exact KV of the prompt.
    exact = replace(first, num_tokens=len(SYSTEM) + first.num_tokens, is_exact=True)
    prompt = Prompt((exact, *others), len(QUESTION))
    links = Links(LinkSpeed(1e-5, 1e12), LinkSpeed(1e-4, bytes_per_s))
    times = model_times(MODEL_TOKEN_BYTES)
    return choose(prompt, times, links, Ratios(RATIO)).loaded


def _flips(stored_bytes: float) -> list[float]:
    """Return the bytes per second of storage at which the predicted choice becomes another."""
    speeds = [stored_bytes * 1.02**exponent for exponent in range(700)]
    choices = [_predicted_of_storage(speed, stored_bytes) for speed in speeds]
    return [
        (one * two) ** 0.5
        for (one, before), (two, after) in pairwise(zip(speeds, choices, strict=True))
        if before != after
    ]


@NEEDS_NAMESPACES
def test_storage_is_asked_where_the_formulas_say(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(page_size=PAGE, hicache_storage_backend="file"))
    _, stored_bytes = engine.call(_ask_storage_by_link, 1e12)
    flips = _flips(stored_bytes)
    outcomes = []
    for flip in flips:
        for bytes_per_s in (0.85 * flip, 1.15 * flip):
            answer, stored_bytes = engine.call(_ask_storage_by_link, bytes_per_s)
            loaded = _predicted_of_storage(bytes_per_s, stored_bytes)
            assert answer.report["chunk_hits"] == len(loaded), bytes_per_s
            outcomes.append(len(loaded))
    assert outcomes[0] == 0
    assert outcomes[-1] == len(CHUNKS)
    assert len(set(outcomes)) > 2, "it flips between some and none only"


def _speeds(driver: Driver) -> tuple[dict[str, float], dict[str, int]]:
    controller = driver.runtime.admission._host._controller
    assert controller._times.step_s > 0, "measured at start, too"
    for _ in range(5):
        controller.host_loaded(10**9, 10.0)
    return controller.describe(), driver.runtime.describe()["pool"]


def test_host_memory_is_timed_at_start_and_followed(start_engine: StartEngine) -> None:
    engine = start_engine(**settings(blend_when="faster"))
    speeds, pool = engine.call(_speeds)
    assert pool["free"] == pool["capacity"], "the trial keeps room"
    assert 0.01 < speeds["host_gb_per_s"] < 0.5
    engine.call(_store, "faster")

"""A request waits for KV from storage while it keeps coming, and no longer than that pays."""

import time
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, rag_prompt, random_tokens
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from stored_files import NEEDS_NAMESPACES, settings, slow_reads, store

from sgl_blend.engine.tiers import host_token_bytes
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.scheduler.arrivals import Arrival
from sgl_blend.scheduler.loading_controller import LoadingController, Patience
from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.load_choice import Choice
from sgl_blend.tuning.loading import ModelTimes

__all__ = ["model_folder", "start_engine", "store"]  # fixtures

SYSTEM = random_tokens(1, 20)
CHUNKS = [random_tokens(10 + i, length) for i, length in enumerate((40, 80, 160))]
QUESTION = random_tokens(99, 12)
LAYERS, CHECK = 4, 1
FAST = LinkSpeed(1e-5, 1e12)


def controller_of(token_bytes: int, row_s: float) -> LoadingController:
    """Return a controller that takes storage to be fast, and a row of a layer to take so long."""
    times = ModelTimes(LAYERS, CHECK, token_bytes // LAYERS, lambda rows: row_s * rows)
    with patch("sgl_blend.scheduler.loading_controller.UNKNOWN_STORAGE", FAST):
        return LoadingController(times, FAST, token_bytes, TPGroup())


def test_a_request_waits_longer_only_while_kv_keeps_coming() -> None:
    controller = controller_of(1024, 1e-4)
    patience = Patience(0.1, 1.0)
    assert controller.is_in_time(50, 50, 0.4, patience)
    assert not controller.is_in_time(50, 50, 0.6, patience), "it would end at 1.2 s"
    assert not controller.is_in_time(0, 100, 0.2, patience), "nothing has come"
    assert controller.is_in_time(100, 0, 0.9, patience)


def test_a_request_waits_at_most_as_long_as_that_pays() -> None:
    choice = Choice((0,), 0.15, False, 1.0, 3.0, wait_s=0.2, patience_s=2.2)
    assert LoadingController.patience(choice) == pytest.approx((0.45, 2.2))
    hardly = Choice((0,), 0.15, False, 1.0, 1.1, wait_s=0.2, patience_s=0.3)
    assert LoadingController.patience(hardly) == pytest.approx((0.3, 0.3))
    nothing = Choice((), 0.15, False, 1.0, 1.0, wait_s=0.0, patience_s=0.0)
    assert LoadingController.patience(nothing) == pytest.approx((0.05, 0.05))


def _ask_stored(driver: Driver, salt: str, row_s: float) -> tuple[Answer, float]:
    """Ask for chunks that are in storage alone; return the answer and the longest wait."""
    token_bytes = host_token_bytes(driver.scheduler.tree_cache)
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, salt=salt))
    driver.settle()
    driver.flush()
    driver.runtime.storage._controller = controller_of(token_bytes, row_s)
    waits: list[Patience] = []
    made = Arrival.__init__

    def make(self: Arrival, req: Any, state: Any, patience: Patience, *rest: Any) -> None:
        waits.append(patience)
        made(self, req, state, patience, *rest)

    with patch.object(Arrival, "__init__", make):
        (answer,) = driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, salt=salt))
    driver.settle()
    assert waits[0].least_s < 0.1
    return answer, waits[0].most_s


def _ask_slow_store(driver: Driver) -> tuple[Answer, float]:
    with slow_reads(0.02):
        return _ask_stored(driver, "slow", 1e-2)


@pytest.mark.engine
@NEEDS_NAMESPACES
def test_a_store_that_became_slow_is_waited_for_where_that_pays(
    start_engine: StartEngine,
) -> None:
    answer, most_s = start_engine(**settings()).call(_ask_slow_store)
    assert most_s > 3.0
    assert answer.report["chunk_hits"] == len(CHUNKS)
    assert 100 < answer.report["load_ms"] < 1e3 * most_s, (
        "it came sooner than it was to be given up"
    )


def _ask_and_count_rounds(driver: Driver) -> tuple[Answer, int]:
    """Return the answer, and how many rounds the scheduler did while KV was on its way."""
    storage, rounds = driver.runtime.storage, 0
    stock = storage.begin_round

    def begin(*args: Any) -> None:
        nonlocal rounds
        rounds += storage.needs_clock
        stock(*args)

    with patch.object(storage, "begin_round", begin), slow_reads(0.02):
        answer, _ = _ask_stored(driver, "rounds", 1e-2)
    return answer, rounds


@pytest.mark.engine
@NEEDS_NAMESPACES
def test_a_server_that_only_waits_leaves_the_core_to_those_who_read(
    start_engine: StartEngine,
) -> None:
    answer, rounds = start_engine(**settings()).call(_ask_and_count_rounds)
    assert answer.report["load_ms"] > 100
    assert 1 <= rounds <= 2 * answer.report["load_ms"] + 20, "two rounds a millisecond at most"


def _ask_stalled_store(driver: Driver) -> tuple[Answer, float]:
    """Let some pages come, and then none for two seconds each."""
    stock, pages = HiCacheFile.get, count()

    def stall(*args: Any, **more: Any) -> Any:
        if next(pages) > 4:
            time.sleep(2.0)
        return stock(*args, **more)

    with patch.object(HiCacheFile, "get", stall):
        return _ask_stored(driver, "stalled", 1e-3)


@pytest.mark.engine
@NEEDS_NAMESPACES
def test_a_store_that_stalls_is_given_up(start_engine: StartEngine) -> None:
    answer, most_s = start_engine(**settings()).call(_ask_stalled_store)
    assert 0.3 < most_s < 1.5
    assert answer.report["chunk_hits"] < len(CHUNKS)
    assert answer.report["load_ms"] < 1e3 * most_s + 300
    assert answer.logprobs


def _ask_in_pieces(driver: Driver) -> tuple[Answer, list[bool]]:
    """Ask for what may be prefilled in pieces; tell at each piece whether all reads had begun."""
    begun: list[bool] = []
    storage = driver.runtime.storage
    stock = storage._pieces.want

    def want(*args: Any) -> bool:
        tree = driver.scheduler.tree_cache
        arrivals = storage._arrivals.values()
        coming = [one for arrival in arrivals for one in arrival.coming]
        begun.append(
            all(tree.ongoing_prefetch[one.handle].host_indices is not None for one in coming)
        )
        return bool(stock(*args))

    with patch.object(storage._pieces, "want", want), slow_reads(0.02):
        answer, _ = _ask_stored(driver, "pieces", 1e-2)
    return answer, begun


@pytest.mark.engine
@NEEDS_NAMESPACES
def test_no_piece_holds_up_a_read_that_is_to_begin(start_engine: StartEngine) -> None:
    answer, begun = start_engine(**settings()).call(_ask_in_pieces)
    assert answer.report["chunk_hits"] == len(CHUNKS)
    assert begun, "nothing was prefilled in pieces"
    assert all(begun)

"""Tensor parallelism (R31, L9): two ranks choose the same rows as one, and give its logits."""

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from graph_stand_in import StandIn, give_graphs, with_graphs
from harness import Answer, Driver, Prompt, Ranks, largest_difference, rag_prompt, random_tokens
from sparse_path import (
    assert_drops_and_is_full_prefill,
    assert_keeps_all_and_is_full_prefill,
    on_all_rows,
    on_true_kv,
)
from tiny_models import make_model

from sgl_blend.policies import NAMED, POLICIES

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 30)
CHUNKS = [random_tokens(20 + i, 70) for i in range(5)]
SETTINGS = {"blend_check_layer": 1, "blend_when": "always", "blend_eval": True}
SCORED = [name for name in NAMED if POLICIES[name].score and POLICIES[name].early_share != 0]
"""Not those that select before the first layer, by memory."""


OFTEN = ("llama",)
SELDOM = ("qwen3-yarn", "qwen2-moe", "qwen3-moe", "glm4-moe", "minimax-m2", "mixtral")
"""Also experts, whose weights ranks share out within each expert. Slow; .ci/run runs them."""


@pytest.fixture(
    scope="module",
    params=[*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SELDOM)],
)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ranks(kind: str, model_folder: Any) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang wants a NUMA node for each rank
        model = make_model(kind, model_folder)
        running = Ranks(model, 2, enable_blend=True, **SETTINGS)
    yield running
    running.close()


def _record_rows(driver: Driver) -> None:
    """Keep the rows that every blended forward keeps."""
    from sgl_blend.fusion.attention import BlendAttention

    driver.rows = []  # type: ignore[attr-defined]
    original = BlendAttention._select

    def select(backend: Any, *args: Any) -> None:
        original(backend, *args)
        driver.rows.append(backend.kept_rows.tolist())  # type: ignore[attr-defined]

    BlendAttention._select = select  # type: ignore[assignment, method-assign]


def _blend(driver: Driver, policy: str) -> tuple[list[Answer], list[list[int]]]:
    """Ask shuffled chunks in two orders; the first round builds them."""
    if not hasattr(driver, "rows"):
        _record_rows(driver)
    driver.settle()
    driver.flush()
    # SGLang gives all ranks one seed, which would hide a selection that draws from it.
    torch.manual_seed(os.getpid())
    question = random_tokens(99, 12)
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.25}
    driver.ask(rag_prompt(SYSTEM, CHUNKS, question))
    driver.settle()
    driver.rows.clear()  # type: ignore[attr-defined]
    shuffled = [CHUNKS[i] for i in (3, 0, 4, 2, 1)]
    answers = driver.ask(
        rag_prompt(SYSTEM, shuffled, question, params=params, max_new_tokens=4),
        rag_prompt(SYSTEM, shuffled[:3], question, params=params, max_new_tokens=4),
    )
    driver.settle()
    return answers, driver.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [*SCORED, "random"])
def test_l9_two_ranks_select_and_answer_as_one(
    start_engine: StartEngine, ranks: Ranks, kind: str, policy: str
) -> None:
    alone, rows_alone = start_engine(kind, **SETTINGS).call(_blend, policy)
    together = ranks.call(_blend, policy)

    assert rows_alone, "nothing was selected"
    for answers, rows in together:
        assert rows == rows_alone
        for got, want in zip(answers, alone, strict=True):
            assert got.report == want.report
            assert got.report["chunk_hits"] >= 3
            assert got.output_ids == want.output_ids
            for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
                assert largest_difference(mine, theirs) <= 1e-4


@pytest.mark.parametrize("policy", ["hkvd", "gradual", "query-aware", "first-k", "oracle"])
def test_l1_holds_on_two_ranks(ranks: Ranks, policy: str) -> None:
    segments = [
        SYSTEM,
        CHUNKS[0],
        random_tokens(50, 15),
        CHUNKS[1],
        CHUNKS[2],
        random_tokens(9, 12),
    ]
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.15}
    prompt = Prompt(segments, [1, 3, 4], params=params, max_new_tokens=3)

    for dropped in ranks.call(on_true_kv, [prompt]):
        assert_drops_and_is_full_prefill(dropped)
    for kept in ranks.call(on_all_rows, [prompt]):
        assert_keeps_all_and_is_full_prefill(kept)


@pytest.mark.parametrize("policy", ["hkvd", "first-k"])
def test_l1_holds_on_two_ranks_through_graphs(ranks: Ranks, policy: str) -> None:
    segments = [SYSTEM, CHUNKS[0], random_tokens(50, 15), CHUNKS[1], CHUNKS[2]]
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3}
    prompt = Prompt([*segments, random_tokens(9, 12)], [1, 3, 4], params=params, max_new_tokens=3)

    for dropped, replays in ranks.call(with_graphs, on_true_kv, [prompt]):
        assert_drops_and_is_full_prefill(dropped)
        assert replays == 1


def _wander(driver: Driver, rank: int) -> list[dict[str, Any]]:
    """Serve traffic that depends on the clock, on ranks whose clocks and speeds differ."""
    drawn = random.Random(5)
    monotonic = time.monotonic
    time.monotonic = lambda: monotonic() + 1000.0 * rank  # the ranks' clocks are far apart
    reports = []
    try:
        for turn in range(12):
            if rank and turn % 3 == 0:
                time.sleep(0.03)
            order = drawn.sample(range(len(CHUNKS)), 3)
            prompt = rag_prompt(
                SYSTEM,
                [CHUNKS[i] for i in order],
                random_tokens(200 + turn, 9),
                salt=f"t{turn % 2}",
            )
            reports += [answer.report for answer in driver.ask(prompt)]
            if turn % 2:
                time.sleep(0.06)  # longer than builds leave the machine alone after a request
            for _ in range(8):  # some rounds of background work, not to its end
                driver.step()
    finally:
        time.monotonic = monotonic
    driver.settle()
    driver.flush()  # SGLang's tree dates its nodes: no clock goes back, but this one did
    return reports


def test_ranks_with_different_clocks_take_the_same_decisions(ranks: Ranks) -> None:
    for engine, rank in zip(ranks.engines, range(2), strict=True):
        engine.send(_wander, rank)
    first, second = [engine.receive() for engine in ranks.engines]
    assert first == second
    assert any(report["chunk_hits"] for report in first)


def _capture_that_fails_on_one(driver: Driver) -> tuple[list[str], list[int]]:
    """Return the warnings of this rank, and which graphs it has then."""
    from sgl_blend.engine.tp_group import this_group
    from sgl_blend.fusion import graphs

    group, recorder = this_group(), StandIn()
    warnings: list[str] = []
    capture = recorder.record

    def record(body: Any) -> Any:
        def work() -> Any:
            recorded = capture(body)  # its collectives end: a rank inside one cannot be reached
            if not group.is_first:
                raise RuntimeError("out of memory")
            return recorded

        return group.together(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "record", record)
        patch.setattr(graphs.logger, "warning", lambda text, *args: warnings.append(text % args))
        give_graphs(driver, recorder=recorder)
    left = list(driver.runtime.describe()["cuda_graph_rows"])
    driver.runtime._fusor.graphs = None
    return warnings, left


def test_a_capture_that_fails_on_one_rank_leaves_all_without_graphs(ranks: Ranks) -> None:
    first, second = ranks.call(_capture_that_fails_on_one)

    assert first[1] == second[1] == []
    assert [len(warnings) for warnings, _ in (first, second)] == [1, 1]
    assert "on another rank" in first[0][0]
    assert "out of memory" in second[0][0]


def _update_that_fails_on_one(
    driver: Driver, failing: int | None
) -> tuple[str, int, dict[str, Any]]:
    """Return what this rank's weights are called then, how often they were new, and a report."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    from sgl_blend.engine.tp_group import this_group

    driver.settle()
    is_failing = failing is not None and this_group().is_first == (failing == 0)
    updater = type(driver.scheduler.tp_worker.model_runner.weight_updater)
    path = driver.scheduler.server_args.model_path
    before = driver.runtime.describe()["weight_updates"]
    with pytest.MonkeyPatch.context() as patch:
        if is_failing:
            failed = (False, "no such file")
            patch.setattr(updater, "update_weights_from_disk", lambda *args, **more: failed)
        order = UpdateWeightFromDiskReqInput(model_path=path, load_format="auto", flush_cache=False)
        driver.scheduler.process_input_requests([order])
    prompt = rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[0]], random_tokens(99, 12))
    for _ in range(2):
        (answer,) = driver.ask(prompt)
        driver.settle()
    described = driver.runtime.describe()
    return described["model_fingerprint"], described["weight_updates"] - before, answer.report


@pytest.mark.parametrize("failing", [0, 1, None])
def test_new_weights_that_only_one_rank_has_are_new_to_all(
    ranks: Ranks, failing: int | None
) -> None:
    first, second = ranks.call(_update_that_fails_on_one, failing)
    assert first == second
    assert first[1] == 1

"""Blending only where it wins, on the real scheduler."""

import dataclasses
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, rag_prompt, random_tokens

from sgl_blend.fusion.plan import LayerSplit
from sgl_blend.tuning.cost_model import ROWS, CostModel, Times, without_bumps

__all__ = ["model_folder", "start_engine"]  # fixtures

LAYERS = LayerSplit(check=2, total=32)


def linear(per_row: float, fixed: float = 0.0) -> tuple[float, ...]:
    return tuple(fixed + per_row * rows for rows in ROWS)


FREE = Times(layer=linear(1.0), copy=linear(0.0), select=linear(0.0), attend=0.0, attend_layer=0.0)


def test_what_is_saved_is_the_linear_work_of_dropped_rows_above_the_check_layer() -> None:
    assert CostModel(FREE, LAYERS).saves_s(1000, 800, 600) == pytest.approx(29 * 600)
    assert CostModel(FREE, LAYERS).saves_s(5000, 4500, 4000) == pytest.approx(29 * 4000)
    assert CostModel(FREE, LAYERS).saves_s(1000, 800, 0) == 0.0
    early = CostModel(FREE, LAYERS).saves_s(1000, 800, 600, num_dropped_early=600)
    assert early == pytest.approx(32 * 600)


@pytest.mark.parametrize(
    ("paid", "cost"),
    [
        ({"copy": linear(0.1)}, 29 * 80.0),
        ({"select": linear(0.5, fixed=3.0)}, 503.0),
        ({"attend": 40.0}, 40.0),
        ({"attend_layer": 2.0}, 58.0),
    ],
    ids=str,
)
def test_what_is_paid(paid: dict[str, Any], cost: float) -> None:
    times = dataclasses.replace(FREE, **paid)
    assert CostModel(times, LAYERS).saves_s(1000, 800, 600) == pytest.approx(29 * 600 - cost)


def test_where_rows_cost_nothing_dropping_them_saves_nothing() -> None:
    # As on a GPU: up to some hundred rows a matrix product takes as long as one of a single row.
    flat = (1.0, 1.0, 1.0, 1.0, 4.0)
    model = CostModel(dataclasses.replace(FREE, layer=flat, attend=0.5), LAYERS)
    assert model.saves_s(400, 350, 300) == pytest.approx(-0.5)
    assert model.saves_s(2048, 1800, 1536) == pytest.approx(29 * 3.0 - 0.5)
    assert model.least_rows(0.15) == 1024


def test_a_disturbed_measurement_of_few_rows_does_not_forbid_blending() -> None:
    disturbed = (1.0, 3000.0, 128.0, 512.0, 2048.0)
    assert without_bumps(disturbed) == [1.0, 128.0, 128.0, 512.0, 2048.0]
    times = dataclasses.replace(FREE, layer=tuple(without_bumps(disturbed)))
    # All that is reused is dropped, so that the rows left are as few as the disturbed ones.
    assert CostModel(times, LAYERS).saves_s(1608, 1574, 1574) > 0


def test_a_forward_takes_more_than_its_layers() -> None:
    seconds = [500.0, 600.0, 1e9]  # one was disturbed
    model = CostModel(FREE, LAYERS).with_forward(seconds, below=14, above=10)
    assert model.step_s == pytest.approx(600 - 3 * 14 - 29 * 10)
    assert CostModel(FREE, LAYERS).with_forward([1.0], below=14, above=10).step_s == 0.0


def test_least_rows_grow_with_what_blending_costs() -> None:
    cheap = CostModel(dataclasses.replace(FREE, attend=100.0), LAYERS).least_rows(0.15)
    dear = CostModel(dataclasses.replace(FREE, attend=10_000.0), LAYERS).least_rows(0.15)
    assert cheap == 64
    assert dear == 512


# --- on the engine ---

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 150) for i in range(6)]
QUESTION = random_tokens(99, 20)


def _blend_at_a_price(driver: Driver, price_s: float) -> list[dict[str, Any]]:
    """Ask with two chunks and with six where a blended forward costs so much; return the reports."""
    driver.settle()
    driver.flush()
    layers = LayerSplit(1, 4)
    times = dataclasses.replace(FREE, layer=linear(1e-3), attend=price_s)
    driver.runtime.admission._cost_model = CostModel(times, layers)
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))
    driver.settle()
    reports = []
    for order in ((3, 1), (5, 3, 1, 0, 2, 4)):
        reports += [driver.ask(rag_prompt(SYSTEM, [CHUNKS[i] for i in order], QUESTION))[0].report]
    driver.settle()
    return reports


@pytest.mark.engine
def test_short_prompts_are_left_alone_and_long_ones_blended(start_engine: StartEngine) -> None:
    # Of two chunks the first stands in place and is exact; 127 rows are dropped, 2 layers above.
    # Of six, 637 are.
    short, long = start_engine().call(_blend_at_a_price, 0.6)
    assert short["fallback"] == "not_faster"
    assert short["reused_tokens"] == short["recomputed_tokens"] == 0
    assert short["prefix_tokens"] > len(SYSTEM), "the exact chunk after the system prompt is lost"
    assert long["fallback"] is None
    assert long["reused_tokens"] > 500


@pytest.mark.engine
def test_a_free_blend_is_always_worth_it(start_engine: StartEngine) -> None:
    short, long = start_engine().call(_blend_at_a_price, 0.0)
    assert short["fallback"] is long["fallback"] is None


@pytest.mark.engine
def test_the_machine_is_measured_at_start(start_engine: StartEngine) -> None:
    info = start_engine(blend_when="faster").call(_describe)
    assert info["least_rows"] in [64 << i for i in range(15)]
    assert start_engine().call(_describe)["least_rows"] is None


def _describe(driver: Driver) -> dict[str, Any]:
    description: dict[str, Any] = driver.runtime.describe()
    return description

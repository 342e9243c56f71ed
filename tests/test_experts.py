"""Mixture of experts: what a layer's time is made of, and what recorders of experts see."""

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt
from law_prompts import CHUNKS, QUESTION, SYSTEM
from tiny_models import EXPERTS, NUM_LAYERS

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _row_modules(driver: Driver) -> list[list[str]]:
    from sgl_blend.engine.models import decoder_layers, row_modules, runner_of

    runner = runner_of(driver.scheduler)
    return [
        [type(module).__name__ for module, _ in row_modules(runner, layer)]
        for layer in decoder_layers(runner)
    ]


def test_a_layer_of_experts_is_timed_with_them(start_engine: StartEngine) -> None:
    first, *others = start_engine("glm4-moe").call(_row_modules)
    attention = ["QKVParallelLinear", "RowParallelLinear"]
    assert first == [*attention, "MergedColumnParallelLinear", "RowParallelLinear"]
    for names in others:
        assert names == [*attention, "Glm4MoeSparseMoeBlock"]


def test_times_are_measured_with_experts(start_engine: StartEngine) -> None:
    engine = start_engine("glm4-moe", blend_when="faster")
    assert engine.call(_least_rows) is not None


def _least_rows(driver: Driver) -> Any:
    return driver.scheduler.sgl_blend.describe()["least_rows"]


def _recorded(driver: Driver, prompts: list[Prompt]) -> tuple[list[int], dict[str, Any]]:
    """Return how many tokens experts got in each layer while the last prompt was prefilled."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    recorder = get_global_expert_distribution_recorder()
    *before, last = prompts
    for prompt in before:
        driver.ask(prompt)
        driver.settle()
    recorder.start_record()
    answer = driver.ask(last)[0]
    recorder.stop_record()
    counts = recorder.dump_record(output_mode="object")["logical_count"]
    return counts.sum(dim=(0, 2)).tolist(), answer.report


def test_recorders_of_experts_see_the_rows_that_ran(start_engine: StartEngine) -> None:
    engine = start_engine(
        "qwen3-moe",
        blend_on_miss="build",
        blend_policy="hkvd",
        chunked_prefill_size=-1,
        expert_distribution_recorder_mode="stat",
    )
    params = {"sgl_blend_ratio": 0.15}
    first = rag_prompt(SYSTEM, CHUNKS[:3], QUESTION, params=params)
    moved = rag_prompt(SYSTEM, CHUNKS[2::-1], QUESTION, params=params)
    counts, report = engine.call(_recorded, [first, moved])
    rows = report["prompt_tokens"] - report["prefix_tokens"]
    kept = report["recomputed_tokens"] + report["computed_tokens"]
    assert kept < 0.5 * rows
    sampled = 1  # the last layer computes no other row
    assert [count // EXPERTS["num_experts_per_tok"] for count in counts] == [
        rows,
        *[kept] * (NUM_LAYERS - 2),
        sampled,
    ]

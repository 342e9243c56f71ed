"""In the last layer attention and MLP run only for rows whose logits are wanted."""

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 120) for i in range(3)]
QUESTION = random_tokens(99, 20)


def _rows_of_layers(driver: Driver, prompts: list[Prompt]) -> list[list[int]]:
    """Return per layer how many rows its MLP saw of prompts that are asked at once."""
    layers = driver.runtime._fusor._modules
    seen: list[list[int]] = [[] for _ in layers]
    handles = [
        layer.mlp.register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0].shape[0])
        )
        for layer, rows in zip(layers, seen, strict=True)
    ]
    try:
        driver.ask(*prompts)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _prompt(order: tuple[int, ...], **more: object) -> Prompt:
    chunks = [CHUNKS[i] for i in order]
    return rag_prompt(SYSTEM, chunks, QUESTION, params={"sgl_blend_ratio": 0.25}, **more)


def _warm(driver: Driver) -> None:
    driver.ask(_prompt((0, 1, 2)))
    driver.settle()


def test_the_last_layer_computes_the_sampled_row_alone(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.call(_warm)
    *_, before, last = engine.call(_rows_of_layers, [_prompt((1, 2, 0))])
    assert before[0] == len(QUESTION) + 60  # of two moved chunks a quarter is computed
    assert last[0] == 1


def test_rows_of_wanted_logprobs_are_computed_to_the_end(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.call(_warm)
    wanted = 7
    length = len(SYSTEM) + 360 + len(QUESTION)
    prompts = [
        _prompt((1, 2, 0), logprob_start_len=length - wanted),
        _prompt((2, 0, 1)),
    ]
    *_, last = engine.call(_rows_of_layers, prompts)
    assert sum(last) >= wanted + 1
    assert last[0] in (wanted, wanted + 1, wanted + 2)

"""No kernel is compiled while requests wait: what a blended forward launches was launched at start."""

import itertools
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens

from sgl_blend.policies import NAMED, POLICIES

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SERVED = [
    name
    for name in NAMED
    if not POLICIES[name].evaluation_only and POLICIES[name].fixed_ratio is None
]
KERNELS = {
    "_tables",
    "_copy_rotated_layers",
    "_deviation",
    "_select_rows",
    "_compact",
    "_ragged_attention",
    "_merge_splits",
}
# Odd and even, so that slots and rows begin at every alignment.
SHORT = [random_tokens(10 + i, 97 + i) for i in range(4)]
LONG = [random_tokens(20 + i, 601 + i) for i in range(3)]


def _prompts(chunks: list[list[int]], policy: str, system: int, count: int) -> list[Prompt]:
    """Return prompts with the same chunks in different orders, as many as are sent at once."""
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3}
    orders = itertools.cycle(itertools.permutations(chunks))
    return [
        rag_prompt(
            random_tokens(1, system),
            list(order),
            random_tokens(100 + number, 20 + number),
            params=params,
            logprobs=False,
        )
        for number, order in zip(range(count), orders, strict=False)
    ]


def _launch(driver: Driver) -> dict[str, Any]:
    """Return the variants that the warm-up launches and those of blended forwards and probes."""
    from variants import BothRagged, kernels_beside

    from sgl_blend.engine.models import decoder_layers, layer_pools, runner_of
    from sgl_blend.tuning.warm_up import warm_up

    fusor, runner = driver.runtime._fusor, runner_of(driver.scheduler)
    kernel, fusor._kernel = fusor._kernel, BothRagged()
    most = driver.scheduler.max_running_requests
    try:
        with kernels_beside() as warm:
            layer = decoder_layers(runner)[-1]
            warm_up(runner, layer, layer_pools(runner), BothRagged(), fusor._rotation, most)
        with kernels_beside() as used:
            reused = 0
            for policy in SERVED:
                reused += _blend(driver, policy)
    finally:
        fusor._kernel = kernel
    return {"warm": warm, "used": used, "reused": reused}


def _blend(driver: Driver, policy: str) -> int:
    """Serve batches of one long request, of several and of many; return how many tokens were reused."""
    driver.settle()
    driver.flush()
    reused = 0
    shapes = [(SHORT, 41, 3), (LONG, 43, 1)]
    if policy == "remembered":  # of whose requests 18 fit into one batch
        shapes += [(SHORT, 40, 1), (SHORT, 44, 18)]
    for chunks, system, count in shapes:
        prompts = _prompts(chunks, policy, system, count + 1)
        driver.ask(prompts[0])  # which lets the chunks be stored
        driver.settle()
        answers = driver.ask(*prompts[1:])
        # Another chunk, of odd length, stands first: an odd number of tokens is exact.
        answers += driver.ask(*_prompts(chunks[2:] + chunks[:2], policy, system, 1))
        reused += sum(answer.report["reused_tokens"] for answer in answers)
        driver.settle()
    return reused


def test_a_blended_forward_launches_nothing_that_was_not_launched_at_start(
    start_engine: StartEngine,
) -> None:
    found = start_engine(max_total_tokens=20_000).call(_launch)
    warm, used = found["warm"], found["used"]

    assert found["reused"] > 10_000
    assert set(used) == KERNELS, "the forwards do not show every kernel"
    assert len(used["_select_rows"]) == 2  # short and long requests
    assert len(used["_ragged_attention"]) == 3  # whole, split, and of many requests
    for name in KERNELS:
        assert used[name] <= warm[name], f"{name} would be compiled while a request waits"

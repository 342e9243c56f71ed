"""A blended forward never waits for the device; seen only on one."""

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Driver, rag_prompt, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 120) for i in range(4)]
QUESTION = random_tokens(99, 20)


def _blend_without_waiting(driver: Driver, policy: str) -> int:
    """Ask twice, the second time with any wait inside Fusor.run an error; return what was reused."""
    from sgl_blend.fusion.fusor import Fusor

    original = Fusor.run

    def run(fusor: Fusor, *args: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(fusor, *args)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3}
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, params=params, logprobs=False))
    driver.settle()
    warm = rag_prompt(
        SYSTEM, [CHUNKS[i] for i in (1, 0, 3, 2)], QUESTION, params=params, logprobs=False
    )
    driver.ask(warm)  # compiles kernels, which may wait
    driver.settle()
    again = rag_prompt(
        SYSTEM, [CHUNKS[i] for i in (2, 3, 1, 0)], QUESTION, params=params, logprobs=False
    )
    Fusor.run = run  # type: ignore[assignment, method-assign]
    try:
        return int(driver.ask(again)[0].report["reused_tokens"])
    finally:
        Fusor.run = original  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["hkvd", "hkvd-k", "hybrid", "gradual", "query-aware", "edge"])
def test_a_blended_forward_does_not_wait(start_engine: StartEngine, policy: str) -> None:
    assert start_engine().call(_blend_without_waiting, policy) > 200

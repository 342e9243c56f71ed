"""A blended forward never waits for the device.

On a GPU torch itself fails where it would wait. Without one, every operation of a blended forward is
looked at: none of ours may ask for a number, outside the kernels that a GPU has in Triton.
"""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from graph_stand_in import give_graphs
from harness import Driver, rag_prompt, random_tokens

from sgl_blend.policies import NAMED, POLICIES

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

ROOT = str(Path(__file__).parents[1])
READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_dim",
    "_unique2",
}
"""Operations whose result, or its size, the host has to be told."""
TORCH_KERNELS = {
    "delta_rope.py",
    "ragged_attention.py",
    "ragged_attention_fixed.py",
    "segmented_topk.py",
    "kv_deviation.py",
}
"""Files of kernels/ that run in torch where there is no GPU."""
SERVED = [
    name
    for name in NAMED
    if not POLICIES[name].evaluation_only and POLICIES[name].fixed_ratio is None
]

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


def _owner() -> Path | None:
    """Return the file of ours that runs, or None if SGLang called something else in between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/sglang/" in name:
            return None
        if name.startswith(ROOT) and "/.venv/" not in name and "/tests/" not in name:
            return Path(name)
        frame = frame.f_back
    return None


def _reads_of_a_blended_forward(driver: Driver, policy: str) -> tuple[list[str], int]:
    """Return which operations of ours read from the device, and how many operations there were."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from sgl_blend.fusion.fusor import Fusor

    found: list[str] = []
    count = 0

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal count
            name, owner = op.overloadpacket.__name__, _owner()
            count += owner is not None
            if name in READS and owner is not None and owner.name not in TORCH_KERNELS:
                found.append(f"{name} in {owner.name}")
            return op(*args, **(kwargs or {}))

    original, probe, probes = Fusor.run, Fusor.probe, 0

    def run(fusor: Fusor, *args: object) -> object:
        with Watch():  # type: ignore[no-untyped-call]
            return original(fusor, *args)  # type: ignore[arg-type]

    def run_probe(fusor: Fusor, *args: object) -> object:
        nonlocal probes
        probes += 1
        with Watch():  # type: ignore[no-untyped-call]
            return probe(fusor, *args)  # type: ignore[arg-type]

    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3}
    driver.settle()
    driver.flush()  # probes run once
    Fusor.probe = run_probe  # type: ignore[assignment, method-assign]
    try:
        driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, params=params, logprobs=False))
        driver.settle()
    finally:
        Fusor.probe = probe  # type: ignore[method-assign]
    assert (probes > 0) == (policy in ("funnel", "remembered"))
    again = rag_prompt(
        SYSTEM, [CHUNKS[i] for i in (2, 3, 1, 0)], QUESTION, params=params, logprobs=False
    )
    Fusor.run = run  # type: ignore[assignment, method-assign]
    try:
        assert driver.ask(again)[0].report["reused_tokens"] > 200
    finally:
        Fusor.run = original  # type: ignore[method-assign]
    return found, count


@pytest.mark.parametrize("policy", SERVED)
def test_nothing_of_ours_asks_the_device(start_engine: StartEngine, policy: str) -> None:
    found, count = start_engine().call(_reads_of_a_blended_forward, policy)
    assert count > 30
    assert found == []


def _reads_through_graphs(driver: Driver, policy: str) -> tuple[list[str], int, int]:
    recorder = give_graphs(driver)
    found, count = _reads_of_a_blended_forward(driver, policy)
    driver.runtime._fusor.graphs = None
    return found, count, recorder.num_replays


def test_nothing_asks_the_device_on_the_way_to_a_graph(start_engine: StartEngine) -> None:
    found, count, replays = start_engine().call(_reads_through_graphs, "hkvd")
    assert count > 30
    assert replays > 0
    assert found == []


@pytest.mark.gpu
@pytest.mark.parametrize("policy", SERVED)
def test_a_blended_forward_does_not_wait(start_engine: StartEngine, policy: str) -> None:
    assert start_engine().call(_blend_without_waiting, policy) > 200

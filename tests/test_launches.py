"""A blended forward launches little: counted without a GPU, as launch_counter.py describes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens
from launch_counter import (
    ATTENTION_LAUNCHES,
    END,
    LAUNCHES,
    PLAN_LAUNCHES,
    PREPARATION,
    LaunchCounter,
    Launches,
    counted,
)
from numpy.typing import NDArray
from tiny_models import NUM_LAYERS

from sgl_blend.kernels.delta_rope_tables_triton import delta_rope_tables_triton
from sgl_blend.kernels.delta_rope_triton import copy_rotated_layers_triton
from sgl_blend.kernels.kv_deviation_triton import kv_deviation_at_triton
from sgl_blend.kernels.ragged_attention_triton import TritonRagged, ragged_attention_triton
from sgl_blend.kernels.row_compaction_triton import compact_rows_triton
from sgl_blend.kernels.segmented_topk import Segments
from sgl_blend.kernels.segmented_topk_triton import select_rows_triton
from sgl_blend.kernels.upload import Staging

__all__ = ["model_folder", "start_engine"]  # fixtures

CHECK_LAYER = 1
MAX_PREPARATION = 20
MAX_LAYER = 11
MAX_LAST_LAYER = 15
"""Rows whose logits nobody wants leave there: two compactions, the batch's own, and a plan."""
MAX_SELECTION = 9
"""Launches that choosing costs in the check layer with one request; each other request adds a score."""

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 100) for i in range(4)]
ORDERS = [(2, 3, 1, 0), (1, 0, 3, 2), (3, 1, 2)]
QUESTION = random_tokens(99, 20)


def _prompts(orders: list[tuple[int, ...]], policies: list[str]) -> list[Prompt]:
    return [
        rag_prompt(
            SYSTEM,
            [CHUNKS[i] for i in order],
            QUESTION,
            params={"sgl_blend_policy": policy, "sgl_blend_ratio": 0.25},
            logprobs=False,
        )
        for order, policy in zip(orders, policies, strict=True)
    ]


def _launches(driver: Driver, policies: list[str]) -> tuple[Launches, list[bool]]:
    """Blend requests in one forward; return its launches, and who has an exact prefix."""
    from sgl_blend.fusion.fusor import Fusor

    original = Fusor.run
    seen: list[tuple[Launches, list[bool]]] = []

    def run(self: Fusor, batch: Any, steps: Any) -> Any:
        with counted(self._modules, self._kernel) as launches:
            output = original(self, batch, steps)
        assert all(steps), "all are blended"
        seen.append((launches, [step.exact_prefix is not None for step in steps]))
        return output

    driver.settle()
    driver.flush()
    driver.ask(*_prompts([(0, 1, 2, 3)], policies[:1]))
    driver.settle()
    Fusor.run = run  # type: ignore[assignment, method-assign]
    try:
        driver.ask(*_prompts(ORDERS[: len(policies)], policies))
    finally:
        Fusor.run = original  # type: ignore[method-assign]
    assert len(seen) == 1, f"{len(seen)} forwards"
    return seen[0]


@pytest.mark.engine
@pytest.mark.parametrize("prefix", ["exact prefix", "no exact prefix"])
@pytest.mark.parametrize(
    "policies",
    [["hkvd"], ["hkvd"] * 3, ["funnel"], ["funnel"] * 3, ["funnel", "hkvd"]],
    ids=" ".join,
)
def test_a_forward_launches_little(
    start_engine: StartEngine, policies: list[str], prefix: str
) -> None:
    settings = {} if prefix == "exact prefix" else {"blend_build_prefix": "bos"}
    engine = start_engine(**settings)

    launches, has_exact = engine.call(_launches, policies)

    assert has_exact == [prefix == "exact prefix"] * len(policies)
    assert 1 < launches.of(PREPARATION) <= MAX_PREPARATION, launches.parts[PREPARATION]
    *above, last = range(CHECK_LAYER + 1, NUM_LAYERS)
    for layer in above:
        assert 9 < launches.of(layer) <= MAX_LAYER, launches.parts[layer]
    assert launches.of(last) <= MAX_LAST_LAYER, launches.parts[last]
    selection = launches.of(CHECK_LAYER) - MAX_LAYER
    more = 0 if len(policies) == 1 else len(policies) - 1 + 2  # and their scores in one tensor
    assert selection <= MAX_SELECTION + more, launches.parts[CHECK_LAYER]
    assert launches.of(END) == 0
    assert launches.uploads == 1


@contextmanager
def _counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count what Triton wrappers launch: their kernels, which do not run, and operations of torch."""
    from triton.runtime.interpreter import GridExecutor

    found: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", lambda self, *_, **__: found.append("kernel"))
        counter = LaunchCounter()
        counter.part = 0  # whosever an operation is
        with counter:
            yield found
        found += counter.launches.parts.get(0, {}).keys()


def _calls() -> dict[str, Callable[[], object]]:
    """Return a call of the Triton twin of each counted entry."""
    count, heads, width = 12, 2, 16
    rows, scores, table = torch.arange(count), torch.zeros(count), torch.zeros(count, width)
    pool = torch.zeros(4 * count, heads, width)
    cos, sin = torch.ones(count, width // 2), torch.zeros(count, width // 2)
    fresh = torch.zeros(count, heads, width)
    addresses = torch.zeros(1, 2, dtype=torch.int64)
    segments = Segments((count, count), (6, 6), (3, 2))
    bounds = torch.from_numpy(segments.bounds())
    return {
        "kernels.delta_rope.copy_rotated_layers": lambda: copy_rotated_layers_triton(
            addresses, range(1), (pool, pool), (rows, rows), (cos, sin), neox=True
        ),
        "kernels.delta_rope.delta_rope_tables": lambda: delta_rope_tables_triton(table, rows, rows),
        "kernels.kv_deviation.kv_deviation_at": lambda: kv_deviation_at_triton(
            fresh, rows, pool, rows, None
        ),
        "kernels.row_compaction.compact_rows": lambda: compact_rows_triton(rows, [fresh, rows]),
        "kernels.segmented_topk.select_rows": lambda: select_rows_triton(
            scores, rows, segments.rows, 5, bounds
        ),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")
@pytest.mark.parametrize("entry", sorted(_calls()))
def test_a_kernel_launches_what_is_counted(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _calls()[entry]
    with _counted_launches(monkeypatch) as found:
        call()
    assert len(found) == LAUNCHES[entry], found


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")
def test_attention_launches_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, rows = TritonRagged(), [5, 7]
    pool, q = torch.zeros(64, 2, 16), torch.zeros(12, 4, 16)
    counts = torch.from_numpy(kernel.host_counts(rows, [20, 30]))
    positions, slots = torch.arange(12), [torch.arange(20), torch.arange(30)]

    with _counted_launches(monkeypatch) as planned:
        plan = kernel.plan(positions, rows, slots, torch.float32, counts=counts)
    assert len(planned) == PLAN_LAUNCHES, planned
    with _counted_launches(monkeypatch) as attended:
        ragged_attention_triton(q, pool, pool, plan, scale=1.0, num_splits=2)
    assert len(attended) == ATTENTION_LAUNCHES, attended


def test_every_counted_kernel_is_held_against_its_twin() -> None:
    assert {name for name in LAUNCHES if name.startswith("kernels.")} == set(_calls())


def test_staged_arrays_arrive_in_one_copy() -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(3, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.array([0.5, np.nan, -1.0], dtype=np.float32),
    ]
    staging = Staging()
    staged = [staging.add(array) for array in arrays]
    staging.send(torch.device("cpu"))

    for array, there in zip(arrays, staged, strict=True):
        assert there.tensor.shape == array.shape
        assert there.tensor.is_contiguous()
        assert there.tensor.data_ptr() % 16 == staged[0].tensor.data_ptr() % 16
        np.testing.assert_array_equal(there.tensor.numpy(), array)
    assert len({there.tensor.untyped_storage().data_ptr() for there in staged}) == 1

"""What stands in for CUDA graphs where there is no GPU, and what compares a replay with no graph.

The functions here run in the worker process (harness.Engine.call).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from harness import Driver, Prompt
from sparse_path import Comparison

_SCRATCH = 7.0
"""What slot 0 holds before each forward: whatever is written there then is seen."""

BUCKETS = (64, 128, 192, 320, 512)


class StandIn:
    """A recorder whose replay calls what was recorded: the same buffers, padding and bookkeeping.

    As with a graph, the results lie where the recording left them, until the next replay.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self.recorded: list[int] = []
        """Rows of each recording, in order."""
        self.results: Sequence[torch.Tensor] = ()
        """Of the last replay, padding included."""

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, body: Callable[[], Any]) -> Callable[[], Any]:
        results = [result.clone() for result in body()]
        self.recorded.append(results[0].shape[0])

        def replay() -> Any:
            self.num_replays += 1
            self.results = results
            for result, fresh in zip(results, body(), strict=True):
                result.copy_(fresh)
            return results

        return replay


def give_graphs(
    driver: Driver, buckets: Sequence[int] = BUCKETS, recorder: StandIn | None = None
) -> StandIn:
    """Let a worker's blended forwards take graphs from now on."""
    from sgl_blend.engine.tp_group import this_group
    from sgl_blend.fusion.graphs import RowBucketGraphs
    from sgl_blend.kernels.ragged_attention_fixed import TorchFixed

    fusor, recorder = driver.runtime._fusor, recorder or StandIn()
    graphs = RowBucketGraphs(
        driver.scheduler, fusor.layers, TorchFixed(), recorder, this_group(), buckets
    )
    graphs.capture()
    fusor.graphs = graphs
    return recorder


def with_graphs(
    driver: Driver, way: Callable[..., Comparison], prompts: list[Prompt]
) -> tuple[Comparison, int]:
    """Compare with full prefill in one of sparse_path's ways; also return how many replays ran."""
    recorder = give_graphs(driver)
    got = way(driver, prompts)
    driver.runtime._fusor.graphs = None
    return got, recorder.num_replays


@dataclass
class Compared:
    """One blended forward, run without graphs and then with them on the same pool.

    Attributes:
        rows: How many rows each request had above the check layer; empty if no graph was asked for.
        replayed: Whether a graph ran.
        same_logits: Whether both gave the same bits.
        largest: The largest difference of two logits.
        range: The largest of all logits, by magnitude.
        slots: In which slots the pools differ, bit for bit, in any layer.
        scratch: Whether the padding wrote into slot 0.
        empty: Whether the padding came out as nothing but zeros.
    """

    rows: list[int]
    replayed: bool
    same_logits: bool
    largest: float
    range: float
    slots: list[int]
    scratch: bool
    empty: bool


class Counted:
    """Counts the replays of the graphs that a server has captured itself."""

    def __init__(self, driver: Driver) -> None:
        self.num_replays = 0
        self.results: Sequence[torch.Tensor] = ()
        replays = driver.runtime._fusor.graphs._replays
        replays.update({rows: self._counting(replay) for rows, replay in replays.items()})

    def _counting(self, replay: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self.num_replays += 1
            self.results = replay()
            return self.results

        return run


@contextmanager
def compared(driver: Driver, recorder: StandIn | Counted) -> Iterator[list[Compared]]:
    """Run every blended forward twice, and note how the two differ."""
    from sgl_blend.fusion.fusor import Fusor
    from sgl_blend.fusion.graphs import RowBucketGraphs

    found: list[Compared] = []
    rows: list[int] = []
    original, original_run = Fusor.run, RowBucketGraphs.run

    def run_graph(graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> bool:
        rows[:] = batch.extend_seq_lens_cpu
        return original_run(graphs, batch, *args, **kwargs)

    def run(fusor: Any, batch: Any, steps: Any) -> Any:
        rows.clear()
        for buffer in _buffers(driver):
            buffer[0] = _SCRATCH
        before, graphs = pools(driver), fusor.graphs
        fusor.graphs = None
        want = original(fusor, batch, steps).logits_output.next_token_logits.clone()
        after_eager = pools(driver)
        _restore(driver, before)
        fusor.graphs, replays = graphs, recorder.num_replays
        output = original(fusor, batch, steps)
        got = output.logits_output.next_token_logits
        after = pools(driver)
        different = sorted(
            {s for a, b in zip(after_eager, after, strict=True) for s in differing(a, b)}
        )
        found.append(
            Compared(
                rows=list(rows),
                replayed=recorder.num_replays > replays,
                same_logits=torch.equal(got, want),
                largest=float((got - want).abs().max()),
                range=float(want.abs().max()),
                slots=[slot for slot in different if slot],
                scratch=0 in different,
                empty=not any(states[sum(rows) :].any() for states in recorder.results),
            )
        )
        return output

    with patch.object(Fusor, "run", run), patch.object(RowBucketGraphs, "run", run_graph):
        yield found


def _buffers(driver: Driver) -> list[torch.Tensor]:
    pool = driver.scheduler.tp_worker.model_runner.token_to_kv_pool
    layers = range(driver.scheduler.model_config.num_hidden_layers)
    return [get(i) for i in layers for get in (pool.get_key_buffer, pool.get_value_buffer)]


def pools(driver: Driver) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in _buffers(driver)]


def _restore(driver: Driver, pools: list[torch.Tensor]) -> None:
    for buffer, before in zip(_buffers(driver), pools, strict=True):
        buffer.copy_(before)


def differing(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    same = one.view(torch.uint8) == other.view(torch.uint8)
    slots: list[int] = (~same.flatten(1).all(1)).nonzero().flatten().tolist()
    return slots

"""Graphs of the layers above the check layer: captured once for each number of rows, then replayed.

These layers run for few rows, so a device is done with a kernel about when the host has launched the
next one. A graph launches all of them at once. Everything that differs from batch to batch is written
into buffers that keep their addresses; the number of rows is rounded up to a bucket:

    hidden, residual     | rows of the batch | 0 ...      |
    positions            | where they stand  | 0 ...      |   padding computes what nobody reads
    slots                | where KV goes     | 0 ...      |   slot 0 is SGLang's for such rows
    requests             how many rows each has, and where its slots begin

The last layer is not in it: which rows go through all of it depends on whose logits are wanted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_blend.engine.forward import (
    forward_with,
    kv_lengths,
    layer_kv,
    row_positions,
    row_slots,
    step_lengths,
    write_kv,
)
from sgl_blend.engine.kv_scales import kv_scale, layer_scales, times
from sgl_blend.engine.layer_range import (
    between_layers,
    copy_of,
    finish_range,
    put_between_layers,
    run_range,
    slot_table,
    table_rows,
    weight_addresses,
)
from sgl_blend.engine.models import (
    attention_backend,
    layer_number,
    runner_of,
    softmax_scale,
    split_heads,
)
from sgl_blend.engine.objects import AttentionBackend, AttentionLayer, ForwardBatch, Scheduler
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.engine.trial_batch import made_up_batch
from sgl_blend.fusion.plan import LayerSplit
from sgl_blend.kernels.ragged_attention_fixed import (
    MAX_REQUESTS,
    FixedKernel,
    FixedRows,
    write_bounds,
)

logger = logging.getLogger(__name__)

BUCKETS = (*range(64, 513, 64), 640, 768, 1024)
"""Numbers of rows for which there is a graph. Matrix products on a GPU work in tiles of 64 rows or
more, so finer steps would save little. With more rows the host is ahead of the device anyway."""

States = tuple[torch.Tensor, torch.Tensor]
Body = Callable[[], States]


class Recorder(Protocol):
    """A way to run the same operations again, on the values that their tensors have then."""

    def session(self) -> AbstractContextManager[object]:
        """Stand around all recordings."""

    def record(self, body: Body) -> Body:
        """Record a function; what is returned runs it again, and its results stay in their place."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a forward when the check layer is done.

    Attributes:
        next_layer: The layer that comes next; a gradual policy is further up than others.
        num_rows: Rows that are still computed.
        num_requests: Requests of the batch.
        scattered: Whether rows were dropped, so that our attention runs and not the server's.
    """

    next_layer: int
    num_rows: int
    num_requests: int
    scattered: bool


def choose_bucket(rest: Rest, first_layer: int, buckets: Sequence[int]) -> int | None:
    """Return for how many rows the graph is that runs the rest of a forward; None for none of them.

    Args:
        rest: Of the forward.
        first_layer: Where the graphs begin.
        buckets: Numbers of rows, ascending.
    """
    fits = rest.scattered and rest.next_layer == first_layer and rest.num_requests <= MAX_REQUESTS
    return next((bucket for bucket in buckets if fits and bucket >= rest.num_rows), None)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the graphs read, for as many rows as the largest has.

    Attributes:
        hidden: [R, hidden], the model's dtype.
        residual: [R, hidden], the residual's dtype.
        positions: int64 [R].
        slots: int64 [R], where the KV of the rows goes.
        attention: The same positions, and what attention must know besides.
    """

    hidden: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: FixedRows


class _FixedAttention:
    """Attention backend of the layers of a graph; what it does not define is the server's."""

    def __init__(
        self, inner: AttentionBackend, batch: ForwardBatch, kernel: FixedKernel, rows: FixedRows
    ) -> None:
        self.inner = inner
        self._batch = batch
        self._kernel = kernel
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend to scattered rows; signature is SGLang's. Returns [R, heads * v_head_dim]."""
        if save_kv_cache:
            write_kv(self.inner, layer, self._batch, k, v)
        heads, scale = split_heads(q, layer), softmax_scale(layer)
        pools = layer_kv(self.inner, layer_number(layer))
        stored = kv_scale(self.inner, layer)
        mixed = self._kernel.run(heads, *pools, self._rows, scale=scale * stored.k)
        return times(mixed, stored.v).reshape(heads.shape[0], -1)


class RowBucketGraphs:
    """The graphs of one model runner; owned by the thread that runs its forwards.

    Args:
        scheduler: SGLang's.
        layers: The model's.
        kernel: Attends.
        recorder: Captures. What it records must not change with a batch: the host runs it once.
        tp_group: Of the server.
        buckets: Numbers of rows, ascending.

    Attributes:
        layers: Those that a graph runs; the last one is not among them.
        buckets: Numbers of rows for which there is a graph now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        layers: LayerSplit,
        kernel: FixedKernel,
        recorder: Recorder,
        tp_group: TPGroup,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self.layers = range(layers.check + 1, layers.total - 1)
        self.buckets: tuple[int, ...] = ()
        self._scheduler = scheduler
        self._runner = runner_of(scheduler)
        self._backend = attention_backend(self._runner)
        self._kernel = kernel
        self._recorder = recorder
        self._tp_group = tp_group
        self._wanted = tuple(buckets)
        self._inputs: _Inputs | None = None
        self._replays: dict[int, Body] = {}
        self._bodies: list[Body] = []  # they hold the batches whose tensors a graph may read
        self._weights: object = None

    @torch.no_grad()
    def capture(self) -> None:
        """Capture all graphs, the largest first: the others find room in its memory.

        Every rank must take part. The server must be idle; slot 0 alone is written to. If a rank
        cannot capture them, or has no memory left for them, none has graphs, and a warning says so.
        """
        if not self.layers:
            return
        try:
            self._tp_group.together(self._capture_all)
        # What a foreign model or a driver raises is not known; without graphs all is served alike.
        except Exception as err:  # noqa: BLE001 - not a wrong answer: a slower one, and a warning
            logger.warning(
                "sgl-blend: CUDA graphs cannot be captured and are not used: %s: %s; "
                "--blend-cuda-graph off leaves them out",
                type(err).__name__,
                err,
            )
            self._give_up()
            return
        self.buckets = self._wanted
        self._weights = self._fixed_by_weights()

    def _capture_all(self) -> None:
        """Capture; whatever may fail does so on all ranks together, none waits for another."""
        with ExitStack() as stack:
            session = self._recorder.session()
            self._tp_group.together(lambda: stack.enter_context(session))
            for num_rows in reversed(self._wanted):
                body = self._tp_group.together(functools.partial(self._body, num_rows))
                self._bodies.append(body)
                self._replays[num_rows] = self._recorder.record(body)

    def _give_up(self) -> None:
        self.buckets = ()
        self._replays.clear()
        self._bodies.clear()
        self._inputs = None

    def run(self, batch: ForwardBatch, next_layer: int, *, scattered: bool) -> bool:
        """Run the layers of a graph for the rows of a batch, if there is one that fits.

        Args:
            batch: Its rows, positions and counts are those that the next layer is to see. It is left
                as those layers would leave it.
            next_layer: The first layer that has not run.
            scattered: Whether rows were taken out of it.

        Returns:
            Whether there was one; if not, nothing has happened.
        """
        counts = step_lengths(batch)
        num_rows = sum(counts)
        rest = Rest(next_layer, num_rows, len(counts), scattered)
        bucket = choose_bucket(rest, self.layers.start, self.buckets)
        if bucket is None:
            return False
        self._write(batch, num_rows, bucket)
        hidden, residual = self._replays[bucket]()
        put_between_layers(batch, hidden[:num_rows], residual[:num_rows])
        finish_range(batch, self.layers.stop)
        return True

    def weights_changed(self) -> None:
        """Give up all graphs if weights lie elsewhere now; every rank must be told together.

        New weights mostly come into the memory of the old ones. A graph reads them from there.
        """
        if not self.buckets:
            return
        moved = self._fixed_by_weights() != self._weights
        assert self._inputs is not None, "graphs were captured"
        told = torch.tensor([float(moved)], device=self._inputs.positions.device)
        if self._tp_group.sum(told).item() > 0:
            logger.warning("sgl-blend: the weights lie elsewhere now, CUDA graphs are given up")
            self._give_up()

    def _fixed_by_weights(self) -> object:
        """Return what graphs hold of the weights: where they lie, and the scales of stored KV."""
        return weight_addresses(self._runner), layer_scales(self._runner)

    def _body(self, num_rows: int) -> Body:
        """Return what one graph runs; it reads the inputs and depends on nothing else."""
        inputs = self._inputs_for(num_rows)
        batch, attention = self._begin(num_rows, inputs.positions, inputs.slots, inputs.attention)
        hidden, residual = inputs.hidden[:num_rows], inputs.residual[:num_rows]

        def body() -> States:
            step = copy_of(batch)
            put_between_layers(step, hidden, residual)
            with forward_with(attention, step):
                run_range(self._runner, step, self.layers)
            return between_layers(step)

        return body

    def _begin(
        self, num_rows: int, positions: torch.Tensor, slots: torch.Tensor, rows: FixedRows
    ) -> tuple[ForwardBatch, _FixedAttention]:
        """Run a batch up to the graph, so that the model itself says how it hands on a residual."""
        batch = made_up_batch(
            self._scheduler, positions=positions[:num_rows], slots=slots[:num_rows], number=0
        )
        attention = _FixedAttention(self._backend, batch, self._kernel, rows.first(num_rows))
        with forward_with(attention, batch):
            run_range(self._runner, batch, range(self.layers.start))
        return batch, attention

    def _inputs_for(self, num_rows: int) -> _Inputs:
        """Return the buffers; those for the first, largest graph are made."""
        if self._inputs is None:
            table = slot_table(self._backend).view(-1)
            device = table.device
            positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
            slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
            rows = FixedRows(
                positions=torch.zeros(num_rows, dtype=torch.int32, device=device),
                bounds=torch.zeros(3, MAX_REQUESTS + 1, dtype=torch.int64, device=device),
                table=table,
            )
            hidden, residual = between_layers(self._begin(num_rows, positions, slots, rows)[0])
            self._inputs = _Inputs(
                torch.zeros_like(hidden), torch.zeros_like(residual), positions, slots, rows
            )
        return self._inputs

    def _write(self, batch: ForwardBatch, num_rows: int, bucket: int) -> None:
        """Write a batch into the buffers; the rows up to the bucket are padding."""
        inputs = self._inputs
        assert inputs is not None, "graphs were captured"
        hidden, residual = between_layers(batch)
        positions = row_positions(batch)
        for buffer, values in (
            (inputs.hidden, hidden),
            (inputs.residual, residual),
            (inputs.positions, positions),
            (inputs.attention.positions, positions),
            (inputs.slots, row_slots(batch)),
        ):
            buffer[:num_rows].copy_(values)
            buffer[num_rows:bucket].zero_()
        stride = slot_table(self._backend).stride(0)
        starts = table_rows(batch).to(torch.int64) * stride
        write_bounds(inputs.attention.bounds, step_lengths(batch), kv_lengths(batch), starts)

"""One loop over decoder layers, for models whose class cannot run some of them.

SGLang's classes with `forward_split_prefill` bring a loop of their own, and theirs is used. The others
differ only in how a layer hands its residual on: as a second value, or in a stream of the batch.
A class that does more between its layers, or before the first one, must not be listed in
compatibility.MODELS; the tests of law L1 see that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sgl_blend.engine.models import text_model
from sgl_blend.engine.objects import ForwardBatch, ModelRunner

_PARTS = ("embed_tokens", "layers", "norm")
_HEAD = ("lm_head", "logits_processor")


def lend_layer_loop(runner: ModelRunner) -> None:
    """Give a loaded model a `forward_split_prefill` if its class has none and its layers allow it.

    A model that gets none is refused later (models.decoder_layers).

    Args:
        runner: SGLang's ModelRunner, model loaded.
    """
    model = text_model(runner)
    inner: Any = getattr(model, "model", None)
    loop = None
    if not hasattr(model, "forward_split_prefill") and _has(model, _HEAD) and _has(inner, _PARTS):
        loop = _loop_of(inner.layers[0])
    if loop is not None:
        model.forward_split_prefill = partial(_run, model, loop)
    if model is not runner.model and hasattr(model, "forward_split_prefill"):
        runner.model.forward_split_prefill = model.forward_split_prefill


def _has(module: Any, parts: tuple[str, ...]) -> bool:
    return all(hasattr(module, part) for part in parts)


def _loop_of(layer: Any) -> _Loop | None:
    if "residual" in inspect.signature(layer.forward).parameters:
        return _Pairs()
    try:
        from sglang.srt.layers.layer_boundary.residual import batch as stream
    except ImportError:
        return None
    return _Stream(stream)


@torch.no_grad()
def _run(
    model: Any,
    loop: _Loop,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    batch: ForwardBatch,
    split_interval: tuple[int, int],
) -> Any:
    """Run layers [start, stop) of a batch; return the logits after the last one, else None."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    inner, (start, stop) = model.model, split_interval
    if start == 0:
        loop.begin(batch, inner.embed_tokens(input_ids))
    recorder = get_global_expert_distribution_recorder()
    for number in range(start, stop):
        with recorder.with_current_layer(number):
            loop.pass_layer(inner.layers[number], positions, batch)
    if stop < len(inner.layers):
        return None
    batch.hidden_states = loop.end(batch, inner.norm)
    return model.logits_processor(input_ids, batch.hidden_states, model.lm_head, batch)


class _Pairs:
    """Layers that take and return hidden states and residual."""

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        batch.hidden_states, batch.residual = hidden, None

    def pass_layer(self, layer: Any, positions: torch.Tensor, batch: ForwardBatch) -> None:
        batch.hidden_states, batch.residual = layer(
            positions, batch.hidden_states, batch, batch.residual
        )

    def end(self, batch: ForwardBatch, norm: Any) -> torch.Tensor:
        normed: torch.Tensor = norm(batch.hidden_states, batch.residual)[0]
        return normed


class _Stream:
    """Layers whose residual is in a stream of the batch, and may still be owed.

    Args:
        stream: SGLang's module of functions over that stream.
    """

    def __init__(self, stream: Any) -> None:
        self._begin = stream.start
        self._end: Callable[..., torch.Tensor] = getattr(stream, "final_norm", None) or stream.norm

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        self._begin(batch)
        batch.hidden_states = hidden

    def pass_layer(self, layer: Any, positions: torch.Tensor, batch: ForwardBatch) -> None:
        batch.hidden_states = layer(positions, batch.hidden_states, batch)

    def end(self, batch: ForwardBatch, norm: Any) -> torch.Tensor:
        return self._end(batch.hidden_states, batch, norm)


_Loop = _Pairs | _Stream

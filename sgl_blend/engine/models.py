"""The loaded model: its decoder layers, its KV pools and its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from sgl_blend.engine.objects import (
    AttentionBackend,
    AttentionLayer,
    DecoderLayer,
    ModelRunner,
    Scheduler,
)
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import LayerPools
from sgl_blend.kernels.row_compaction import compact_rows


def runner_of(scheduler: Scheduler) -> ModelRunner:
    """Return the model runner of a scheduler."""
    runner: ModelRunner = scheduler.tp_worker.model_runner
    return runner


def model_class(runner: ModelRunner) -> str:
    """Return the name of SGLang's class of the model."""
    return type(runner.model).__name__


WITH_IMAGES = ("LlavaForConditionalGeneration",)
"""SGLang's classes of a vision tower before a causal language model with plain positions, which is
blended. A forward with an image in it is SGLang's own."""


def text_model(runner: ModelRunner) -> Any:
    """Return the causal language model: the model, or the part of it that reads text."""
    model: Any = runner.model
    return model.language_model if model_class(runner) in WITH_IMAGES else model


def model_dtype(runner: ModelRunner) -> torch.dtype:
    """Return the dtype that the model computes in."""
    return runner.dtype


def hidden_size(runner: ModelRunner) -> int:
    """Return the width of the model's hidden states."""
    return int(runner.model_config.hidden_size)


def longest_prompt(runner: ModelRunner) -> int:
    """Return how many tokens the model's context holds."""
    return int(runner.model_config.context_len)


def decoder_layers(runner: ModelRunner) -> list[DecoderLayer]:
    """Return the decoder layers of a causal language model.

    Raises:
        UnsupportedError: The model cannot be run layer by layer.
    """
    model, kind = text_model(runner), model_class(runner)
    if not hasattr(model, "forward_split_prefill"):
        raise UnsupportedError(f"enable_blend: {kind} cannot be run layer by layer in this SGLang")
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not layers:
        raise UnsupportedError(f"enable_blend: {kind} has no decoder layers at model.layers")
    return list(layers)


def has_experts(module: Any) -> bool:
    """Tell whether a module is a mixture of experts, or holds one."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return any(isinstance(part, FusedMoE) for part in module.modules())


def row_modules(runner: ModelRunner, layer: DecoderLayer) -> list[tuple[Any, int]]:
    """Return what a decoder layer does to each row by itself: modules, and their input's width here.

    These are its linear modules, and the block of its experts as a whole: how long experts take
    depends on how rows are spread over them.
    """
    from sglang.srt.layers.linear import LinearBase

    found: list[tuple[Any, int]] = []
    for child in layer.children():
        parts = list(child.modules())
        if has_experts(child):
            found.append((child, hidden_size(runner)))
        else:
            found += [
                (part, int(getattr(part, "input_size_per_partition", part.input_size)))
                for part in parts
                if isinstance(part, LinearBase)
            ]
    return found


def query_heads(layer: DecoderLayer) -> int:
    """Return how many query heads a decoder layer has on this rank."""
    return int(layer.self_attn.attn.tp_q_head_num)


def layer_number(layer: AttentionLayer) -> int:
    """Return which of the model's layers attends, from 0."""
    return layer.layer_id


def softmax_scale(layer: AttentionLayer) -> float:
    """Return by what a layer multiplies its scores."""
    return layer.scaling


def split_heads(q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Return queries as [rows, heads, head_dim].

    Args:
        q: [rows, heads * head_dim], as a layer hands them to its attention.
        layer: The layer.
    """
    return q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)


def attention_backend(runner: ModelRunner) -> AttentionBackend:
    """Return the server's own way to attend."""
    backend: AttentionBackend = runner.attn_backend
    return backend


@contextmanager
def residual_rows(layer: DecoderLayer, kept_rows: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Let a decoder layer's residual follow an attention that returns fewer rows than it got.

    All supported models add the residual in the norm between attention and MLP, wherever they keep
    it until then.

    Args:
        layer: One of decoder_layers.
        kept_rows: Called when the attention has returned: the rows it kept.

    Raises:
        RuntimeError: The layer did not call its norm; its hidden states are of no use.
    """
    met = False

    def follow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal met
        hidden, residual, *more = args
        rows = kept_rows()
        assert hidden.shape[0] == rows.shape[0], "the attention selects"
        met = True
        return (hidden, compact_rows(rows, [residual])[0], *more), kwargs

    handle = layer.post_attention_layernorm.register_forward_pre_hook(follow, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not met:
        raise RuntimeError("sgl-blend: the norm after attention was not called as a module")


@contextmanager
def entering(module: Any, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run every call of a module inside a context of its own, for the time of a with block."""
    with ExitStack() as calls:

        def enter(*call: Any) -> None:
            calls.enter_context(context())

        def leave(*call: Any) -> None:
            calls.pop_all().close()

        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def around_logits(
    runner: ModelRunner, context: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Run the model's last step, from hidden states to logits, inside a context of its own."""
    with entering(text_model(runner).logits_processor, context):
        yield


def layer_pools(runner: ModelRunner) -> LayerPools:
    """Return the KV pools of all layers of a model runner."""
    pool = runner.token_to_kv_pool
    numbers = range(len(decoder_layers(runner)))
    return LayerPools(
        k=tuple(pool.get_key_buffer(number) for number in numbers),
        v=tuple(pool.get_value_buffer(number) for number in numbers),
    )

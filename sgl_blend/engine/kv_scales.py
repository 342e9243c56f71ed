"""Scales of a pool in 8 bit: what a checkpoint says its keys and values are multiplied by.

SGLang divides what it writes by a layer's scales and multiplies what it reads. Its backend in plain
torch does neither, so there stored values are as the model made them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_blend.engine.models import attention_backend, decoder_layers
from sgl_blend.engine.objects import AttentionBackend, AttentionLayer, ModelRunner
from sgl_blend.kernels.delta_rope import FP8_DTYPES

_WITHOUT_SCALES = ("TorchNativeAttnBackend",)


@dataclass(frozen=True, slots=True)
class KVScale:
    """What stored values of one layer are multiplied by to be those of the model.

    Attributes:
        k: For keys.
        v: For values.
    """

    k: float = 1.0
    v: float = 1.0


_ONE = KVScale()


def kv_scale(backend: AttentionBackend, layer: AttentionLayer) -> KVScale:
    """Return the scales of a layer's stored KV, as the server's own backend applies them."""
    if _tensors(backend, layer) is None:
        return _ONE
    k, v = layer.k_scale_float, layer.v_scale_float
    return KVScale(1.0 if k is None else k, 1.0 if v is None else v)


def layer_scales(runner: ModelRunner) -> list[KVScale]:
    """Return the scales of all layers."""
    backend = attention_backend(runner)
    return [kv_scale(backend, layer.self_attn.attn) for layer in decoder_layers(runner)]


def times(mixed: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what attention mixed from stored values, in the model's units."""
    return mixed if scale == 1.0 else mixed * scale


def write_scales(
    backend: AttentionBackend, layer: AttentionLayer
) -> tuple[torch.Tensor, torch.Tensor] | tuple[()]:
    """Return the further arguments with which a layer's KV is written: K and V scale, or nothing."""
    return _tensors(backend, layer) or ()


def _tensors(
    backend: AttentionBackend, layer: AttentionLayer
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if layer.k_scale is None or layer.v_scale is None:
        return None
    if type(backend).__name__ in _WITHOUT_SCALES:
        return None
    if backend.token_to_kv_pool.dtype not in FP8_DTYPES:
        return None
    return layer.k_scale, layer.v_scale

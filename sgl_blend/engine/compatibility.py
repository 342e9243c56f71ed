"""What is refused at start, by name: server features that would blend wrongly or were never tried.

Everything not listed is served; what cannot be blended for one request only drops that request's plan
(fallback.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from torch import nn

from sgl_blend.engine.adapters import serves_adapters
from sgl_blend.engine.models import WITH_IMAGES, has_experts, model_class, text_model
from sgl_blend.engine.objects import DecoderLayer, ModelRunner, ServerArgs
from sgl_blend.engine.tiers import MIN_PAGE_TOKENS, storage_keys_hold_namespaces
from sgl_blend.engine.versions import features
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import MOVABLE_DTYPES


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server setting that excludes blending.

    Attributes:
        flag: The flag to change, or NAME=VALUE of the environment variable.
        applies: Tells from SGLang's ServerArgs whether it is set.
        why: Completes the sentence "is not supported with enable_blend: ...".
    """

    flag: str
    applies: Callable[[Any], bool]
    why: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _rust_server_is_on() -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_RUST_SERVER.get())


def _lends_adapters(args: Any) -> bool:
    return bool(getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None))


def _drafts_with_a_model(args: Any) -> bool:
    algorithm = getattr(args, "speculative_algorithm", None)
    return bool(algorithm) and str(algorithm).upper() != "NGRAM"


_ROWS_MEET = "experts on several ranks exchange rows by counts that blending changes"
_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
_NO_CHECKS = "it replaces the process in which requests are checked"

REFUSALS = (
    Refusal(
        "--disable-radix-cache", _is_set("disable_radix_cache"), "chunks live in the radix tree"
    ),
    Refusal("--pp-size", _above_one("pp_size"), "the check layer may lie on another stage"),
    Refusal("--enable-dp-attention", _is_set("enable_dp_attention"), "row counts are padded"),
    Refusal("--ep-size", _above_one("ep_size"), _ROWS_MEET),
    Refusal(
        "--moe-a2a-backend",
        lambda args: getattr(args, "moe_a2a_backend", None) not in (None, "none"),
        _ROWS_MEET,
    ),
    Refusal("--moe-dp-size", _above_one("moe_dp_size"), _ROWS_MEET),
    Refusal("--enable-eplb", _is_set("enable_eplb"), "experts move while chunks are in use"),
    Refusal("--attn-cp-size", _above_one("attn_cp_size"), "rows are split over ranks"),
    Refusal("--dcp-size", _above_one("dcp_size"), "rows are split over ranks"),
    Refusal(
        "--speculative-algorithm",
        _drafts_with_a_model,
        "EAGLE and MTP need the hidden state of every row, other models that draft were never tried; "
        "NGRAM is served",
    ),
    Refusal(
        "--enable-lora-overlap-loading",
        _is_set("enable_lora_overlap_loading"),
        "adapters come while chunks are built with them",
    ),
    Refusal(
        "--enable-deterministic-inference",
        _is_set("enable_deterministic_inference"),
        "which tokens are recomputed depends on the cache",
    ),
    Refusal(
        "--enable-return-hidden-states",
        _is_set("enable_return_hidden_states"),
        "hidden states are cut out of a batch by row counts that blending changes",
    ),
    Refusal("--is-embedding", _is_set("is_embedding"), "pooling reads every row"),
    Refusal(
        "--disaggregation-mode",
        lambda args: getattr(args, "disaggregation_mode", None) not in (None, "null"),
        "prefill and decode on separate servers are not tested",
    ),
    Refusal(
        "--hicache-host-memory-mode",
        lambda args: getattr(args, "hicache_host_memory_mode", "cache") != "cache",
        "chunks stay in host memory only if it is a cache",
    ),
    Refusal(
        "--radix-eviction-policy",
        lambda args: getattr(args, "radix_eviction_policy", None) not in (None, "lru"),
        "fair shares between tenants need lru",
    ),
    Refusal(
        "--flashinfer-allreduce-fusion-backend",
        _is_set("flashinfer_allreduce_fusion_backend"),
        "residuals bypass the norm in which blending drops rows; "
        "add --enforce-disable-flashinfer-allreduce-fusion",
    ),
    Refusal(
        "--enable-aiter-allreduce-fusion",
        _is_set("enable_aiter_allreduce_fusion"),
        "residuals bypass the norm in which blending drops rows",
    ),
    Refusal(
        "--radix-cache-backend", _is_set("radix_cache_backend"), "only SGLang's own tree is known"
    ),
    Refusal("--enable-lmcache", _is_set("enable_lmcache"), "only SGLang's own tree is known"),
    Refusal("--enable-flexkv", _is_set("enable_flexkv"), "only SGLang's own tree is known"),
    Refusal(
        "--kv-cache-dtype",
        lambda args: getattr(args, "kv_cache_dtype", "auto") not in _KV_DTYPES,
        f"KV can be rotated in {', '.join(_KV_DTYPES[1:])}, not in blocks with scales of their own",
    ),
    Refusal("--enable-two-batch-overlap", _is_set("enable_two_batch_overlap"), "batches are split"),
    Refusal("--enable-single-batch-overlap", _is_set("enable_single_batch_overlap"), "untested"),
    Refusal("--enable-pdmux", _is_set("enable_pdmux"), "prefill runs in its own layer splits"),
    Refusal("--dllm-algorithm", _is_set("dllm_algorithm"), "there is no causal prefill"),
    Refusal(
        "--enable-return-routed-experts",
        _is_set("enable_return_routed_experts"),
        "rows are dropped",
    ),
    Refusal("--cpu-offload-gb", _is_set("cpu_offload_gb"), "layers are not run by model.forward"),
    Refusal("--enable-hisparse", _is_set("enable_hisparse"), "KV is not laid out per token"),
    Refusal(
        "--enable-streaming-session", _is_set("enable_streaming_session"), "slots outlive requests"
    ),
    Refusal(
        "--tokenizer-worker-num", _above_one("tokenizer_worker_num"), "its workers load no plugins"
    ),
    Refusal("--smg-grpc-mode", _is_set("smg_grpc_mode"), _NO_CHECKS),
    Refusal("--grpc-mode", _is_set("grpc_mode"), _NO_CHECKS),
    Refusal("SGLANG_RUST_SERVER=1", lambda args: _rust_server_is_on(), _NO_CHECKS),
)
"""Flags, and one environment variable. SGLang's native gRPC port (--grpc-port) is served: its requests
go through the same checks as HTTP requests."""


def _stores(args: Any) -> bool:
    return bool(getattr(args, "hicache_storage_backend", None))


STORAGE_REFUSALS = (
    Refusal(
        "--hicache-storage-backend",
        lambda args: _stores(args) and not storage_keys_hold_namespaces(),
        "the storage keys of this SGLang do not hold the tenant; 0.5.21 has such keys",
    ),
    Refusal(
        "--page-size",
        lambda args: _stores(args) and (getattr(args, "page_size", None) or 1) < MIN_PAGE_TOKENS,
        f"with a storage backend, pages must have at least {MIN_PAGE_TOKENS} tokens",
    ),
    Refusal(
        "--kv-cache-dtype",
        lambda args: _stores(args) and str(getattr(args, "kv_cache_dtype", "")).startswith("fp8"),
        "with a storage backend, KV in 8 bit is not written yet; a host tier alone holds it",
    ),
    Refusal(
        "--lora-paths",
        lambda args: _stores(args) and _lends_adapters(args),
        "with a storage backend, pages name the model's weights and not those of an adapter",
    ),
)
"""Refused with a storage backend. The rest is refused when it is made (engine/storage.py)."""


MODELS: dict[str, str] = {
    "ArceeForCausalLM": "AFM",
    "GemmaForCausalLM": "Gemma (the first)",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Glm4MoeForCausalLM": "GLM-4.5 to 4.7, mixture of experts",
    "LlamaForCausalLM": "Llama 2, 3.x, and all that are built as they are",
    "LlavaForConditionalGeneration": "Mistral Small 3.1 and 3.2; prompts with images in full",
    "MiniMaxM2ForCausalLM": "MiniMax-M2, mixture of experts",
    "Ministral3ForCausalLM": "Ministral 3",
    "MistralForCausalLM": "Mistral without a sliding window",
    "MixtralForCausalLM": "Mixtral, mixture of experts",
    "Phi3ForCausalLM": "Phi-3, Phi-4 without longrope",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE, Qwen3-Coder",
}
"""SGLang's model classes that are blended, and what they serve. Tests of law L1 run on each.

A class of SGLang may serve several architectures, and one architecture may be served by another class
(--model-impl transformers), so what counts is the class that was loaded. Close relatives of these are
refused until a test proves them.
"""

NOT_TESTED: dict[str, tuple[str, ...]] = {"LlavaForConditionalGeneration": ("0.5.23",)}
"""Classes of MODELS, and versions of SGLang on which no test has started them. The vision tower of
0.5.23 wants a newer transformers than the versions that are tested have in common."""


def check_server_args(server_args: ServerArgs) -> None:
    """Refuse settings that exclude blending.

    Raises:
        UnsupportedError: One is set; the message names the flag.
    """
    for refusal in (*REFUSALS, *STORAGE_REFUSALS):
        if refusal.applies(server_args):
            raise UnsupportedError(
                f"{refusal.flag} is not supported with enable_blend: {refusal.why}"
            )


def check_configuration(server_args: ServerArgs, check_layer: int) -> None:
    """Refuse a model by its configuration alone, before anything is loaded.

    Raises:
        UnsupportedError: SGLang would serve it by a class that was never blended, or it has too few
            layers.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        config = ModelConfig.from_server_args(server_args)
    except (OSError, ValueError):
        return  # SGLang says itself what is wrong with it
    kinds = config.hf_config.architectures or []
    # The class of a vision model may hold another, which is known when it is loaded.
    if kinds and not config.is_multimodal and not any(kind in MODELS for kind in kinds):
        raise _not_served(kinds[0])
    _check_layers_above(check_layer, config.num_hidden_layers)


def _not_served(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"enable_blend: models of class {kind} are not supported, only {', '.join(MODELS)}; "
        "start this server without --enable-blend"
    )


def _check_layers_above(check_layer: int, num_layers: int) -> None:
    if check_layer >= num_layers - 1:
        raise UnsupportedError(
            f"blend_check_layer must be below the last of {num_layers} layers, got {check_layer}"
        )


def check_model(runner: ModelRunner) -> None:
    """Refuse a model of a class that was never blended.

    Raises:
        UnsupportedError: The message names the class and those that are served.
    """
    kind = model_class(runner)
    if (installed := version("sglang")) in NOT_TESTED.get(kind, ()):
        raise UnsupportedError(
            f"enable_blend: models of class {kind} are not tested with SGLang {installed}"
        )
    if kind in WITH_IMAGES:
        kind = type(text_model(runner)).__name__
    if kind not in MODELS:
        raise _not_served(kind)


def check_runner(runner: ModelRunner, check_layer: int) -> None:
    """Refuse models and KV pools that cannot be blended, once they are loaded.

    Raises:
        UnsupportedError: The model or pool is of a kind the fusor cannot serve.
    """
    config = runner.model_config
    _check_layers_above(check_layer, config.num_hidden_layers)
    pool = type(runner.token_to_kv_pool).__name__
    if pool != "MHATokenToKVPool":
        raise UnsupportedError(f"enable_blend: KV pool {pool} is not supported")
    keys = runner.token_to_kv_pool.get_key_buffer(0)
    if keys.dim() != 3 or keys.dtype not in MOVABLE_DTYPES:
        raise UnsupportedError(
            f"enable_blend: KV pool of {keys.dtype} with {keys.dim()} dimensions is not supported"
        )
    if config.is_multimodal and model_class(runner) not in WITH_IMAGES:
        raise UnsupportedError("enable_blend: multimodal models are not supported")


def check_adapters(runner: ModelRunner, layers: Sequence[DecoderLayer]) -> None:
    """Refuse adapters where no test has shown them.

    Raises:
        UnsupportedError: There are adapters, and experts or an SGLang that mixes adapter and tenant.
    """
    if not serves_adapters(runner):
        return
    why = None
    if any(has_experts(layer) for layer in layers):
        why = "adapters of a mixture of experts are not tested"
    elif model_class(runner) in WITH_IMAGES:
        why = "adapters of a vision model are not tested"
    elif not features().keys_have_salt:
        why = "in this SGLang an adapter is a part of the cache salt; 0.5.21 keeps them apart"
    if why is not None:
        raise UnsupportedError(f"--enable-lora is not supported with enable_blend: {why}")


def check_layers(layers: Sequence[DecoderLayer]) -> None:
    """Refuse decoder layers whose attention is more than causal softmax attention.

    Raises:
        UnsupportedError: A layer has a sliding window, a logit cap or its own attention kind, or no
            norm between attention and MLP.
    """
    for index, layer in enumerate(layers):
        attention = getattr(getattr(layer, "self_attn", None), "attn", None)
        if type(attention).__name__ != "RadixAttention":
            raise UnsupportedError(f"enable_blend: layer {index} has no plain self-attention")
        assert attention is not None
        if attention.sliding_window_size not in (None, -1):
            raise UnsupportedError(f"enable_blend: layer {index} has a sliding window")
        if attention.logit_cap:
            raise UnsupportedError(f"enable_blend: layer {index} caps its attention logits")
        if attention.attn_type.value != "decoder" or attention.is_cross_attention:
            raise UnsupportedError(f"enable_blend: layer {index} is not causal self-attention")
        if not isinstance(getattr(layer, "post_attention_layernorm", None), nn.Module):
            raise UnsupportedError(f"enable_blend: layer {index} has no post_attention_layernorm")

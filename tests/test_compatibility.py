"""What is refused at start, held against SGLang's real flags, so that a renamed one is noticed."""

import argparse
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from law_prompts import SERVED_KINDS
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from tiny_models import class_of

from sgl_blend.engine.compatibility import (
    MODELS,
    NOT_TESTED,
    REFUSALS,
    STORAGE_REFUSALS,
    Refusal,
    check_layers,
    check_model,
    check_runner,
    check_server_args,
)
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import MOVABLE_DTYPES

# Flags that take a value, and one that blending cannot be combined with.
VALUES = {
    "--tp-size": "2",
    "--pp-size": "2",
    "--dp-size": "2",
    "--attn-cp-size": "2",
    "--dcp-size": "2",
    "--ep-size": "2",
    "--moe-a2a-backend": "deepep",
    "--moe-dp-size": "2",
    "--speculative-algorithm": "EAGLE",
    "--disaggregation-mode": "prefill",
    "--hicache-storage-backend": "file",
    "--hicache-host-memory-mode": "buffer_only",
    "--radix-eviction-policy": "lfu",
    "--flashinfer-allreduce-fusion-backend": "trtllm",
    "--radix-cache-backend": "other",
    "--kv-cache-dtype": "mxfp8",
    "--dllm-algorithm": "LowConfidence",
    "--cpu-offload-gb": "4",
    "--tokenizer-worker-num": "2",
}


def test_the_laws_are_tested_on_every_class_that_is_served() -> None:
    assert {class_of(kind) for kind in SERVED_KINDS} == set(MODELS)


FLAGS = [refusal for refusal in REFUSALS if refusal.flag.startswith("--")]
VARIABLES = [refusal for refusal in REFUSALS if refusal not in FLAGS]

each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.flag))
each_flag = pytest.mark.parametrize("refusal", FLAGS, ids=lambda refusal: str(refusal.flag))
each_variable = pytest.mark.parametrize("refusal", VARIABLES, ids=lambda refusal: str(refusal.flag))


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def parse(parser: argparse.ArgumentParser, *flags: str) -> argparse.Namespace:
    return parser.parse_args(["--model-path", "model", *flags])


class Recorder:
    """Stands in for ServerArgs and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> None:
        self.asked.add(name)


@each_flag
def test_the_flag_exists_and_setting_it_is_refused_by_name(
    refusal: Refusal, parser: argparse.ArgumentParser
) -> None:
    assert refusal.flag in parser._option_string_actions
    flags = [refusal.flag, *([VALUES[refusal.flag]] if refusal.flag in VALUES else [])]

    with pytest.raises(
        UnsupportedError, match=f"^{refusal.flag} is not supported with enable_blend: "
    ) as caught:
        check_server_args(parse(parser, *flags))

    assert str(caught.value).endswith(refusal.why)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "ngram"])
def test_only_drafts_without_a_model_are_served(
    algorithm: str, parser: argparse.ArgumentParser
) -> None:
    args = parse(parser, "--speculative-algorithm", algorithm)
    if algorithm == "ngram":
        check_server_args(args)
    else:
        with pytest.raises(UnsupportedError, match=r"^--speculative-algorithm is not supported"):
            check_server_args(args)


@each_variable
def test_the_variable_exists_and_setting_it_is_refused_by_name(
    refusal: Refusal, parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = refusal.flag.split("=")
    assert hasattr(envs, name)
    monkeypatch.setenv(name, value)

    with pytest.raises(UnsupportedError, match=f"^{refusal.flag} is not supported"):
        check_server_args(parse(parser))


@each_flag
def test_the_attribute_it_reads_exists(refusal: Refusal) -> None:
    # getattr with a default hides a renamed field: the refusal would be disarmed without a word.
    recorder = Recorder()

    refusal.applies(recorder)

    assert recorder.asked
    assert recorder.asked <= {field.name for field in msgspec.structs.fields(ServerArgs)}


@each_refusal
def test_no_refusal_fires_on_sglangs_defaults(
    refusal: Refusal, parser: argparse.ArgumentParser
) -> None:
    defaults = {
        field.name: field.default
        for field in msgspec.structs.fields(ServerArgs)
        if field.default is not msgspec.NODEFAULT
    }
    assert not refusal.applies(SimpleNamespace(**defaults))
    assert not refusal.applies(parse(parser))


def test_stock_arguments_pass(parser: argparse.ArgumentParser) -> None:
    check_server_args(parse(parser))


@pytest.mark.parametrize("dtype", ["auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_kv_that_can_be_moved_passes(dtype: str, parser: argparse.ArgumentParser) -> None:
    check_server_args(parse(parser, "--kv-cache-dtype", dtype))


def test_every_other_kv_dtype_of_sglang_is_refused(parser: argparse.ArgumentParser) -> None:
    choices = parser._option_string_actions["--kv-cache-dtype"].choices
    assert choices
    for dtype in set(choices) - {"auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"}:
        with pytest.raises(UnsupportedError, match=r"^--kv-cache-dtype is not supported"):
            check_server_args(parse(parser, "--kv-cache-dtype", dtype))


def test_no_flag_is_listed_twice() -> None:
    flags = [refusal.flag for refusal in REFUSALS]
    assert len(flags) == len(set(flags))


# With a storage backend


@pytest.mark.parametrize("size", [None, 1, 8, 15])
def test_small_pages_are_refused_with_a_storage_backend(size: int | None) -> None:
    args = SimpleNamespace(hicache_storage_backend="file", page_size=size)
    assert [refusal.flag for refusal in STORAGE_REFUSALS if refusal.applies(args)] == [
        "--page-size"
    ]
    args.hicache_storage_backend = None
    assert not [refusal for refusal in STORAGE_REFUSALS if refusal.applies(args)]


def test_kv_in_8_bit_is_refused_with_a_storage_backend() -> None:
    args = SimpleNamespace(hicache_storage_backend="file", page_size=16, kv_cache_dtype="fp8_e5m2")
    (refused,) = [refusal for refusal in STORAGE_REFUSALS if refusal.applies(args)]
    assert "KV in 8 bit is not written yet" in refused.why
    args.kv_cache_dtype = "auto"
    assert not refused.applies(args)
    args.hicache_storage_backend, args.kv_cache_dtype = None, "fp8_e5m2"
    assert not refused.applies(args)


def test_storage_keys_without_the_tenant_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import utils

    args = SimpleNamespace(hicache_storage_backend="file", page_size=16)
    assert not [refusal for refusal in STORAGE_REFUSALS if refusal.applies(args)]
    monkeypatch.delattr(utils, "get_storage_hash_str")  # as on 0.5.17
    (refused,) = [refusal for refusal in STORAGE_REFUSALS if refusal.applies(args)]
    assert "do not hold the tenant" in refused.why
    args.hicache_storage_backend = None
    assert not refused.applies(args)


# The loaded model

PlainPool = type("MHATokenToKVPool", (SimpleNamespace,), {})


def runner(
    *,
    num_layers: int = 8,
    pool: Any = PlainPool,
    keys: torch.Tensor | None = None,
    multimodal: bool = False,
) -> Any:
    stored = torch.zeros(4, 2, 8) if keys is None else keys
    return SimpleNamespace(
        model_config=SimpleNamespace(num_hidden_layers=num_layers, is_multimodal=multimodal),
        token_to_kv_pool=pool(get_key_buffer=lambda layer: stored),
        model=SimpleNamespace(),
    )


@pytest.mark.parametrize("dtype", MOVABLE_DTYPES, ids=str)
def test_a_plain_model_passes(dtype: torch.dtype) -> None:
    check_runner(runner(keys=torch.zeros(4, 2, 8).to(dtype)), 1)


def test_the_check_layer_may_be_the_last_but_one_and_no_later() -> None:
    check_runner(runner(num_layers=4), 2)
    for layer in (3, 4, 100):
        with pytest.raises(
            UnsupportedError, match=f"^blend_check_layer must be below .* 4 layers, got {layer}$"
        ):
            check_runner(runner(num_layers=4), layer)


def test_another_kv_pool_is_refused() -> None:
    for name in ("MLATokenToKVPool", "SWAKVPool", "MHATokenToKVPoolFP4"):
        other = type(name, (PlainPool,), {})
        with pytest.raises(UnsupportedError, match=f"KV pool {name} is not supported"):
            check_runner(runner(pool=other), 1)


@pytest.mark.parametrize(
    "keys",
    [
        torch.zeros(4, 2, 8, dtype=torch.uint8),
        torch.zeros(4, 2, 8, dtype=torch.int32),
        torch.zeros(4, 16),
    ],
    ids=lambda keys: f"{keys.dtype} {keys.dim()}d",
)
def test_keys_that_cannot_be_rotated_are_refused(keys: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"KV pool of torch\.\w+ with \d dimensions is not"):
        check_runner(runner(keys=keys), 1)


def test_a_class_is_refused_with_a_version_that_no_test_has_started_it_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (kind, versions), *_ = NOT_TESTED.items()
    model = type(kind, (SimpleNamespace,), {})(language_model=type("LlamaForCausalLM", (), {})())
    check_model(SimpleNamespace(model=model))
    monkeypatch.setattr("sgl_blend.engine.compatibility.version", lambda name: versions[0])
    with pytest.raises(UnsupportedError, match=f"{kind} are not tested with SGLang {versions[0]}"):
        check_model(SimpleNamespace(model=model))


def test_a_multimodal_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="multimodal models are not supported"):
        check_runner(runner(multimodal=True), 1)


RadixAttention = type("RadixAttention", (SimpleNamespace,), {})


def layer(**changes: Any) -> Any:
    attention = {
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "attn_type": SimpleNamespace(value="decoder"),
        "is_cross_attention": False,
        **changes,
    }
    return SimpleNamespace(
        self_attn=SimpleNamespace(attn=RadixAttention(**attention)),
        post_attention_layernorm=torch.nn.Identity(),
    )


def test_plain_causal_layers_pass() -> None:
    check_layers([layer(), layer(sliding_window_size=None)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_size": 4096}, "layer 1 has a sliding window"),
        ({"logit_cap": 30.0}, "layer 1 caps its attention logits"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "layer 1 is not causal self-att"),
        ({"is_cross_attention": True}, "layer 1 is not causal self-attention"),
    ],
    ids=str,
)
def test_a_layer_that_attends_otherwise_is_refused_by_number(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"^enable_blend: {message}"):
        check_layers([layer(), layer(**changes), layer()])


@pytest.mark.parametrize(
    "stranger",
    [SimpleNamespace(), SimpleNamespace(self_attn=SimpleNamespace(attn=object()))],
    ids=["no attention", "attention of another kind"],
)
def test_a_layer_without_sglangs_attention_is_refused(stranger: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"^enable_blend: layer 0 has no plain self-attention"
    ):
        check_layers([stranger])


def test_a_layer_whose_residual_cannot_follow_is_refused() -> None:
    strange = layer()
    del strange.post_attention_layernorm
    with pytest.raises(UnsupportedError, match="layer 1 has no post_attention_layernorm"):
        check_layers([layer(), strange])

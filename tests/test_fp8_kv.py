"""KV in 8 bit, with scales and without: law tests run on it, and what differs is here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from graph_stand_in import with_graphs
from harness import Driver, Prompt, largest_difference
from law_prompts import full_prefill, scattered
from pushed_out import ask_warm, settings
from sparse_path import (
    TOLERANCE,
    assert_drops_and_is_full_prefill,
    assert_keeps_all_and_is_full_prefill,
    on_all_rows,
    on_true_kv,
)
from test_laws import rows_to_recompute

from sgl_blend.kernels.kv_deviation import kv_deviation
from sgl_blend.policies.deviation import k_deviation, v_deviation
from sgl_blend.policies.spec import LayerView

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

DTYPES = pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
K_SCALE, V_SCALE = 0.5, 0.25  # powers of two: nothing is rounded otherwise than without them
BETWEEN_CODES = 1e-2
"""The law's bound here. A value between two codes of 8 bit falls to either side by the last bit of
float32, which depends on how many rows a product has. A scale left out makes 0.1 and more of it."""


@contextmanager
def with_scales(driver: Driver) -> Iterator[None]:
    """Let layers have scales, and SGLang's backend in torch apply them, as those of a GPU do."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sgl_blend.engine import kv_scales
    from sgl_blend.engine.models import decoder_layers, runner_of

    def scaled(stock: Any) -> Any:
        def forward(
            backend: Any,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            batch: Any,
            save_kv_cache: bool = True,
        ) -> torch.Tensor:
            if save_kv_cache:
                pool, place = backend.token_to_kv_pool, batch.out_cache_loc
                scales = layer.k_scale, layer.v_scale
                kv_heads = layer.tp_k_head_num
                heads = [x.reshape(len(place), kv_heads, -1).clone() for x in (k, v)]
                pool.set_kv_buffer(layer, place, *heads, *scales)
            mixed: torch.Tensor = stock(
                backend, q * K_SCALE, k, v, layer, batch, save_kv_cache=False
            )
            return mixed * V_SCALE

        return forward

    layers = [layer.self_attn.attn for layer in decoder_layers(runner_of(driver.scheduler))]
    for layer in layers:
        layer.k_scale, layer.v_scale = torch.tensor(K_SCALE), torch.tensor(V_SCALE)
        layer.k_scale_float, layer.v_scale_float = K_SCALE, V_SCALE
    backend = TorchNativeAttnBackend
    with (
        patch.object(kv_scales, "_WITHOUT_SCALES", ()),
        patch.object(backend, "forward_extend", scaled(backend.forward_extend)),
        patch.object(backend, "forward_decode", scaled(backend.forward_decode)),
    ):
        yield
    for layer in layers:
        layer.k_scale = layer.v_scale = layer.k_scale_float = layer.v_scale_float = None


def _with_scales(driver: Driver, way: Any, *args: Any) -> Any:
    with with_scales(driver):
        return way(driver, *args)


@DTYPES
@pytest.mark.parametrize(
    "policy", ["hkvd", "hkvd-k", "gradual", "funnel", "query-aware", "oracle", "first-k"]
)
def test_l1_holds_with_scales(start_engine: StartEngine, dtype: str, policy: str) -> None:
    engine = start_engine(
        f"llama+{dtype}", blend_on_miss="build", blend_eval=True, chunked_prefill_size=-1
    )
    params = {"sgl_blend_ratio": 0.4, "sgl_blend_policy": policy}
    prompt = scattered(params=params, max_new_tokens=3)

    wrong = rows_to_recompute(policy, 0.4)
    dropped = engine.call(_with_scales, on_true_kv, [prompt], None, wrong)
    kept = engine.call(_with_scales, on_all_rows, [prompt])

    assert_drops_and_is_full_prefill(dropped, BETWEEN_CODES)
    assert_keeps_all_and_is_full_prefill(kept, BETWEEN_CODES)


@DTYPES
def test_l1_holds_with_scales_through_graphs(start_engine: StartEngine, dtype: str) -> None:
    engine = start_engine(
        f"llama+{dtype}", blend_on_miss="build", blend_eval=True, chunked_prefill_size=-1
    )
    params = {"sgl_blend_ratio": 0.3, "sgl_blend_policy": "hkvd"}
    prompt = scattered(params=params, max_new_tokens=3)

    dropped, replays = engine.call(_with_scales, with_graphs, on_true_kv, [prompt])

    assert_drops_and_is_full_prefill(dropped, BETWEEN_CODES)
    assert replays == 1


def _scores_of_true_kv(driver: Driver, prompt: Prompt) -> list[float]:
    """Return what hkvd measures where the stored KV is what a full prefill gives."""
    from sgl_blend.fusion.attention import BlendAttention

    seen: list[float] = []
    original = BlendAttention._scores

    def scores(backend: Any, *args: Any) -> Any:
        found = original(backend, *args)
        for group in found.values():
            seen.extend(group.tolist())
        return found

    with patch.object(BlendAttention, "_scores", scores):
        on_true_kv(driver, [prompt])
    return seen


@DTYPES
@pytest.mark.parametrize("policy", ["hkvd", "hkvd-k"])
def test_rounding_is_no_deviation(start_engine: StartEngine, dtype: str, policy: str) -> None:
    engine = start_engine(f"llama+{dtype}", blend_on_miss="build", chunked_prefill_size=-1)
    params = {"sgl_blend_ratio": 0.4, "sgl_blend_policy": policy}

    scores = engine.call(_scores_of_true_kv, scattered(params=params))

    assert len(scores) > 100
    assert sum(score == 0.0 for score in scores) >= 0.99 * len(scores)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_deviations_are_in_the_units_of_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k_pool, v_pool = (torch.randn(8, 2, 16) for _ in range(2))
    fresh, stored = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])
    k_stored, v_stored = (k_pool / K_SCALE).to(dtype), (v_pool / V_SCALE).to(dtype)
    view = LayerView(
        q=k_pool[:0],
        k=k_stored,
        v=v_stored,
        k_pool=k_stored,
        v_pool=v_stored,
        rows=fresh,
        stored_slots=stored,
        rotation=(torch.ones(3, 8), torch.zeros(3, 8), True),
        positions=fresh,
        question=range(0),
        own_slots=lambda: fresh,
        scale=1.0,
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )

    for score, pool, scale in (
        (k_deviation, k_stored, K_SCALE),
        (v_deviation, v_stored, V_SCALE),
    ):
        real = pool.float() * scale
        torch.testing.assert_close(score(view), kv_deviation(real[fresh], real[stored]))


def _graphs_after_new_scales(driver: Driver) -> list[int]:
    from graph_stand_in import give_graphs

    give_graphs(driver)
    runtime = driver.scheduler.sgl_blend
    with with_scales(driver):
        runtime.weights_changed()
        found = list(runtime.describe()["cuda_graph_rows"])
    runtime._fusor.graphs = None
    return found


def test_graphs_are_given_up_when_scales_change(start_engine: StartEngine) -> None:
    assert start_engine("llama+fp8_e4m3").call(_graphs_after_new_scales) == []


@DTYPES
def test_evicted_chunks_come_back(start_engine: StartEngine, dtype: str) -> None:
    engine = start_engine(**settings(kv_cache_dtype=dtype))
    warm = engine.call(ask_warm, "device")
    back = engine.call(ask_warm, "host")

    assert (warm.answer.report["chunk_hits"], warm.answer.report["host_tokens"]) == (3, 0)
    assert back.answer.report == {**warm.answer.report, "host_tokens": 200}
    assert back.answer.logprobs == warm.answer.logprobs


def test_what_moving_keys_costs_is_told_apart(start_engine: StartEngine) -> None:
    engine = start_engine(
        "llama+fp8_e4m3", blend_on_miss="build", blend_eval=True, chunked_prefill_size=-1
    )
    lost = {}
    for policy in ("exact-hkvd", "moved-hkvd", "hkvd"):
        prompt = scattered(params={"sgl_blend_ratio": 0.15, "sgl_blend_policy": policy})
        answer, full = engine.ask(prompt)[0], full_prefill(engine, prompt)
        assert answer.report["reused_tokens"] > 0
        lost[policy] = largest_difference(answer.logprobs[0], full.logprobs[0])
    assert lost["exact-hkvd"] <= TOLERANCE
    assert 100 * TOLERANCE < lost["moved-hkvd"] < lost["hkvd"] / 4

"""LoRA: a chunk belongs to its adapter, and adapters follow the rows that are left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from canary_traffic import kl
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Engine, Prompt, largest_difference, rag_prompt, random_tokens
from law_prompts import CHUNKS, QUESTION, SYSTEM, full_prefill, scattered
from sparse_path import (
    TOLERANCE,
    assert_drops_and_is_full_prefill,
    assert_keeps_all_and_is_full_prefill,
    on_all_rows,
    on_true_kv,
)
from tiny_models import COMMON

from benchmarks import soak_models
from sgl_blend.engine.versions import features

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

NAMES = ("one", "two")


def make_adapter(path: Path, seed: int) -> Path:
    """Write an adapter of all linear modules of the tiny model; return its folder."""
    return soak_models.make_adapter(path, seed, COMMON)


@pytest.fixture(scope="module")
def adapters(model_folder: Path) -> list[str]:
    return [
        f"{name}={make_adapter(model_folder / f'adapter-{name}', seed)}"
        for seed, name in enumerate(NAMES)
    ]


def ids_of(driver: Driver) -> dict[str, str]:
    manager = driver.scheduler.tp_worker.model_runner.lora_manager
    return {ref.lora_name: ref.lora_id for ref in manager.lora_refs.values()}


def start(start_engine: StartEngine, adapters: list[str], **settings: Any) -> Engine:
    if not features().keys_have_salt:
        pytest.skip("adapters are refused in this SGLang")
    return start_engine(
        enable_lora=True,
        lora_paths=adapters,
        lora_backend="torch_native",
        **{
            "max_loras_per_batch": 3,
            "blend_on_miss": "build",
            "chunked_prefill_size": -1,
            **settings,
        },
    )


@pytest.mark.parametrize("name", [*NAMES, None])
def test_l1_holds_with_an_adapter(
    start_engine: StartEngine, adapters: list[str], name: str | None
) -> None:
    engine = start(start_engine, adapters)
    adapter = None if name is None else engine.call(ids_of)[name]
    for ratio in (0.0, 0.15):
        params = {"sgl_blend_ratio": ratio}
        prompt = scattered(params=params, max_new_tokens=3, adapter=adapter)
        assert_drops_and_is_full_prefill(engine.call(on_true_kv, [prompt]))
    assert_keeps_all_and_is_full_prefill(engine.call(on_all_rows, [prompt]))


def test_adapters_change_answers(start_engine: StartEngine, adapters: list[str]) -> None:
    # Without this, the laws would also hold for adapters that nobody applies.
    engine = start(start_engine, adapters)
    ids = engine.call(ids_of)
    found = [
        full_prefill(engine, scattered(adapter=adapter)).logprobs[0]
        for adapter in (None, ids["one"], ids["two"])
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert largest_difference(found[one], found[other]) > 100 * TOLERANCE


def _of_several(engine: Engine, policy: str) -> list[Prompt]:
    ids = engine.call(ids_of)
    prompts = []
    for number, adapter in enumerate((ids["one"], None, ids["two"], ids["one"])):
        chunks = [random_tokens(300 + 10 * number + i, 50 + 8 * i) for i in range(3)]
        segments = [SYSTEM, chunks[0], random_tokens(400 + number, 11), *chunks[1:], QUESTION]
        params = {"sgl_blend_ratio": 0.2, "sgl_blend_policy": policy}
        prompts.append(Prompt(segments, [1, 3, 4], params, adapter=adapter, max_new_tokens=3))
    return prompts


@pytest.mark.parametrize("policy", ["hkvd", "gradual", "funnel", "remembered", "query-aware"])
def test_l1_holds_in_a_batch_of_several_adapters(
    start_engine: StartEngine, adapters: list[str], policy: str
) -> None:
    engine = start(start_engine, adapters)
    prompts = _of_several(engine, policy)

    dropped, kept = engine.call(on_true_kv, prompts), engine.call(on_all_rows, prompts)

    assert_drops_and_is_full_prefill(dropped)
    assert_keeps_all_and_is_full_prefill(kept)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 128},
        {"chunked_prefill_size": 128, "enable_mixed_chunk": True},
        {"disable_overlap_schedule": False, "chunked_prefill_size": 128},
    ],
    ids=["cut", "mixed", "overlap"],
)
def test_l1_holds_for_several_adapters_whatever_shares_a_batch(
    start_engine: StartEngine, adapters: list[str], settings: dict[str, Any]
) -> None:
    engine = start(start_engine, adapters, **settings)

    got = engine.call(on_true_kv, _of_several(engine, "funnel"))

    assert_drops_and_is_full_prefill(got)


@pytest.mark.parametrize("on_miss", ["build", "compute"])
def test_a_chunk_belongs_to_its_adapter(
    start_engine: StartEngine, adapters: list[str], on_miss: str
) -> None:
    engine = start(start_engine, adapters, blend_on_miss=on_miss)
    ids = engine.call(ids_of)
    engine.flush()
    alone = {}
    for name in (None, *NAMES):
        adapter = None if name is None else ids[name]
        engine.ask(_moved(adapter, order=(0, 2, 3)))
        engine.settle()
        alone[name] = engine.ask(_moved(adapter))[0]
        assert alone[name].report["chunk_hits"] == 3
        engine.flush()

    for name in (None, *NAMES):
        first = engine.ask(_moved(None if name is None else ids[name], order=(0, 2, 3)))[0]
        if on_miss == "compute":
            assert first.report["chunk_hits"] == 0, "KV of another adapter was reused"
        engine.settle()
    for name in (None, *NAMES):
        again = engine.ask(_moved(None if name is None else ids[name]))[0]
        assert again.report == alone[name].report
        assert again.logprobs == alone[name].logprobs


def _moved(adapter: str | None, order: tuple[int, ...] = (3, 0, 2), **rest: Any) -> Prompt:
    params = {"sgl_blend_ratio": 0.15, "sgl_blend_policy": "hkvd"}
    chunks = [CHUNKS[number] for number in order]
    return rag_prompt(SYSTEM, chunks, QUESTION, params=params, adapter=adapter, **rest)


def _chunk_and_prefill(driver: Driver, adapter: str | None) -> tuple[list[Any], list[Any]]:
    """Return the stored KV of a chunk after its prefix, and what a request has of the same tokens."""
    path = [*SYSTEM, *CHUNKS[2]]
    driver.flush()
    driver.ask(_moved(adapter, order=(0, 2, 3)))
    driver.settle()
    driver.ask(Prompt([path], adapter=adapter, salt="prefilled"))
    return (
        driver.kv(path, driver.chunk_salt(), adapter),
        driver.kv(path, "prefilled", adapter),
    )


@pytest.mark.parametrize("on_miss", ["build", "compute"])
@pytest.mark.parametrize("name", [*NAMES, None])
def test_a_chunk_is_built_with_its_adapter(
    start_engine: StartEngine, adapters: list[str], name: str | None, on_miss: str
) -> None:
    engine = start(start_engine, adapters, blend_on_miss=on_miss)
    adapter = None if name is None else engine.call(ids_of)[name]
    for stored, prefilled in zip(*engine.call(_chunk_and_prefill, adapter), strict=True):
        for one, other in zip(stored, prefilled, strict=True):
            torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


def test_a_class_that_pretends_to_an_adapter_is_served_in_full(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    engine = start(start_engine, adapters, blend_on_miss="compute")
    adapter = engine.call(ids_of)["one"]
    engine.flush()
    engine.ask(_moved(adapter, order=(0, 2, 3)))
    engine.settle()

    pretender = engine.ask(_moved(None, extra_key=adapter))[0]

    assert pretender.report["fallback"] == "malformed"
    assert pretender.report["reused_tokens"] == 0
    want = full_prefill(engine, _moved(None))
    assert largest_difference(pretender.logprobs[0], want.logprobs[0]) <= TOLERANCE


def _reload(driver: Driver, name: str, path: str) -> list[str]:
    """Unload an adapter and load other weights under its name; return the ids before and after."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

    before = ids_of(driver)[name]
    scheduler = driver.scheduler
    gone = scheduler.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name, lora_id=before))
    assert gone.success, gone.error_message
    new = LoRARef(lora_name=name, lora_path=path)
    there = scheduler.load_lora_adapter(
        LoadLoRAAdapterReqInput(lora_name=name, lora_path=path, lora_id=new.lora_id)
    )
    assert there.success, there.error_message
    return [before, ids_of(driver)[name]]


def test_a_replaced_adapter_meets_nothing_of_the_old_one(
    start_engine: StartEngine, adapters: list[str], model_folder: Path
) -> None:
    engine = start(start_engine, adapters, blend_on_miss="compute", max_loaded_loras=8)
    adapter = engine.call(ids_of)["two"]
    engine.flush()
    engine.ask(_moved(adapter, order=(0, 2, 3)))
    engine.ask(
        rag_prompt(
            SYSTEM, [random_tokens(70 + i, 900) for i in range(3)], QUESTION, adapter=adapter
        )
    )
    # Some of those builds are pending now, for an adapter that goes.
    other = make_adapter(model_folder / "adapter-other", 9)
    before, after = engine.call(_reload, "two", str(other))
    assert before == adapter != after
    engine.settle()

    first = engine.ask(_moved(after, order=(0, 2, 3)))[0]
    assert first.report["chunk_hits"] == 0
    engine.settle()
    again = engine.ask(_moved(after))[0]

    assert again.report["chunk_hits"] == 3
    ratio_one = _moved(after)
    ratio_one.params = {"sgl_blend_ratio": 1.0}
    got, want = engine.ask(ratio_one)[0], full_prefill(engine, ratio_one)
    assert largest_difference(got.logprobs[0], want.logprobs[0]) <= TOLERANCE


@pytest.mark.skipif(features().keys_have_salt, reason="adapters are served in this SGLang")
def test_adapters_are_refused_where_they_are_part_of_the_salt(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    with pytest.raises(AssertionError, match=r"--enable-lora is not supported .* cache salt"):
        start_engine(enable_lora=True, lora_paths=adapters, lora_backend="torch_native")


def test_experts_with_adapters_are_refused(start_engine: StartEngine, adapters: list[str]) -> None:
    with pytest.raises(
        AssertionError, match=r"--enable-lora is not supported .* mixture of experts"
    ):
        start_engine(
            "qwen3-moe",
            enable_lora=True,
            lora_paths=[],
            lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            max_lora_rank=soak_models.RANK,
            lora_backend="torch_native",
        )


def test_builds_of_several_adapters_share_no_rows(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    engine = start(start_engine, adapters)
    ids = engine.call(ids_of)
    prompts = [_moved(ids["one"]), _moved(None), _moved(ids["two"]), _moved(ids["one"], salt="b")]
    engine.flush()
    alone = []
    for prompt in prompts:
        alone.append(engine.ask(prompt)[0])
        engine.flush()

    together = engine.ask(*prompts)  # every one of them waits for its builds

    for got, want in zip(together, alone, strict=True):
        assert got.report == want.report
        assert largest_difference(got.logprobs[0], want.logprobs[0]) <= TOLERANCE


def _mean_kl(driver: Driver, prompts: list[Prompt]) -> tuple[int, float]:
    for prompt in prompts:
        driver.ask(prompt)
        driver.settle()
    figures = driver.runtime.describe()["canary"]
    return figures["compared"], figures["mean_kl"]


def test_the_canary_compares_with_the_same_adapter(
    start_engine: StartEngine, adapters: list[str]
) -> None:
    engine = start(
        start_engine,
        adapters,
        blend_recompute_ratio=0.95,  # as good as a full prefill, and is compared
        blend_canary_rate=1.0,
        blend_canary_max_kl=1000.0,
    )
    adapter = engine.call(ids_of)["one"]
    prompts = [_moved(adapter), _moved(adapter, order=(2, 3, 0)), _moved(adapter, order=(0, 3, 2))]
    for prompt in prompts:
        prompt.params = {}  # by the server's own settings

    compared, mean_kl = engine.call(_mean_kl, prompts)

    assert compared >= 2
    assert mean_kl < 0.5
    base, other = (full_prefill(engine, _moved(name)).logprobs[0] for name in (None, adapter))
    assert kl(other, base) > 2.0, "an adapter that is left out would not be seen"

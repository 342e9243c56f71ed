"""The canary on SGLang's real scheduler: what it picks, measures and switches off.

Every scheduler test ends in Driver.settle, where SGLang's strict memory check raises on a leak, and
the driver raises where anything of a shadow is streamed.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from canary_traffic import (
    NEVER_TRIPS,
    OWN,
    PAIRS,
    ask_in_turn,
    begin,
    counted_since,
    figures_of,
    kl,
    rag,
)
from eight_chunks import CHUNKS, QUESTION, SYSTEM
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, rag_prompt, random_tokens
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

# --- off by default ---


def _batches_after_a_blended_answer(driver: Driver) -> tuple[bool, Any, int]:
    driver.ask(rag(0, 1))
    driver.settle()
    before = driver.num_batches
    answer = driver.ask(rag(1, 0))[0]
    driver.settle()
    assert answer.report["reused_tokens"] > 0
    described = driver.runtime.describe()["canary"]
    return driver.runtime.canary is None, described, driver.num_batches - before


def test_without_a_rate_there_is_no_canary_and_no_batch_of_its_own(
    start_engine: StartEngine,
) -> None:
    absent, described, batches = start_engine().call(_batches_after_a_blended_answer)
    assert (absent, described, batches) == (True, None, 1)


# --- which requests ---


def test_the_rate_is_kept_exactly(start_engine: StartEngine) -> None:
    engine = start_engine(**OWN, blend_canary_rate=0.1, blend_canary_max_kl=1000.0)

    answers, counted = engine.call(ask_in_turn, [rag(*pair) for pair in PAIRS[:20]])

    assert all(answer.report["reused_tokens"] > 0 for answer in answers)
    assert counted == (2, 0)  # a float that grows by 0.1 is below 1 after ten


def test_requests_that_reuse_nothing_are_not_compared(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    prompts = [
        rag(2, 1, ratio=1.0),
        Prompt([random_tokens(5, 90)]),
        rag_prompt(SYSTEM, [CHUNKS[3], CHUNKS[1]], QUESTION, params={"sgl_blend": False}),
    ]

    answers, counted = engine.call(ask_in_turn, prompts)

    assert all(answer.report["reused_tokens"] == 0 for answer in answers)
    assert counted == (0, 0)


def test_requests_with_settings_of_their_own_are_not_compared(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    others = [{"sgl_blend_policy": "none"}, {"sgl_blend_ratio": 0.1}, {"sgl_blend_slo_ms": 5}]
    asked = [*others, {"sgl_blend_ratio": 0.0}, {}]
    prompts = [
        rag_prompt(SYSTEM, [CHUNKS[i] for i in pair], QUESTION, params=params)
        for pair, params in zip(PAIRS[:5], asked, strict=True)
    ]

    answers, counted = engine.call(ask_in_turn, prompts)

    assert all(answer.report["reused_tokens"] > 0 for answer in answers)
    assert counted == (2, 0)


def _ask_at_once(driver: Driver, prompts: list[Prompt]) -> tuple[int, int]:
    before = begin(driver)
    answers = driver.ask(*prompts)
    assert all(answer.report["reused_tokens"] > 0 for answer in answers)
    return counted_since(driver, before)


def test_more_than_eight_are_never_held(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_ask_at_once, [rag(*pair) for pair in PAIRS[:12]]) == (8, 4)


# --- what is measured ---


def _blended_and_full(
    driver: Driver, prompts: list[Prompt]
) -> tuple[list[Answer], list[Answer], dict[str, Any]]:
    """Return blended answers, answers of full prefills, and what the canary made of them."""
    blended, _ = ask_in_turn(driver, prompts)
    figures = figures_of(driver)
    full = [driver.ask(Prompt([prompt.tokens], salt="reference"))[0] for prompt in prompts]
    driver.settle()
    return blended, full, figures


@pytest.mark.parametrize(
    ("ratio", "settings"), [(0.0, {}), (0.15, {"chunked_prefill_size": 64, "page_size": 16})]
)
def test_the_kl_is_that_of_the_two_answers(
    start_engine: StartEngine, ratio: float, settings: dict[str, int]
) -> None:
    own = {"blend_recompute_ratio": ratio, "blend_canary_max_kl": 999.0}
    engine = start_engine(**own, blend_canary_rate=1.0, **settings)
    prompts = [rag(*chunks, ratio=ratio) for chunks in ((3, 0, 5, 1), (2, 6, 4), (7, 3, 1))]

    blended, full, figures = engine.call(_blended_and_full, prompts)

    assert all(answer.report["reused_tokens"] > 0 for answer in blended)
    assert figures["compared"] == 3
    want = [kl(f.logprobs[0], b.logprobs[0]) for f, b in zip(full, blended, strict=True)]
    assert min(want) > 1e-3, "the answers hardly differ, the test shows nothing"
    assert figures["mean_kl"] == pytest.approx(sum(want) / 3, rel=1e-3)
    same = [f.output_ids == b.output_ids for f, b in zip(full, blended, strict=True)]
    assert figures["agreement"] == pytest.approx(sum(same) / 3)

    # A sampler with a temperature turns logits into probabilities in place.
    engine.call(ask_in_turn, [replace(prompt, temperature=0.6) for prompt in prompts])
    again = engine.call(figures_of)
    assert again["compared"] == 6
    assert again["mean_kl"] == pytest.approx(figures["mean_kl"], rel=1e-3)


def _where_a_shadow_leaves_kv(driver: Driver, prompt: Prompt) -> tuple[Any, Any, list[int]]:
    before = begin(driver, salt="a")
    driver.ask(prompt)
    assert counted_since(driver, before) == (1, 0)
    shadow = driver.kv(prompt.tokens, "a")
    driver.ask(Prompt([prompt.tokens], salt="reference"))
    full = driver.kv(prompt.tokens, "reference")
    others = [
        driver.ask(Prompt([prompt.tokens], salt=salt))[0].report["prefix_tokens"]
        for salt in (None, "b")
    ]
    driver.settle()
    return shadow, full, others


def test_a_shadow_leaves_exact_kv_and_only_to_its_client(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)

    shadow, full, others = engine.call(_where_a_shadow_leaves_kv, rag(1, 0, salt="a"))

    for (k1, v1), (k2, v2) in zip(shadow, full, strict=True):
        torch.testing.assert_close(k1, k2, rtol=0, atol=1e-4)
        torch.testing.assert_close(v1, v2, rtol=0, atol=1e-4)
    assert others == [0, 0]


# --- the switch ---


def _serve_until_it_trips(driver: Driver, num_requests: int) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sgl_blend.scheduler.canary").addHandler(handler)
    begin(driver)
    tripped = []
    for pair in PAIRS[:num_requests]:
        answer = driver.ask(rag(*pair))[0]
        assert answer.report["fallback"] is None
        driver.settle()
        tripped.append(driver.runtime.canary.describe()["tripped"])
    last = rag(7, 6, 5, max_new_tokens=4)
    late = driver.submit(last)
    driver.run_until(late.finished)
    full = driver.ask(Prompt([last.tokens], salt="reference", max_new_tokens=4))[0]
    driver.settle()
    return {
        "tripped": tripped,
        "late": driver.answer(late),
        "full": full,
        "lines": lines,
        "totals": driver.runtime.describe(),
        "off": driver.ask(Prompt([random_tokens(8, 40)]))[0].report["fallback"],
    }


def test_blending_switches_itself_off_and_says_so(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    engine = start_engine(
        **OWN,
        blend_canary_rate=0.5,
        blend_canary_max_kl=1e-6,
        enable_metrics=True,
        served_model_name="m",
    )

    seen = engine.call(_serve_until_it_trips, 16)

    assert seen["tripped"] == [False] * 15 + [True]  # at the eighth comparison
    late, full = seen["late"], seen["full"]
    assert late.report["fallback"] == "canary"
    assert late.report["reused_tokens"] == late.report["chunk_hits"] == 0
    assert late.output_ids == full.output_ids
    for got, want in zip(late.logprobs, full.logprobs, strict=True):
        assert largest_difference(got, want) <= 1e-4
    (line,) = seen["lines"]
    assert "--blend-canary-max-kl allows 1e-06" in line
    assert seen["off"] == "no_chunks"  # a request it does not concern
    totals = seen["totals"]
    assert totals["fallbacks"]["canary"] == 1
    canary = totals["canary"]
    assert (canary["rate"], canary["max_kl"], canary["tripped"]) == (0.5, 1e-6, True)
    assert (canary["compared"], canary["skipped"], canary["pending"]) == (8, 0, 0)

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"sgl_blend:canary_{name}", {"model_name": "m"})

    assert value("compared_total") == value("kl_count") == 8
    assert value("agreed_total") == round(8 * canary["agreement"])
    assert value("kl_sum") == pytest.approx(8 * canary["mean_kl"])
    assert value("skipped_total") == 0
    assert value("tripped") == 1


def test_blending_goes_on_below_the_limit(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)

    seen = engine.call(_serve_until_it_trips, 12)

    assert not any(seen["tripped"])
    assert seen["late"].report["fallback"] is None
    assert seen["lines"] == []


def _trip_with_work_pending(driver: Driver) -> tuple[int, int]:
    begin(driver)
    driver.ask(*[rag(*pair) for pair in PAIRS[:8]])
    canary, builder = driver.runtime.canary, driver.runtime.builder
    driver.run_until(lambda: canary.num_pending == 0, limit=10**5)
    # The eighth comparison comes in the next round. What is missing meanwhile is not built then.
    builder.enqueue(
        driver.submit(rag_prompt(SYSTEM, [random_tokens(66, 90)], QUESTION)).sgl_blend.keys
    )
    driver.scheduler.waiting_queue.clear()
    before = builder.num_built
    driver.settle()
    assert canary.describe()["tripped"]
    return before, builder.num_built


def test_nothing_is_built_once_blending_is_off(start_engine: StartEngine) -> None:
    engine = start_engine(**OWN, blend_canary_rate=1.0, blend_canary_max_kl=2e-6)
    before, after = engine.call(_trip_with_work_pending)
    assert before == after

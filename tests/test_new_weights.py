"""New weights that keep the cache: KV of old ones stands in the clients' exact namespaces."""

from pathlib import Path
from typing import Any

import pytest
from canary_traffic import NEVER_TRIPS, begin, counted_since, figures_of, kl, rag
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, random_tokens
from orders import order
from test_orders import OVERLAP, other_weights, settings
from tiny_models import make_model

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _compared_after_an_update(driver: Driver, own: str, other: str) -> dict[str, float]:
    """Let the canary compare a blended answer where old KV of the same prompt is stored."""
    begin(driver)
    wanted = rag(3, 1, 2)
    driver.ask(Prompt([wanted.tokens]))  # by the old weights
    driver.settle()
    with other_weights(driver, own, other):
        driver.ask(rag(*range(8)))
        driver.settle()
        before = figures_of(driver)
        blended = driver.ask(wanted)[0]
        driver.settle()
        after = figures_of(driver)
        full = driver.ask(Prompt([wanted.tokens], salt="reference"))[0]
        driver.settle()
    compared = after["compared"] - before["compared"]
    whole = after["mean_kl"] * min(after["compared"], 100)
    if before["compared"]:
        whole -= before["mean_kl"] * before["compared"]
    return {"compared": compared, "kl": whole, "true": kl(full.logprobs[0], blended.logprobs[0])}


def test_the_canary_compares_with_the_present_weights(
    start_engine: StartEngine, model_folder: Path
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(**NEVER_TRIPS)
    seen = engine.call(_compared_after_an_update, str(model_folder / "llama"), str(other))
    assert seen["compared"] == 1
    assert seen["kl"] == pytest.approx(seen["true"], rel=1e-3)


def _picked_across_an_update(driver: Driver, own: str, other: str) -> tuple[int, int, int]:
    """Change the weights in the middle of a blended prefill."""
    before = begin(driver)
    req = driver.submit(rag(4, 2, 5, 1))
    driver.run_until(lambda: driver.scheduler.chunked_req is req)
    driver.run_until(lambda: driver.answer(req).report["reused_tokens"] > 0)
    with other_weights(driver, own, other):
        driver.run_until(req.finished)
        picked = len(driver.runtime.canary._picked)
        counted = counted_since(driver, before)
    return (picked, *counted)


def test_a_request_of_two_models_is_not_picked(
    start_engine: StartEngine, model_folder: Path
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(**NEVER_TRIPS, **settings(False))
    seen = engine.call(_picked_across_an_update, str(model_folder / "llama"), str(other))
    assert seen == (0, 0, 0)


def _prefixes(driver: Driver, model: str, flush: bool) -> tuple[int, int]:
    """Return what of a plain prompt's beginning is found, before an update and after it."""

    def ask() -> int:
        driver.ask(Prompt([[*rag(0).tokens[:-20], *range(30, 60)]]))
        driver.settle()
        found = driver.ask(rag(0, 5))[0].report["prefix_tokens"]
        driver.settle()
        return int(found)

    driver.settle()
    driver.flush()
    before = ask()
    driver.settle()
    fields: dict[str, Any] = {"model_path": model, "load_format": "auto", "flush_cache": flush}
    assert order(driver, "UpdateWeightFromDiskReqInput", **fields).success
    after = ask()
    driver.flush()
    return before, after


@pytest.mark.parametrize("flush", [True, False])
def test_after_an_update_with_a_flush_the_exact_namespace_serves_at_once(
    start_engine: StartEngine, model_folder: Path, flush: bool
) -> None:
    engine = start_engine()
    before, after = engine.call(_prefixes, str(make_model("llama", model_folder)), flush)
    assert before > len(rag(0).tokens) - 40
    assert (after == before) == flush


def _logprobs_across_an_update(driver: Driver, own: str, other: str) -> tuple[Any, Any]:
    """Two equal prompts wait while the weights change; one wants the logprobs of all tokens."""
    driver.settle()
    driver.flush()
    long = driver.submit(Prompt([random_tokens(870, 500)], logprobs=False))
    driver.run_until(lambda: driver.scheduler.chunked_req is long)
    wanted = rag(0, 1)
    wanted.logprob_start_len = 0
    reqs = [driver.submit(rag(0, 1)), driver.submit(wanted)]
    with other_weights(driver, own, other):
        driver.run_until(lambda: all(req.finished() for req in reqs))
        answer = driver.answer(reqs[1])
        driver.settle()
        reference = Prompt([wanted.tokens], salt="reference", logprob_start_len=0)
        full = driver.ask(reference)[0]
        driver.settle()
    return answer, full


@OVERLAP
def test_logprobs_of_a_prompt_survive_new_weights(
    start_engine: StartEngine, model_folder: Path, overlap: bool
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(chunked_prefill_size=256, disable_overlap_schedule=not overlap)
    answer, full = engine.call(_logprobs_across_an_update, str(model_folder / "llama"), str(other))
    assert len(answer.input_logprobs) == len(full.input_logprobs)
    assert answer.input_logprobs == pytest.approx(full.input_logprobs, abs=1e-3)


def _back_to_the_first_weights(driver: Driver, own: str, other: str, flush: bool) -> Any:
    """Change the weights during a prefill and back again, and ask for what that prefill left."""

    def update(path: str, *, flush: bool) -> None:
        fields = {"model_path": path, "load_format": "auto", "flush_cache": flush}
        assert order(driver, "UpdateWeightFromDiskReqInput", **fields).success

    driver.settle()
    for path in (other, own):  # other tests may have left a fingerprint that was drawn
        update(path, flush=True)
        driver.ask(Prompt([random_tokens(872, 30)]))
        driver.settle()
    first = driver.runtime.describe()["model_fingerprint"]
    req = driver.submit(rag(*range(8), ratio=1.0))
    driver.run_until(lambda: driver.scheduler.chunked_req is req)
    update(other, flush=False)
    driver.run_until(req.finished)
    driver.settle()
    driver.ask(Prompt([random_tokens(871, 30)]))  # so the other weights are known by their own name
    driver.settle()
    update(own, flush=flush)
    answer = driver.ask(rag(*range(8), ratio=1.0))[0]
    control = driver.ask(rag(*range(8), ratio=1.0, salt="control"))[0]
    driver.settle()
    last = driver.runtime.describe()["model_fingerprint"]
    driver.flush()
    return answer.logprobs[0], control.logprobs[0], first == last


@pytest.mark.parametrize("flush", [False, True])
def test_weights_that_come_back_find_no_kv_of_two_models(
    start_engine: StartEngine, model_folder: Path, flush: bool
) -> None:
    other = make_model("llama", model_folder / "other", seed=1)
    engine = start_engine(chunked_prefill_size=256)
    own = str(make_model("llama", model_folder))
    answer, control, same = engine.call(_back_to_the_first_weights, own, str(other), flush)
    assert answer == pytest.approx(control, abs=1e-3)
    assert same == flush, "a flushed server finds its chunks in storage again"


def _weights_after_the_checker(driver: Driver, action: str) -> tuple[int, int]:
    driver.settle()
    before = driver.runtime.describe()["weight_updates"]
    driver.ask(rag(0, 1))
    driver.settle()
    order(driver, "CheckWeightsReqInput", action=action)
    report = driver.ask(rag(1, 0))[0].report
    driver.settle()
    return driver.runtime.describe()["weight_updates"] - before, report["chunk_hits"]


@pytest.mark.parametrize(("action", "changed"), [("checksum", False), ("reset_tensors", True)])
def test_the_weight_checker_may_change_all_weights(
    start_engine: StartEngine, action: str, changed: bool
) -> None:
    engine = start_engine(blend_policy="hkvd-k")  # nobody else wants these weights
    updates, hits = engine.call(_weights_after_the_checker, action)
    assert updates == changed
    assert hits == (0 if changed else 2)

"""The canary on SGLang's real scheduler: what it picks, measures, leaves alone and switches off.

Every scheduler test ends in Driver.settle, where SGLang's strict memory check raises on a leak, and
the driver raises where anything of a shadow is streamed.
"""

import inspect
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, rag_prompt, random_tokens
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from sgl_blend.scheduler.canary import compare

__all__ = ["model_folder", "start_engine"]  # fixtures

engine_test = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 80) for i in range(8)]
QUESTION = random_tokens(99, 20)
PAIRS = [(a, b) for a in range(1, 8) for b in range(a)]
"""Chunks of prompts no two of which begin alike further than behind their first chunk."""

NEVER_TRIPS: dict[str, float] = {"blend_canary_rate": 1.0, "blend_canary_max_kl": 1000.0}

logits_rows = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40)


def rag(*numbers: int, ratio: float = 0.0, **rest: Any) -> Prompt:
    params = {"sgl_blend_ratio": ratio}
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, params=params, **rest)


def kl(full: list[float], blended: list[float]) -> float:
    """KL(full || blended) of two rows of log-probabilities."""
    return math.fsum(math.exp(p) * (p - q) for p, q in zip(full, blended, strict=True))


# --- the comparison ---


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - top - total for x in logits]


@given(logits_rows, st.randoms())
def test_kl_is_that_of_the_softmax(full: list[float], draw: Any) -> None:
    blended = [draw.uniform(-30, 30) for _ in full]

    got = compare(torch.tensor(full), torch.tensor(blended))

    want = kl(log_softmax(full), log_softmax(torch.tensor(blended).tolist()))
    assert got.kl == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert got.kl >= 0


@given(logits_rows, st.floats(-5, 5))
def test_logits_that_differ_by_a_constant_are_equal(full: list[float], shift: float) -> None:
    row = torch.tensor(full, dtype=torch.float64)
    got = compare(row, row + shift)
    assert got.kl == pytest.approx(0, abs=1e-12)


def test_a_row_agrees_with_itself_to_the_last_digit() -> None:
    row = torch.randn(1000)
    got = compare(row, row.clone())
    assert (got.kl, got.agrees) == (0.0, True)


def test_agreement_is_about_the_likeliest_token() -> None:
    full = torch.tensor([0.0, 3.0, 1.0])
    assert compare(full, torch.tensor([2.9, 3.0, 0.0])).agrees
    assert not compare(full, torch.tensor([3.1, 3.0, 0.0])).agrees


def test_tokens_that_both_exclude_do_not_count() -> None:
    full = torch.tensor([1.0, -math.inf, 2.0])
    assert compare(full, full.clone()).kl == 0


def test_a_token_that_only_blending_excludes_is_infinitely_far() -> None:
    full = torch.tensor([1.0, 1.0, 2.0])
    assert compare(full, torch.tensor([1.0, -math.inf, 2.0])).kl == math.inf


def test_logits_that_are_no_numbers_are_infinitely_far() -> None:
    full = torch.tensor([1.0, 1.0])
    assert compare(full, torch.tensor([1.0, math.nan])).kl == math.inf


# --- off by default ---


def _batches_behind_a_blended_answer(driver: Driver) -> tuple[bool, Any, int]:
    driver.ask(rag(0, 1))
    driver.settle()
    before = driver.num_batches
    answer = driver.ask(rag(1, 0))[0]
    driver.settle()
    assert answer.report["reused_tokens"] > 0
    described = driver.runtime.describe()["canary"]
    return driver.runtime.canary is None, described, driver.num_batches - before


@engine_test
def test_without_a_rate_there_is_no_canary_and_no_batch_of_its_own(
    start_engine: StartEngine,
) -> None:
    absent, described, batches = start_engine().call(_batches_behind_a_blended_answer)
    assert (absent, described, batches) == (True, None, 1)


# --- which requests ---


def _figures(driver: Driver) -> dict[str, Any]:
    figures: dict[str, Any] = driver.runtime.describe()["canary"]
    return figures


def _begin(driver: Driver, *, salt: str | None = None) -> Counter[str]:
    """Empty the cache, store every chunk alone in it, and return the counts so far."""
    driver.settle()
    driver.flush()
    driver.ask(rag(*range(8), salt=salt))  # nothing is stored yet, so the canary leaves it alone
    driver.settle()
    return _counts(driver)


def _counts(driver: Driver) -> Counter[str]:
    figures = _figures(driver)
    return Counter({name: figures[name] for name in ("compared", "skipped")})


def _counted_since(driver: Driver, before: Counter[str]) -> tuple[int, int]:
    """Return how many requests were compared and skipped."""
    driver.settle()
    counts = _counts(driver)
    return counts["compared"] - before["compared"], counts["skipped"] - before["skipped"]


def _ask_in_turn(driver: Driver, prompts: list[Prompt]) -> tuple[list[Answer], tuple[int, int]]:
    before = _begin(driver)
    answers = []
    for prompt in prompts:
        answers.append(driver.ask(prompt)[0])
        driver.settle()
    return answers, _counted_since(driver, before)


@engine_test
def test_the_rate_is_kept_exactly(start_engine: StartEngine) -> None:
    engine = start_engine(blend_canary_rate=0.1, blend_canary_max_kl=1000.0)

    answers, counted = engine.call(_ask_in_turn, [rag(*pair) for pair in PAIRS[:20]])

    assert all(answer.report["reused_tokens"] > 0 for answer in answers)
    assert counted == (2, 0)  # a float that grows by 0.1 is below 1 after ten


@engine_test
def test_requests_that_reuse_nothing_are_not_compared(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    prompts = [
        rag(2, 1, ratio=1.0),
        Prompt([random_tokens(5, 90)]),
        rag_prompt(SYSTEM, [CHUNKS[3], CHUNKS[1]], QUESTION, params={"sgl_blend": False}),
    ]

    answers, counted = engine.call(_ask_in_turn, prompts)

    assert all(answer.report["reused_tokens"] == 0 for answer in answers)
    assert counted == (0, 0)


def _ask_at_once(driver: Driver, prompts: list[Prompt]) -> tuple[int, int]:
    before = _begin(driver)
    answers = driver.ask(*prompts)
    assert all(answer.report["reused_tokens"] > 0 for answer in answers)
    return _counted_since(driver, before)


@engine_test
def test_more_than_eight_are_never_held(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_ask_at_once, [rag(*pair) for pair in PAIRS[:12]]) == (8, 4)


# --- what is measured ---


def _blended_and_full(
    driver: Driver, prompts: list[Prompt]
) -> tuple[list[Answer], list[Answer], dict[str, Any]]:
    """Return blended answers, answers of full prefills, and what the canary made of them."""
    blended, _ = _ask_in_turn(driver, prompts)
    figures = _figures(driver)
    full = [driver.ask(Prompt([prompt.tokens], salt="reference"))[0] for prompt in prompts]
    driver.settle()
    return blended, full, figures


@engine_test
@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 64, "page_size": 16}], ids=str)
def test_the_kl_is_that_of_the_two_answers(
    start_engine: StartEngine, settings: dict[str, int]
) -> None:
    engine = start_engine(blend_canary_rate=1.0, blend_canary_max_kl=999.0, **settings)
    prompts = [rag(3, 0, 5, 1), rag(2, 6, 4, ratio=0.15), rag(7, 3, 1, ratio=0.5)]

    blended, full, figures = engine.call(_blended_and_full, prompts)

    assert all(answer.report["reused_tokens"] > 0 for answer in blended)
    assert figures["compared"] == 3
    want = [kl(f.logprobs[0], b.logprobs[0]) for f, b in zip(full, blended, strict=True)]
    assert min(want) > 1e-3, "the answers hardly differ, the test shows nothing"
    assert figures["mean_kl"] == pytest.approx(sum(want) / 3, rel=1e-3)
    same = [f.output_ids == b.output_ids for f, b in zip(full, blended, strict=True)]
    assert figures["agreement"] == pytest.approx(sum(same) / 3)

    # A sampler with a temperature turns logits into probabilities in place.
    engine.call(_ask_in_turn, [replace(prompt, temperature=0.6) for prompt in prompts])
    again = engine.call(_figures)
    assert again["compared"] == 6
    assert again["mean_kl"] == pytest.approx(figures["mean_kl"], rel=1e-3)


def _where_a_shadow_leaves_kv(driver: Driver, prompt: Prompt) -> tuple[Any, Any, list[int]]:
    before = _begin(driver, salt="a")
    driver.ask(prompt)
    assert _counted_since(driver, before) == (1, 0)
    shadow = driver.kv(prompt.tokens, "a")
    driver.ask(Prompt([prompt.tokens], salt="reference"))
    full = driver.kv(prompt.tokens, "reference")
    others = [
        driver.ask(Prompt([prompt.tokens], salt=salt))[0].report["prefix_tokens"]
        for salt in (None, "b")
    ]
    driver.settle()
    return shadow, full, others


@engine_test
def test_a_shadow_leaves_exact_kv_and_only_to_its_client(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)

    shadow, full, others = engine.call(_where_a_shadow_leaves_kv, rag(1, 0, salt="a"))

    for (k1, v1), (k2, v2) in zip(shadow, full, strict=True):
        torch.testing.assert_close(k1, k2, rtol=0, atol=1e-4)
        torch.testing.assert_close(v1, v2, rtol=0, atol=1e-4)
    assert others == [0, 0]


# --- in nobody's way ---


def _a_request_that_waits(driver: Driver) -> tuple[bool, int, tuple[int, int]]:
    before = _begin(driver)
    driver.ask(rag(1, 0))
    time.sleep(0.1)  # longer than background work keeps quiet
    req = driver.submit(Prompt([random_tokens(5, 30)]))
    driver.step()
    pending = driver.runtime.canary.num_pending
    return bool(req.finished()), pending, _counted_since(driver, before)


@engine_test
def test_a_waiting_request_goes_before_a_shadow(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_a_request_that_waits) == (True, 1, (1, 0))


def _a_request_between_two_steps(driver: Driver) -> tuple[int, list[int]]:
    """Send a request behind a shadow's first step; return when it was done, and the steps' sizes."""
    from sgl_blend.engine.requests import step_range

    before = _begin(driver)
    sizes: list[int] = []

    def step() -> None:
        driver.step()
        batch = driver.scheduler.last_batch
        own = [req for req in batch.reqs if req.rid.startswith("sgl-blend-")] if batch else []
        if own:
            assert len(batch.reqs) == 1, "a shadow shared its batch"
            assert driver.scheduler.chunked_req is None, "a shadow was cut"
            start, stop = step_range(own[0])
            sizes.append(stop - start)

    def step_until(done: Callable[[], bool]) -> int:
        for rounds in range(10**5):
            if done():
                return rounds
            step()
        raise AssertionError("not done after 100,000 rounds")

    canary = driver.runtime.canary
    driver.ask(rag(1, 0, 2))
    step_until(lambda: len(sizes) == 1)
    req = driver.submit(Prompt([random_tokens(5, 30)]))
    rounds = step_until(req.finished)
    assert _counts(driver) == before
    step_until(lambda: canary.num_pending == 0 and not canary.is_running)
    assert _counted_since(driver, before) == (1, 0)
    return rounds, sizes


@engine_test
def test_a_request_waits_for_one_step_of_a_shadow_at_most(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, chunked_prefill_size=128)
    rounds, sizes = engine.call(_a_request_between_two_steps)
    assert rounds == 1
    assert sizes == [128, 128, 44]  # 300 tokens


def _steps_while_another_decodes(driver: Driver) -> list[bool]:
    """Tell for each round in which a request decodes whether a shadow ran in it instead."""
    before = _begin(driver)
    driver.ask(rag(1, 0, 2))
    decoding = driver.submit(Prompt([random_tokens(3, 30)], max_new_tokens=400))
    driver.run_until(lambda: driver.runtime.canary.is_running, limit=10**5)
    rounds = []
    while _counts(driver) == before:
        assert not decoding.finished()
        rounds.append(driver.runtime.canary.is_running)
        driver.step()
    driver.run_until(decoding.finished)
    driver.settle()
    return rounds


@engine_test
def test_requests_decode_between_the_steps_of_a_shadow(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, chunked_prefill_size=128)
    rounds = engine.call(_steps_while_another_decodes)
    assert sum(rounds) == 3  # 300 tokens
    assert not any(a and b for a, b in itertools.pairwise(rounds))


def _a_request_that_turns_up(driver: Driver, place: int) -> tuple[list[str], tuple[int, int]]:
    """Queue a request beside an offered shadow, as SGLang does when a grammar is compiled."""
    before = _begin(driver)
    driver.ask(rag(1, 0))
    time.sleep(0.1)
    canary, scheduler = driver.runtime.canary, driver.scheduler
    offer = canary.offer

    def offer_beside_a_request(now: Any) -> bool:
        is_free = bool(offer(now))
        assert len(scheduler.waiting_queue) == 1, "no shadow was offered"
        scheduler.waiting_queue.insert(place, driver.submit(Prompt([random_tokens(5, 30)])))
        scheduler.waiting_queue.pop()
        return is_free

    canary.offer = offer_beside_a_request
    try:
        driver.step()
    finally:
        canary.offer = offer
    first = [req.rid.split("-")[0] for req in scheduler.last_batch.reqs]
    return first, _counted_since(driver, before)


@engine_test
@pytest.mark.parametrize(("place", "first"), [(0, "test"), (1, "sgl")])
def test_a_shadow_shares_its_batch_with_nobody(
    start_engine: StartEngine, place: int, first: str
) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_a_request_that_turns_up, place) == ([first], (1, 0))


def _chunks_and_shadows_pending(driver: Driver) -> list[str]:
    _begin(driver)
    fresh = rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[2], random_tokens(70, 80)], QUESTION)
    driver.ask(fresh)
    assert driver.runtime.builder.num_pending == 1
    assert driver.runtime.canary.num_pending == 1
    ran = []
    for _ in range(10**5):
        if not driver.runtime.builder.num_pending and not driver.runtime.canary.num_pending:
            break
        if driver.step():
            ran += [req.rid.split("-")[2] for req in driver.scheduler.last_batch.reqs]
    driver.settle()
    return [kind for kind in ran if kind in ("build", "shadow")]


@engine_test
def test_missing_chunks_are_built_before_shadows_run(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)
    assert engine.call(_chunks_and_shadows_pending) == ["build", "shadow"]


# --- dropped ---


def _shadow_without_room(driver: Driver) -> tuple[bool, tuple[int, int]]:
    before = _begin(driver)
    driver.ask(rag(1, 0))
    large = driver.submit(Prompt([random_tokens(6, 1000)], max_new_tokens=250))
    driver.run_until(lambda: driver.runtime.canary.num_pending == 0, limit=10**5)
    decoding = not large.finished()
    driver.run_until(large.finished)
    return decoding, _counted_since(driver, before)


@engine_test
def test_a_shadow_that_does_not_fit_is_dropped(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, max_total_tokens=1300, chunked_prefill_size=256)
    decoding, counted = engine.call(_shadow_without_room)
    assert decoding, "the pool was free again, the test shows nothing"
    assert counted == (0, 1)


def _serve_under_pressure(driver: Driver) -> tuple[int, tuple[int, int]]:
    before = _counts(driver)
    blended = 0
    for turn in range(30):
        a, b, c, d = ((turn * 3 + i * 5) % 8 for i in range(4))
        prompts = [rag(a, b, c, d, max_new_tokens=9), rag(d, c, b, a, salt="b", max_new_tokens=9)]
        blended += sum(answer.report["reused_tokens"] > 0 for answer in driver.ask(*prompts))
        time.sleep(0.06)
        for _ in range(turn % 5):
            driver.step()
        if turn % 3 == 0:
            driver.settle()
    return blended, _counted_since(driver, before)


@engine_test
def test_every_picked_request_is_compared_or_counted_as_skipped(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS, max_total_tokens=1300, chunked_prefill_size=256)
    blended, (compared, skipped) = engine.call(_serve_under_pressure)
    assert compared > 5
    assert compared + skipped == blended


def _flush_with_a_pending_shadow(driver: Driver) -> tuple[int, int]:
    before = _begin(driver)
    driver.ask(rag(1, 0))
    assert driver.runtime.canary.num_pending == 1
    driver.step()  # the request's batch is cleared away
    driver.flush()
    return _counted_since(driver, before)


@engine_test
def test_a_flush_drops_pending_shadows(start_engine: StartEngine) -> None:
    assert start_engine(**NEVER_TRIPS).call(_flush_with_a_pending_shadow) == (0, 1)


def _flush_behind_a_shadow(driver: Driver) -> tuple[bool, tuple[int, int]]:
    before = _begin(driver)
    driver.ask(rag(1, 0))
    driver.run_until(lambda: driver.runtime.canary.is_running, limit=10**5)
    flushed = bool(driver.scheduler.flush_cache())
    return flushed, _counted_since(driver, before)


@engine_test
def test_a_running_shadow_does_not_stand_in_the_way_of_a_flush(start_engine: StartEngine) -> None:
    # Its forward has run, so its answer is there: it is compared before the cache is empty.
    assert start_engine(**NEVER_TRIPS).call(_flush_behind_a_shadow) == (True, (1, 0))


def _new_weights_with_a_pending_shadow(driver: Driver, model: str) -> tuple[int, int]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    before = _begin(driver)
    driver.ask(rag(1, 0))
    driver.step()
    update = UpdateWeightFromDiskReqInput(model_path=model, load_format="auto", flush_cache=False)
    assert driver.scheduler.weight_updater.update_weights_from_disk(update).success
    return _counted_since(driver, before)


@engine_test
def test_an_answer_of_old_weights_is_not_compared_with_one_of_new_weights(
    start_engine: StartEngine, model_folder: Path
) -> None:
    engine = start_engine(**NEVER_TRIPS)
    counted = engine.call(_new_weights_with_a_pending_shadow, str(model_folder / "llama"))
    assert counted == (0, 1)


def _launch_a_shadow(driver: Driver) -> tuple[Any, Any]:
    """Run a shadow's forward and leave its result unprocessed, as the overlap schedule does."""
    driver.ask(rag(1, 0))
    time.sleep(0.1)
    scheduler = driver.scheduler
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch, scheduler.last_batch = plan.running_batch, plan.batch_to_run
    assert driver.runtime.canary.is_running
    return plan.batch_to_run, scheduler.run_batch(plan.batch_to_run)


def _abort_a_shadow(driver: Driver) -> tuple[int, int]:
    from sglang.srt.managers.io_struct import AbortReq

    before = _begin(driver)
    batch, result = _launch_a_shadow(driver)
    driver.scheduler.abort_request(AbortReq(rid="", abort_all=True))
    driver.scheduler.process_batch_result(batch, result)
    return _counted_since(driver, before)


def _retract_a_shadow(driver: Driver) -> tuple[int, int]:
    from sglang.srt.managers.schedule_batch import retract_all

    before = _begin(driver)
    batch, result = _launch_a_shadow(driver)
    scheduler = driver.scheduler
    wants_args = "server_args" in inspect.signature(retract_all).parameters  # 0.5.17
    retract_all(
        **({"server_args": scheduler.server_args} if wants_args else {}),
        reqs=batch.reqs,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=False,
    )
    scheduler._add_request_to_queue(batch.reqs[0])
    scheduler.process_batch_result(batch, result)
    scheduler.last_batch = None
    return _counted_since(driver, before)


def _drop_and_retract_a_shadow(driver: Driver) -> tuple[int, int]:
    canary = driver.runtime.canary
    capture = canary.capture

    def drop_behind_the_launch(*args: Any) -> None:
        capture(*args)
        if canary.is_running:
            canary.forget()

    canary.capture = drop_behind_the_launch
    try:
        return _retract_a_shadow(driver)
    finally:
        canary.capture = capture


@engine_test
@pytest.mark.parametrize("fate", [_abort_a_shadow, _retract_a_shadow, _drop_and_retract_a_shadow])
def test_a_shadow_that_is_taken_away_is_forgotten(start_engine: StartEngine, fate: Any) -> None:
    assert start_engine(**NEVER_TRIPS).call(fate) == (0, 1)


# --- the switch ---


def _serve_until_it_trips(driver: Driver, num_requests: int) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sgl_blend.scheduler.canary").addHandler(handler)
    _begin(driver)
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


@engine_test
def test_blending_switches_itself_off_and_says_so(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    engine = start_engine(
        blend_canary_rate=0.5, blend_canary_max_kl=1e-6, enable_metrics=True, served_model_name="m"
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


@engine_test
def test_blending_goes_on_below_the_limit(start_engine: StartEngine) -> None:
    engine = start_engine(**NEVER_TRIPS)

    seen = engine.call(_serve_until_it_trips, 12)

    assert not any(seen["tripped"])
    assert seen["late"].report["fallback"] is None
    assert seen["lines"] == []


def _trip_with_work_pending(driver: Driver) -> tuple[int, int]:
    _begin(driver)
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


@engine_test
def test_nothing_is_built_once_blending_is_off(start_engine: StartEngine) -> None:
    engine = start_engine(blend_canary_rate=1.0, blend_canary_max_kl=2e-6)
    before, after = engine.call(_trip_with_work_pending)
    assert before == after

"""What a prefill batch may hold: as many rows in a layer as the operator allows."""

from __future__ import annotations

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import (
    Answer,
    Driver,
    Prompt,
    largest_difference,
    rag_prompt,
    random_tokens,
    watch_rows,
)

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 20)
CHUNKS = [random_tokens(10 + i, 100) for i in range(6)]
QUESTION = random_tokens(99, 12)
MOVED = sum(map(len, CHUNKS)) - len(CHUNKS[0])
BUDGET = 150
"""Tokens of a prefill step: less than a third of the moved chunks."""
RATIO = 0.1
TOLERANCE = 2e-4

EARLY_SHARE = {"hkvd": 1.0, "none": 1.0, "funnel": 0.3, "remembered": RATIO, "first-k": RATIO}
"""Share of the moved rows that enters the first layer."""


def rag(policy: str, order: tuple[int, ...], seed: int = 99, **rest: Any) -> Prompt:
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": RATIO}
    question = random_tokens(seed, len(QUESTION))
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in order], question, params=params, **rest)


def _warm(driver: Driver, policy: str) -> None:
    """Store all chunks, and probe them if the policy wants it."""
    driver.settle()
    driver.flush()
    driver.ask(rag(policy, (0, 1, 2, 3, 4, 5)))
    driver.settle()


def _serve(driver: Driver, prompts: list[Prompt]) -> tuple[list[Answer], list[int], list[int]]:
    """Ask at once; return the answers, requests of each prefill batch, and rows of each layer's MLP."""
    with watch_rows(driver) as rows:
        reqs = [driver.submit(prompt) for prompt in prompts]
        sizes = []
        while not all(req.finished() for req in reqs):
            driver.step()
            last = driver.scheduler.last_batch
            if last is not None and last.forward_mode.is_extend():
                sizes.append(len(last.reqs))
    return [driver.answer(req) for req in reqs], sizes, rows


def _ask_long(driver: Driver, policy: str) -> tuple[Answer, int, int]:
    _warm(driver, policy)
    answers, sizes, rows = _serve(driver, [rag(policy, (0, 2, 1, 4, 3, 5))])
    driver.settle()
    return answers[0], len(sizes), max(rows)


@pytest.mark.parametrize("policy", list(EARLY_SHARE))
def test_a_prompt_is_cut_by_the_rows_that_enter_the_first_layer(
    start_engine: StartEngine, policy: str
) -> None:
    whole, steps, _ = start_engine().call(_ask_long, policy)
    assert steps == 1
    answer, steps, rows = start_engine(chunked_prefill_size=BUDGET).call(_ask_long, policy)
    assert rows <= BUDGET, "a layer saw more rows than the operator allows"
    assert answer.report["prompt_tokens"] == whole.report["prompt_tokens"]
    entering = MOVED * EARLY_SHARE[policy] + len(QUESTION) + 1
    assert steps == -(-entering // BUDGET)
    if steps == 1:
        assert largest_difference(answer.logprobs[0], whole.logprobs[0]) <= TOLERANCE


def test_what_needs_few_rows_is_one_step(start_engine: StartEngine) -> None:
    whole = start_engine().call(_ask_long, "remembered")[0]
    answer, steps, rows = start_engine(chunked_prefill_size=BUDGET).call(_ask_long, "remembered")
    assert steps == 1
    assert rows <= BUDGET
    assert largest_difference(answer.logprobs[0], whole.logprobs[0]) <= TOLERANCE


def _ask_many(driver: Driver, policy: str) -> tuple[list[Answer], list[int], list[int]]:
    _warm(driver, policy)
    prompts = [rag(policy, (0, 3, 1, 4), seed=60 + n) for n in range(6)]
    found = _serve(driver, prompts)
    driver.settle()
    return found


def test_requests_share_a_batch_by_their_rows(start_engine: StartEngine) -> None:
    engine = start_engine(chunked_prefill_size=BUDGET)
    answers, sizes, rows = engine.call(_ask_many, "remembered")
    # 312 tokens and 43 rows a request: the fourth is cut.
    assert sizes[0] == 4
    assert max(rows) <= BUDGET
    for answer in answers:
        counts = [
            answer.report[f"{kind}_tokens"]
            for kind in ("prefix", "reused", "recomputed", "computed")
        ]
        assert sum(counts) == answer.report["prompt_tokens"]
    assert engine.call(_ask_many, "hkvd")[1][0] == 1


def _two_long(driver: Driver) -> tuple[list[Answer], list[int], list[int]]:
    _warm(driver, "remembered")
    prompts = [rag("remembered", (0, 2, 1), seed=90), rag("remembered", (0, 3, 1, 5), seed=91)]
    for prompt in prompts:
        prompt.segments[-1] = random_tokens(92, 300)
    prompts[1].params["sgl_blend_ratio"] = 0.0  # a few rows suffice for its chunks
    found = _serve(driver, prompts)
    driver.settle()
    return found


def test_nothing_follows_a_request_that_is_cut(start_engine: StartEngine) -> None:
    # With pages a cut leaves some rows of the budget.
    engine = start_engine(chunked_prefill_size=BUDGET + 10, page_size=16)
    answers, sizes, rows = engine.call(_two_long)
    assert sizes[0] == 1
    assert max(rows) <= BUDGET + 10
    assert all(answer.report["reused_tokens"] > 100 for answer in answers)


def _refused(driver: Driver) -> tuple[int, int]:
    """Return how many rows a batch may still compute before and after a request does not fit."""
    from sgl_blend.engine.admission import rows_left
    from sgl_blend.scheduler.admission import Admission

    _warm(driver, "remembered")
    seen: list[tuple[int, int]] = []
    original = Admission.add

    def add(admission: Admission, attempt: Any) -> Any:
        before = rows_left(attempt.adder)
        verdict = original(admission, attempt)
        if not attempt.succeeded:
            seen.append((before, rows_left(attempt.adder)))
        return verdict

    Admission.add = add  # type: ignore[assignment, method-assign]
    try:
        # It cannot fit beside the one that decodes.
        first = driver.submit(rag("remembered", (0, 1, 2), seed=70, max_new_tokens=40))
        driver.step()
        second = driver.submit(rag("remembered", (0, 2, 3, 4, 5, 1), seed=71, max_new_tokens=900))
        for _ in range(3):
            driver.step()
        while not (first.finished() and second.finished()):
            driver.step()
    finally:
        Admission.add = original  # type: ignore[method-assign]
    driver.settle()
    return seen[0]


def test_who_is_refused_leaves_the_budget_as_it_was(start_engine: StartEngine) -> None:
    engine = start_engine(chunked_prefill_size=BUDGET, max_total_tokens=1700)
    before, after = engine.call(_refused)
    assert before == after == BUDGET


def _alone_and_beside(driver: Driver, policy: str) -> list[Answer]:
    _warm(driver, policy)
    prompt = rag(policy, (0, 5, 4, 3, 2, 1))
    alone = driver.ask(prompt)[0]
    _warm(driver, policy)
    others = [rag(policy, (0, 1 + n, 5 - n), seed=80 + n) for n in range(2)]
    beside, _, rows = _serve(driver, [others[0], prompt, others[1]])
    assert max(rows) <= BUDGET
    driver.settle()
    return [alone, beside[1]]


@pytest.mark.parametrize("policy", ["funnel", "remembered"])
def test_with_build_the_cut_is_that_of_an_idle_server(
    start_engine: StartEngine, policy: str
) -> None:
    engine = start_engine(chunked_prefill_size=BUDGET, blend_on_miss="build")
    alone, beside = engine.call(_alone_and_beside, policy)
    assert largest_difference(alone.logprobs[0], beside.logprobs[0]) <= TOLERANCE
    assert alone.report["layer_rows"] == beside.report["layer_rows"]


LONG = random_tokens(70, 600)
PLAIN = random_tokens(71, 1500)


def _two_that_would_be_cut(driver: Driver) -> tuple[list[Answer], Answer, list[int]]:
    """Serve a request that leaves no whole number of pages, a long one, and one that goes far."""
    _warm(driver, "remembered")

    def after_long(order: tuple[int, ...], ratio: float) -> Prompt:
        chunks = [LONG, *(CHUNKS[i] for i in order)]
        params = {"sgl_blend_policy": "remembered", "sgl_blend_ratio": ratio}
        return rag_prompt(SYSTEM, chunks, QUESTION, params=params)

    driver.ask(after_long((0,), RATIO))
    driver.settle()
    plain = Prompt([PLAIN])
    answers, sizes, _ = _serve(
        driver,
        [rag("remembered", (0, 3, 1, 4), seed=60), plain, after_long((3, 1, 4, 2), 2 * RATIO)],
    )
    driver.settle()
    driver.flush()
    (alone,) = driver.ask(plain)
    driver.settle()
    return answers, alone, sizes


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_batch_holds_one_cut_request(start_engine: StartEngine, page_size: int) -> None:
    """SGLang remembers one; another would be answered after its first step."""
    engine = start_engine(chunked_prefill_size=128, page_size=page_size, max_total_tokens=8192)
    answers, alone, sizes = engine.call(_two_that_would_be_cut)
    assert sizes[0] == 2
    for answer in answers:
        counts = [
            answer.report[f"{kind}_tokens"]
            for kind in ("prefix", "reused", "recomputed", "computed")
        ]
        assert sum(counts) == answer.report["prompt_tokens"]
    assert largest_difference(answers[1].logprobs[0], alone.logprobs[0]) <= TOLERANCE

"""Chunks in prompts without marks, on the real scheduler: found, learned, and never wrong."""

from __future__ import annotations

from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from finding_prompts import DOCUMENTS, HEAD, TOLERANCE, ask, begin, in_full, marked, unmarked
from harness import Answer, Driver, Prompt, largest_difference, rag_prompt, random_tokens

from sgl_blend.metrics import FINDING_COUNTERS, FINDING_GAUGES

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _find_marked(driver: Driver) -> tuple[Answer, Answer, Answer]:
    begin(driver)
    ask(driver, marked(driver, 0, 1, 2))
    prompt = unmarked(2, 0, params={"sgl_blend_ratio": 1.0})
    cheap = ask(driver, unmarked(1, 2, seed=2, params={"sgl_blend_ratio": 0.0}))
    return ask(driver, prompt), in_full(driver, prompt), cheap


@pytest.mark.parametrize("page_size", [1, 16])
def test_stored_chunks_are_found_in_unmarked_text(
    start_engine: StartEngine, page_size: int
) -> None:
    engine = start_engine(blend_find="known", page_size=page_size)
    found, full, cheap = engine.call(_find_marked)
    assert found.report["fallback"] is None
    stored = len(DOCUMENTS[2]) + len(DOCUMENTS[0])
    assert stored - 4 * page_size < found.report["found_tokens"] <= stored
    assert largest_difference(found.logprobs[0], full.logprobs[0]) <= TOLERANCE
    assert cheap.report["reused_tokens"] > 0.8 * (len(DOCUMENTS[1]) + len(DOCUMENTS[2]))


def _what_marks_leave(driver: Driver) -> dict[str, Any]:
    begin(driver)
    ask(driver, marked(driver, 0, 1, 2))
    return ask(driver, marked(driver, 2, 0, 1)).report


def test_what_is_marked_is_not_found_again(start_engine: StartEngine) -> None:
    report = start_engine(blend_find="known").call(_what_marks_leave)
    assert report["found_tokens"] == 0
    assert report["chunk_hits"] == 3


def _after_a_head(driver: Driver) -> dict[str, Any]:
    """Ask without marks where a marked prompt has told what such prompts begin with."""
    begin(driver)
    ask(driver, rag_prompt(HEAD, [DOCUMENTS[0], DOCUMENTS[1]], random_tokens(9, 20)))
    segments = [HEAD, random_tokens(8, 11), DOCUMENTS[1], [9], DOCUMENTS[0], [7]]
    # Another ratio is another namespace, in which nothing is stored.
    return ask(driver, Prompt(segments, params={"sgl_blend_ratio": 0.3})).report


def test_marks_tell_what_unmarked_prompts_begin_with(start_engine: StartEngine) -> None:
    report = start_engine(blend_find="known").call(_after_a_head)
    assert report["prefix_tokens"] == len(HEAD), "the build prefix itself is exact KV"
    assert report["found_tokens"] == len(DOCUMENTS[0]) + len(DOCUMENTS[1])


def _learn(driver: Driver) -> list[dict[str, Any]]:
    begin(driver)
    reports = []
    for seed, order in enumerate(permutations(range(3)), start=1):
        reports.append(ask(driver, unmarked(*order, seed=seed)).report)
    finding = driver.runtime.describe()["finding"]
    return [*reports, finding]


def test_text_that_comes_again_is_learned_and_found(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    *reports, finding = engine.call(_learn)
    length = sum(map(len, DOCUMENTS[:3]))
    assert [report["found_tokens"] for report in reports[:2]] == [0, 0]
    for report in reports[2:]:
        assert report["found_tokens"] >= 0.95 * length
        assert report["fallback"] is None
    assert finding["learned_chunks"] == 3
    assert length <= finding["learned_tokens"] <= length + 3 * 18
    assert finding["learn_failures"] == finding["find_failures"] == 0


def _what_operators_see(driver: Driver) -> list[dict[str, Any]]:
    begin(driver)
    ask(driver, unmarked(0, 1, 2, seed=1))
    before = driver.runtime.describe()
    driver.ask(unmarked(2, 1, 0, seed=2))
    waiting = driver.runtime.describe()
    driver.settle()
    return [before, waiting, driver.runtime.describe()]


def test_operators_see_learned_chunks_that_wait_and_that_are_built(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    before, waiting, done = engine.call(_what_operators_see)
    assert waiting["chunks_pending"] == 3
    assert done["chunks_pending"] == 0
    assert done["chunks_built"] - before["chunks_built"] == 3
    assert done["build_steps"] - before["build_steps"] >= 3


def _finding(driver: Driver) -> list[str]:
    return list(driver.runtime.describe()["finding"])


@pytest.mark.parametrize("find", ["known", "learned"])
def test_all_that_is_told_of_finding_has_a_metric(start_engine: StartEngine, find: str) -> None:
    told = start_engine(blend_find=find).call(_finding)
    names = {*FINDING_COUNTERS, *FINDING_GAUGES}
    assert set(told) == names if find == "learned" else set(told) < names


def test_known_learns_nothing(start_engine: StartEngine) -> None:
    *reports, finding = start_engine(blend_find="known").call(_learn)
    assert all(report["found_tokens"] == 0 for report in reports)
    assert "learned_chunks" not in finding


def test_what_is_learned_is_paid_for(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=0.0)
    *reports, finding = engine.call(_learn)
    assert all(report["found_tokens"] == 0 for report in reports)
    assert finding["learned_chunks"] == 0
    assert finding["unpaid_chunks"] > 0


def _credit_of_a_history(driver: Driver) -> tuple[float, list[dict[str, Any]]]:
    begin(driver)
    saved = driver.runtime.learner.credit._saved
    saved.clear()
    prompt = Prompt([random_tokens(41, 400)])
    reports = [ask(driver, prompt).report for _ in range(2)]
    return sum(saved.values()), reports


def test_a_history_that_is_an_exact_prefix_pays_too(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    credit, reports = engine.call(_credit_of_a_history)
    assert reports[1]["computed_tokens"] < 10
    assert credit == 800


def _kv_of_both(driver: Driver) -> tuple[list[Any], list[Any]]:
    """Return KV of a document that was learned, and of the same when it was marked."""
    bos = driver.runtime.intake._bos_token_id
    path = [bos, *DOCUMENTS[1]]
    begin(driver)
    for seed in (1, 2, 3):
        ask(driver, unmarked(seed % 3, 1, seed=seed, salt="tenant"))
    learned = driver.kv(path, driver.chunk_salt("tenant"))
    begin(driver)
    ask(driver, marked(driver, 0, 1, salt="tenant"))
    return learned, driver.kv(path, driver.chunk_salt("tenant"))


def test_l4_learned_and_marked_kv_are_bit_equal(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    learned, built = engine.call(_kv_of_both)
    assert learned[0][0].shape == built[0][0].shape
    for layer, other in zip(learned, built, strict=True):
        assert all(x.equal(y) for x, y in zip(layer, other, strict=True))


def _next_turn(driver: Driver) -> tuple[dict[str, Any], dict[str, Any], Answer, Answer]:
    """Blend one turn of a conversation, and ask for the next, in which nothing is found."""
    begin(driver)
    ask(driver, marked(driver, 0, 1, 2))
    first = unmarked(2, 0)
    blended = ask(driver, first)
    driver.runtime.finder.clear()
    second = Prompt([first.tokens, blended.output_ids, random_tokens(77, 25)])
    answer = ask(driver, second)
    other = Prompt([random_tokens(78, 40)])
    return blended.report, answer.report, answer, ask(driver, other)


def test_a_conversation_that_was_blended_is_not_prefilled_again(start_engine: StartEngine) -> None:
    first, second, _, other = start_engine(blend_find="known").call(_next_turn)
    assert first["found_tokens"] > 0
    assert second["prefix_tokens"] >= first["prompt_tokens"]
    assert second["found_tokens"] == 0
    assert other.report["prefix_tokens"] == 0


def _evicted(driver: Driver) -> list[dict[str, Any]]:
    """Let what was found go between arrival and admission, and while nobody looks."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    begin(driver)
    ask(driver, marked(driver, 0, 1))
    finder = driver.runtime.finder
    before = len(finder._index)
    real = type(finder).find

    def find_and_lose(self: Any, *args: Any) -> Any:
        found = real(self, *args)
        driver.scheduler.tree_cache.evict(EvictParams(num_tokens=10**6))
        return found

    with patch.object(type(finder), "find", find_and_lose):
        lost = ask(driver, unmarked(1, 0, seed=3)).report
    stale = ask(driver, unmarked(0, 1, seed=4)).report
    return [lost, stale, {"before": before, "after": len(finder._index)}]


def test_a_candidate_that_vanished_is_computed(start_engine: StartEngine) -> None:
    lost, stale, index = start_engine(blend_find="known").call(_evicted)
    for report in (lost, stale):
        assert report["found_tokens"] == 0
        assert report["reused_tokens"] == 0
    assert index == {"before": 2, "after": 0}, "a stale start is dropped by its first search"


def _break_the_learner(driver: Driver) -> tuple[Answer, dict[str, Any], int]:
    begin(driver)
    learner = driver.runtime.learner
    with patch.object(learner._lessons, "study", side_effect=RuntimeError("a bug")):
        answer = ask(driver, unmarked(0))
    ask(driver, unmarked(0, seed=2))
    found = ask(driver, unmarked(0, seed=3)).report["found_tokens"]
    described = learner.describe()
    learner.num_failures = 0
    return answer, described, found


def test_a_learner_that_fails_is_switched_off(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    answer, described, found = engine.call(_break_the_learner)
    assert answer.output_ids
    assert described["learn_failures"] == 1
    assert found == 0


def _asked_for_less(driver: Driver) -> list[int]:
    begin(driver)
    ask(driver, marked(driver, 0, 1))
    return [
        ask(driver, unmarked(1, 0, seed=seed, params={"sgl_blend_find": find})).report[
            "found_tokens"
        ]
        for seed, find in enumerate(("marks", "known"), start=20)
    ]


def test_a_request_may_ask_for_less(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    marks, known = engine.call(_asked_for_less)
    assert marks == 0
    assert known == len(DOCUMENTS[0]) + len(DOCUMENTS[1])


def _what_is_forgotten(driver: Driver) -> dict[str, tuple[int, int, int]]:
    """Return starts, prompts and tenants with heads after each of three orders."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    runtime, seen = driver.runtime, {}

    def sizes() -> tuple[int, int, int]:
        finder = runtime.finder
        heads = len(finder._heads._tenants)
        return len(finder._index), len(runtime.learner._sightings), heads

    for name in ("weights", "flush", "eviction", "use"):
        begin(driver)
        assert sizes() == (0, 0, 0), "a flush forgets all"
        ask(driver, marked(driver, 0, 1))
        ask(driver, unmarked(1, seed=30))
        seen[f"before {name}"] = sizes()
        if name == "weights":
            runtime.weights_changed()
        elif name == "flush":
            driver.flush()
        else:
            tree = driver.scheduler.tree_cache
            for seed in range(31, 50):
                ask(driver, Prompt([random_tokens(seed, 300)]))
                if name == "use":
                    ask(driver, unmarked(0, 1, seed=seed))
                tree.evict(EvictParams(num_tokens=300))
        seen[name] = sizes()
    return seen


def test_what_is_gone_is_forgotten(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=0.0, max_total_tokens=2000)
    seen = engine.call(_what_is_forgotten)
    for name in ("weights", "flush", "eviction", "use"):
        starts, prompts, heads = seen[f"before {name}"]
        assert (starts, heads) == (2, 1)
        assert prompts > 0
    assert seen["weights"][0] == 0
    assert seen["flush"] == (0, 0, 0)
    assert seen["eviction"][0] == 0, "the pool was evicted twice since"
    assert seen["use"][0] == 2


def _fail_to_find(driver: Driver) -> tuple[Answer, dict[str, Any], int]:
    begin(driver)
    ask(driver, marked(driver, 0, 1))
    finder = driver.runtime.finder
    with patch.object(finder._index, "probe", side_effect=RuntimeError("a bug")):
        answer = ask(driver, unmarked(0))
    found = ask(driver, marked(driver, 1, 0)).report["chunk_hits"]
    described = finder.describe()
    finder.num_failures = 0
    return answer, described, found


def test_a_finder_that_fails_is_switched_off_and_marks_go_on(start_engine: StartEngine) -> None:
    answer, described, hits = start_engine(blend_find="known").call(_fail_to_find)
    assert answer.report["fallback"] == "no_chunks"
    assert described["find_failures"] == 1
    assert hits == 2

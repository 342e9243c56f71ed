"""Whose chunks are found: no tenant, request class or build prefix meets the starts of another."""

from __future__ import annotations

from array import array
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from engines import StartEngine, model_folder, start_engine
from finding_prompts import DOCUMENTS, HEAD, TOLERANCE, ask, begin, in_full, marked, unmarked
from harness import Answer, Driver, Prompt, largest_difference, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


def _hijack(driver: Driver) -> tuple[Answer, Answer, int]:
    """Let hostile text stand before a document until it is learned with it; then ask without it."""
    begin(driver)
    hostile = random_tokens(666, 120)
    victim = unmarked(1, seed=9, params={"sgl_blend_ratio": 0.0})
    for seed in (1, 2, 3):
        segments = [random_tokens(seed, 20), hostile + DOCUMENTS[1], random_tokens(50 + seed, 12)]
        ask(driver, Prompt(segments))
    found = ask(driver, victim)
    full = in_full(driver, victim)
    return found, full, found.report["reused_tokens"]


def test_no_piece_begins_in_the_middle_of_a_chunk(start_engine: StartEngine) -> None:
    """HijackKV: the KV of the document has seen what stood before it, and is never used without."""
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    found, full, reused = engine.call(_hijack)
    assert reused == 0
    assert largest_difference(found.logprobs[0], full.logprobs[0]) <= TOLERANCE


def _two_tenants(driver: Driver) -> tuple[list[int], int]:
    begin(driver)
    for seed in (1, 2):
        ask(driver, unmarked(0, seed=seed, salt="a"))
    others = [
        ask(driver, unmarked(0, seed=seed, salt="b")).report["found_tokens"] for seed in (3, 4)
    ]
    return others, ask(driver, unmarked(0, seed=5, salt="a")).report["found_tokens"]


def test_tenants_learn_and_find_apart(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    others, own = engine.call(_two_tenants)
    assert others == [0, 0], "the first sight of one tenant is no second sight of another"
    assert own >= len(DOCUMENTS[0])


def _text_of_another(driver: Driver) -> tuple[int, int, int]:
    """Let one tenant store a document and another send it: starts before and after, tokens found."""
    begin(driver)
    for seed in (1, 2, 3):
        ask(driver, unmarked(0, seed=seed, salt="a"))
    before = driver.runtime.finder.describe()["starts"]
    ask(driver, unmarked(0, seed=4, salt="b"))
    after = driver.runtime.finder.describe()["starts"]
    return before, after, ask(driver, unmarked(0, seed=5, salt="a")).report["found_tokens"]


def test_a_tenant_neither_probes_nor_discards_the_starts_of_another(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    before, after, found = engine.call(_text_of_another)
    assert after == before > 0, "a vain search of a tenant discarded the start of another"
    assert found >= len(DOCUMENTS[0])


def _search_from_elsewhere(driver: Driver, change: dict[str, Any]) -> tuple[int, int, int]:
    """Search a prompt in full of stored text as if it began elsewhere; return pieces and starts."""
    begin(driver)
    ask(driver, marked(driver, 0, 1))
    finder, prompt = driver.runtime.finder, unmarked(0, 1, seed=2)
    with patch.object(type(finder), "find", autospec=True, return_value=[]) as find:
        ask(driver, prompt)
    home = find.call_args.args[1]
    before = finder.describe()["starts"]
    elsewhere = msgspec.structs.replace(home, **change)
    pieces = finder.find(elsewhere, array("q", prompt.tokens), [])
    assert len(finder.find(home, array("q", prompt.tokens), [])) == 2
    return len(pieces), before, finder.describe()["starts"]


@pytest.mark.parametrize(
    "change",
    [{"salt": "another"}, {"extra_key": "another"}, {"prefix": array("q", HEAD).tobytes()}],
    ids=lambda change: next(iter(change)),
)
def test_a_start_belongs_to_its_namespace_and_build_prefix(
    start_engine: StartEngine, change: dict[str, Any]
) -> None:
    found, before, after = start_engine(blend_find="known").call(_search_from_elsewhere, change)
    assert found == 0
    assert before == after == 2, "a search from elsewhere met these starts"

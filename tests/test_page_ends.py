"""Chunks that end in the middle of a page, by a few tokens after a whole step of their build."""

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 42)
QUESTION = random_tokens(99, 12)
PAGE, STEP = 16, 128
LENGTHS = (117, 118, 119, 129, 130, 133, 134, 143)
"""Together with the system prompt some end at a page, some before and some after one."""


def _prompt(length: int, question: list[int]) -> Prompt:
    return rag_prompt(SYSTEM, [random_tokens(length, length)], question)


def _figures_by_length(driver: Driver) -> dict[int, tuple[int, int]]:
    """Return how often a chunk of each length was built and probed."""
    first = random_tokens(
        5, 40
    )  # what stands right after the system prompt is exact, and not probed
    driver.ask(rag_prompt(SYSTEM, [first], QUESTION))
    driver.settle()
    found = {}
    for length in LENGTHS:
        before = driver.runtime.describe()
        driver.ask(rag_prompt(SYSTEM, [first, random_tokens(length, length)], QUESTION))
        driver.settle()  # which fails if a build or a probe is never done
        after = driver.runtime.describe()
        built, probed = (
            int(after[name] - before[name]) for name in ("chunks_built", "chunks_remembered")
        )
        found[length] = built, probed
    return found


def settings(on_miss: str) -> dict[str, Any]:
    return {"page_size": PAGE, "chunked_prefill_size": STEP, "blend_on_miss": on_miss}


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_every_length_is_built_and_probed(start_engine: StartEngine, on_miss: str) -> None:
    found = start_engine(**settings(on_miss)).call(_figures_by_length)
    assert found == dict.fromkeys(LENGTHS, (1, 1))


def _asked_again(driver: Driver) -> dict[int, Any]:
    found = {}
    for length in LENGTHS:
        driver.ask(_prompt(length, QUESTION))
        driver.settle()
        (answer,) = driver.ask(_prompt(length, random_tokens(length + 1000, 12)))
        driver.settle()
        found[length] = answer.report
    return found


def test_a_prompt_whose_chunk_is_cached_but_for_a_page_says_so(start_engine: StartEngine) -> None:
    for length, report in start_engine(**settings("compute")).call(_asked_again).items():
        assert report["prefix_tokens"] == (len(SYSTEM) + length) // PAGE * PAGE
        assert report["chunk_misses"] == 0
        assert report["fallback"] == "cached", length

"""Nothing of the server's own is longer than the model's context, however long a chunk is."""

from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, rag_prompt, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

CONTEXT = 512
SYSTEM, SHORT, LONG = random_tokens(1, 40), random_tokens(2, 64), random_tokens(3, 380)


def _ask(driver: Driver, question: int, *chunks: list[int]) -> Any:
    (answer,) = driver.ask(rag_prompt(SYSTEM, list(chunks), random_tokens(question, 12)))
    driver.settle()
    return answer


def _fill_the_context(driver: Driver) -> tuple[Any, int, int]:
    """Ask for a chunk whose probes would be longer than the context, and for a short one."""
    driver.settle()
    driver.flush()
    _ask(driver, 10, SHORT, LONG)
    again = _ask(driver, 11, LONG[:1] + SHORT, LONG)
    memories = driver.runtime._memories
    return again, memories.num_chunks, driver.runtime.describe()["probes_pending"]


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_a_chunk_that_cannot_be_probed_is_reused_without_a_memory(
    start_engine: StartEngine, on_miss: str
) -> None:
    engine = start_engine(context_length=CONTEXT, blend_policy="funnel", blend_on_miss=on_miss)
    again, num_remembered, pending = engine.call(_fill_the_context)
    assert again.report["chunk_hits"] >= 1
    assert again.report["reused_tokens"] > 0
    assert pending == 0
    assert num_remembered == (2 if on_miss == "compute" else 0)  # of the short chunks


def _whole_prompt(driver: Driver) -> Any:
    """Ask for a chunk that fills the context alone, after which sinks come first in a build."""
    from dataclasses import replace

    driver.settle()
    driver.flush()
    chunk = random_tokens(5, CONTEXT - 4)
    prompt = rag_prompt([], [chunk], [7])
    prompt = replace(prompt, segments=[chunk, [7]], chunk_at=[0])
    (answer,) = driver.ask(prompt)
    driver.settle()
    return answer


def test_a_chunk_that_cannot_be_built_is_text(start_engine: StartEngine) -> None:
    engine = start_engine(context_length=CONTEXT, blend_build_prefix="sinks")
    answer = engine.call(_whole_prompt)
    assert answer.report["fallback"] == "no_chunks"
    assert answer.report["reused_tokens"] == answer.report["chunk_misses"] == 0, answer.report

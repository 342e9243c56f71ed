"""L1 with chunks that were found, whatever overlaps: pieces, marks, prefix, holes; hostile text."""

from __future__ import annotations

import random
from array import array
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engines import StartEngine, model_folder, start_engine
from finding_cases import milliseconds, slowness
from harness import Driver, Prompt, largest_difference, random_tokens

from sgl_blend.radix_ext.chunk_store import ChunkKey

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

TOLERANCE = 2e-4
DOCUMENTS = [random_tokens(800 + number, 70 + 25 * number) for number in range(6)]
FEW, MANY = 60, 2_000


def _pattern(draw: random.Random) -> Prompt:
    """Put whole documents, beginnings, ends and middles of them between texts, some of them marked."""
    segments: list[list[int]] = [random_tokens(draw.randrange(10**6), draw.choice((1, 20)))]
    marks: list[int] = []
    for _ in range(draw.randrange(1, 6)):
        document = draw.choice(DOCUMENTS)
        first = draw.choice((0, 0, 0, draw.randrange(len(document) - 20)))
        last = draw.choice((len(document), draw.randrange(first + 10, len(document) + 1)))
        if draw.random() < 0.3:
            marks.append(len(segments))
        segments.append(document[first:last])
        if draw.random() < 0.5:
            segments.append(random_tokens(draw.randrange(10**6), draw.randrange(1, 30)))
    segments.append(random_tokens(draw.randrange(10**6), 5))
    return Prompt(segments, marks, params={"sgl_blend_ratio": 1.0})


def _differences(driver: Driver, seeds: range) -> tuple[float, int, int]:
    """Return the largest difference to full prefill, and how much was found and recomputed."""
    worst, found, recomputed = 0.0, 0, 0
    for seed in seeds:
        prompt = _pattern(random.Random(seed))
        (answer,) = driver.ask(prompt)
        full = Prompt([prompt.tokens], params={"sgl_blend": False}, salt=f"full {seed}")
        (expected,) = driver.ask(full)
        worst = max(worst, largest_difference(answer.logprobs[0], expected.logprobs[0]))
        found += answer.report["found_tokens"]
        recomputed += answer.report["recomputed_tokens"]
        if seed % 10 == 0:
            driver.settle()  # build what was learned; it checks locks and the pool
    driver.settle()
    return worst, found, recomputed


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_l1_with_found_chunks(start_engine: StartEngine, page_size: int, count: int) -> None:
    engine = start_engine(
        blend_find="learned",
        blend_learn_share=1.0,
        page_size=page_size,
        chunked_prefill_size=256,
        max_total_tokens=6000,
        blend_policy="hkvd",
    )
    worst, found, recomputed = 0.0, 0, 0
    for begin in range(0, count, FEW):
        seeds = range(begin, begin + FEW)
        one, more_found, more_recomputed = engine.call(_differences, seeds)
        worst, found = max(worst, one), found + more_found
        recomputed += more_recomputed
    assert worst <= TOLERANCE
    assert found > 20 * count
    assert recomputed > 20 * count


def _after_forgery(driver: Driver) -> tuple[Any, Any, int, int]:
    """Claim that chunks begin everywhere."""
    driver.settle()
    driver.flush()
    finder = driver.runtime.finder
    prompt = _pattern(random.Random(1))
    plain = Prompt([prompt.tokens])
    with patch.object(finder._index, "_find", lambda fingerprints: 0 * fingerprints.astype(int)):
        finder._index._bits[:] = ~np.uint64(0)
        finder._index._lengths[:] = 500
        walks = 0
        real = driver.runtime.finder._store.find_all

        def counted(keys: Any, spans: Any) -> Any:
            nonlocal walks
            walks += len(keys)
            return real(keys, spans)

        with patch.object(finder._store, "find_all", counted):
            (answer,) = driver.ask(plain)
    finder.clear()
    (expected,) = driver.ask(Prompt([prompt.tokens], params={"sgl_blend": False}, salt="full"))
    driver.settle()
    return answer.logprobs[0], expected.logprobs[0], walks, answer.report["found_tokens"]


def test_forged_starts_cost_walks_and_no_answer(start_engine: StartEngine) -> None:
    answer, expected, walks, found = start_engine(blend_find="known").call(_after_forgery)
    assert largest_difference(answer, expected) <= TOLERANCE
    assert found == 0
    assert 0 < walks <= 64


def _periodic_text(driver: Driver) -> dict[int, tuple[int, float]]:
    """Return what is found in a long text that repeats itself, and the milliseconds that takes."""
    driver.settle()
    driver.flush()
    found = {}
    for period in (1, 2, 16, 17):
        text = (random_tokens(period, period) * 8000)[:8000]
        driver.ask(Prompt([[period + 1], text[:300], [7]], [1]))
        driver.settle()
        home = ChunkKey(driver.chunk_salt(), None, array("q", [period + 1]).tobytes(), b"")
        look = partial(driver.runtime.finder.find, home, array("q", text), [])
        pieces, taken = look(), milliseconds(look, 10)
        found[period] = sum(map(len, pieces)), taken / slowness()
    return found


def test_text_that_repeats_itself_is_found_in_time(start_engine: StartEngine) -> None:
    found = start_engine(blend_find="known").call(_periodic_text)
    for period, (num_tokens, taken_ms) in found.items():
        assert num_tokens > 7000, period
        assert taken_ms < 5, period

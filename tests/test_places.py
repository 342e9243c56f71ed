"""Chunks that were found once are asked for by their place, until they are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, rag_prompt, random_tokens

from sgl_blend.engine import tree_branch
from sgl_blend.engine.tree import TreeMatch
from sgl_blend.radix_ext.places import Places

__all__ = ["model_folder", "start_engine"]  # fixtures

GROUP = ("salt", None, b"prefix")
SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 72) for i in range(4)]


def place(node: int) -> TreeMatch:
    return TreeMatch(node, 10, 5, None, None)  # type: ignore[arg-type]


# --- alone --------------------------------------------------------------------------------------


def test_nothing_is_there_after_it_was_cleared() -> None:
    places = Places(1000, slots_may_change=False)
    places.add(GROUP, [b"a" * 8], [place(7)])
    places.clear()
    assert places.find(GROUP, [b"a" * 8]) == [None]


@pytest.mark.parametrize("may_change", [False, True])
def test_what_was_added_is_found_in_its_group_alone(may_change: bool) -> None:
    places = Places(1000, slots_may_change=may_change)
    places.add(GROUP, [b"a" * 8], [place(7)])
    (found,) = places.find(GROUP, [b"a" * 8])
    assert found is not None
    assert int(found.node) == 7  # type: ignore[call-overload]
    assert (found.stop, found.start) == (10, 5)
    assert places.find(GROUP, [b"b" * 8]) == [None]
    for other in (("other", None, b"prefix"), ("salt", "x", b"prefix"), ("salt", None, b"")):
        assert places.find(other, [b"a" * 8]) == [None]


def test_slots_that_may_change_are_not_handed_on() -> None:
    places = Places(1000, slots_may_change=True)
    places.add(GROUP, [b"a" * 8], [place(7)])
    (found,) = places.find(GROUP, [b"a" * 8])
    assert found is not None
    found.known = object()  # type: ignore[assignment]
    (again,) = places.find(GROUP, [b"a" * 8])
    assert again is not None
    assert again.known is None


def test_too_many_are_forgotten_together() -> None:
    places = Places(10, slots_may_change=False)
    chunks = [bytes([number]) * 8 for number in range(11)]
    places.add(GROUP, chunks, [place(number) for number in range(11)])
    assert None not in places.find(GROUP, chunks)
    places.add(GROUP, chunks[:1], [place(0)])
    kept = [at for at in places.find(GROUP, chunks) if at is not None]
    assert [int(at.node) for at in kept] == [0]  # type: ignore[call-overload]


# --- in a server --------------------------------------------------------------------------------


@contextmanager
def _searched() -> Iterator[list[int]]:
    """Count the paths that the tree is searched for."""
    counts: list[int] = []
    stock = tree_branch._RustBranch.find_all

    def find_all(self: Any, paths: Any) -> Any:
        wanted = list(paths)
        counts.append(len(wanted))
        return stock(self, wanted)

    with patch.object(tree_branch._RustBranch, "find_all", find_all):
        yield counts


def _ask(driver: Driver, question: int, order: tuple[int, ...]) -> tuple[Answer, int]:
    prompt = rag_prompt(SYSTEM, [CHUNKS[i] for i in order], random_tokens(question, 12))
    with _searched() as counts:
        (answer,) = driver.ask(prompt)
        driver.settle()
    return answer, sum(counts)


def _again(driver: Driver) -> Any:
    driver.settle()
    driver.flush()
    _ask(driver, 100, (2, 0, 1))  # everything is built
    first, searched = _ask(driver, 101, (0, 1, 2))
    second, searched_again = _ask(driver, 102, (1, 2, 0))
    third, for_new = _ask(driver, 103, (2, 3, 1))
    driver.flush()
    cold, _ = _ask(driver, 102, (1, 2, 0))
    return first, second, searched + searched_again, third, for_new, cold


def _has_numbers(driver: Driver) -> bool:
    return tree_branch.numbers_its_nodes(driver.scheduler.tree_cache)


@pytest.mark.engine
def test_chunks_that_were_built_are_found_without_a_search(start_engine: StartEngine) -> None:
    engine = start_engine(blend_policy="hkvd")
    if not engine.call(_has_numbers):
        pytest.skip("the nodes of this SGLang's tree have no numbers")
    first, second, searched, third, for_new, cold = engine.call(_again)
    assert first.report["chunk_hits"] == second.report["chunk_hits"] == 3
    assert searched == 0
    assert third.report["chunk_misses"] == 1
    assert for_new >= 1
    # After a flush nothing is where it was.
    assert cold.report["chunk_hits"] == 0
    assert cold.report["chunk_misses"] == 3


def _evicted(driver: Driver) -> tuple[Answer, Answer, Answer]:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    driver.settle()
    driver.flush()
    _ask(driver, 200, (2, 0, 1))
    warm, _ = _ask(driver, 201, (0, 1, 2))
    driver.settle()
    capacity = driver.runtime.describe()["pool"]["capacity"]
    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=capacity))
    # Others take the slots before the chunks are asked for again.
    driver.ask(rag_prompt(random_tokens(5, 300), [], random_tokens(6, 20)))
    driver.settle()
    gone, _ = _ask(driver, 202, (1, 2, 0))
    back, _ = _ask(driver, 203, (0, 2, 1))
    return warm, gone, back


@pytest.mark.engine
def test_evicted_chunks_are_not_found_where_they_were(start_engine: StartEngine) -> None:
    warm, gone, back = start_engine(blend_policy="hkvd").call(_evicted)
    assert warm.report["chunk_hits"] == 3
    assert gone.report["chunk_hits"] == 0
    assert back.report["chunk_hits"] == 3

"""Blended prompts go before chunks and exact prompts when the tree evicts, until a turn uses them."""

from __future__ import annotations

from array import array
from unittest.mock import patch

import pytest
from eight_chunks import CHUNKS, SYSTEM, rag
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

TURN = random_tokens(500, 30)
PLAIN = [random_tokens(600 + i, 100) for i in range(3)]


def _evict(driver: Driver, num_tokens: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=num_tokens))


def _stored(driver: Driver, tokens: list[int], salt: str | None) -> int:
    """Return how much of a path is stored; it counts as used."""
    from sgl_blend.engine.tree import match_prefix

    tree = driver.scheduler.tree_cache
    return len(match_prefix(tree, array("q", tokens), salt=salt, extra_key=None))


def _ask(driver: Driver, prompt: Prompt) -> tuple[list[int], str]:
    """Ask, and return the prompt's tokens and the namespace its KV is stored in."""
    from driver import namespace_of

    req = driver.submit(prompt)
    driver.run_until(req.finished)
    driver.answer(req)
    driver.settle()
    return prompt.tokens, namespace_of(req)


def _a_prompt_goes_before_older_chunks(driver: Driver) -> tuple[int, list[int]]:
    """Return what is left of the oldest prompt, and of the chunks."""
    driver.settle()
    driver.flush()
    tokens, salt = _ask(driver, rag(3))
    for prompt in (rag(0, 1), rag(1, 0)):
        _ask(driver, prompt)
    with patch.object(driver.runtime._shares, "before_evict", lambda num_tokens: None):
        _evict(driver, len(tokens) + 60)
    paths = [SYSTEM + CHUNKS[number] for number in (0, 1, 3)]
    return _stored(driver, tokens, salt), [
        _stored(driver, path, driver.chunk_salt()) for path in paths
    ]


def test_blended_prompts_are_evicted_before_older_chunks(start_engine: StartEngine) -> None:
    prompt, chunks = start_engine(blend_policy="hkvd", max_total_tokens=4000).call(
        _a_prompt_goes_before_older_chunks
    )
    assert prompt <= len(SYSTEM), "the oldest prompt was kept"
    assert chunks == [len(SYSTEM) + 80] * 3


def _a_next_turn_keeps_its_prompt(driver: Driver, again: bool) -> int:
    """Return how much is left of a prompt when a younger one would be enough to make room."""
    driver.settle()
    driver.flush()
    driver.ask(rag(0, 1, 2))
    driver.settle()
    _drop_prompts(driver)
    first = rag(1, 0)
    tokens, salt = _ask(driver, first)
    if again:
        longer, same = _ask(driver, Prompt([*first.segments, TURN], first.chunk_at))
        assert same == salt
        assert longer[: len(tokens)] == tokens
    _ask(driver, rag(2, 0, 1))
    _evict(driver, 150)
    return _stored(driver, tokens, salt) - len(tokens)


def _drop_prompts(driver: Driver) -> None:
    tree = driver.scheduler.tree_cache
    _evict(driver, int(tree.evictable_size()) - len(SYSTEM) - 3 * 80)


@pytest.mark.parametrize("again", [False, True], ids=["finished", "with a next turn"])
def test_a_next_turn_takes_a_prompt_off_probation(start_engine: StartEngine, again: bool) -> None:
    change = start_engine(max_total_tokens=4000).call(_a_next_turn_keeps_its_prompt, again)
    assert (change == 0) == again


def _exact_prompts_in_order(driver: Driver) -> list[int]:
    driver.settle()
    driver.flush()
    plain = [Prompt([tokens], max_new_tokens=40) for tokens in PLAIN]
    for prompt in plain[:2]:
        driver.ask(prompt)
        driver.settle()
    chunk = rag(3)
    driver.ask(chunk)
    driver.settle()
    driver.ask(plain[2])
    driver.settle()
    total = len(PLAIN[0]) + 39
    _evict(driver, len(chunk.tokens) + 2 * total)  # the blended prompt, then the two oldest
    salt = driver.chunk_salt()
    left = [_stored(driver, tokens, None) for tokens in PLAIN]
    return [*left, _stored(driver, SYSTEM + CHUNKS[3], salt)]


def test_exact_prompts_and_chunks_keep_the_order_of_use(start_engine: StartEngine) -> None:
    """SGLang stores a prompt with a larger priority than its answer; by that nothing may be kept."""
    found = start_engine(blend_policy="hkvd", max_total_tokens=4000).call(_exact_prompts_in_order)
    assert found[:2] == [0, 0], "an older prompt was kept"
    assert found[2:] == [len(PLAIN[2]), len(SYSTEM) + len(CHUNKS[3])]

"""Prompts with documents, marked and not, for tests of finding on the real scheduler."""

from __future__ import annotations

from typing import Any

from harness import Answer, Driver, Prompt, rag_prompt, random_tokens

DOCUMENTS = [random_tokens(700 + number, 100 + 30 * number) for number in range(4)]
TOLERANCE = 2e-4
"""On log-probabilities."""
HEAD = random_tokens(690, 30)
"""What prompts begin with."""


def unmarked(*numbers: int, seed: int = 1, **rest: Any) -> Prompt:
    """Documents between texts that no other prompt has."""
    segments = [random_tokens(10_000 * seed + 1, 20)]
    for place, number in enumerate(numbers):
        segments += [DOCUMENTS[number], random_tokens(10_000 * seed + place + 2, 9)]
    return Prompt(segments, **rest)


def marked(driver: Driver, *numbers: int, **rest: Any) -> Prompt:
    """Return the same documents marked, and built after BOS as those without marks are."""
    bos = driver.runtime.intake._bos_token_id
    return rag_prompt(
        [bos], [DOCUMENTS[number] for number in numbers], random_tokens(9, 20), **rest
    )


def begin(driver: Driver) -> None:
    driver.settle()
    driver.flush()


def ask(driver: Driver, prompt: Prompt) -> Answer:
    (answer,) = driver.ask(prompt)
    driver.settle()
    return answer


def in_full(driver: Driver, prompt: Prompt) -> Answer:
    params = {"sgl_blend": False}
    return ask(driver, Prompt(prompt.segments, params=params, salt="full"))

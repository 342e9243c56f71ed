"""Blended requests, and what the canary counts of them."""

import math
from collections import Counter
from typing import Any

from eight_chunks import CHUNKS, QUESTION, SYSTEM
from harness import Answer, Driver, Prompt, rag_prompt

PAIRS = [(a, b) for a in range(1, 8) for b in range(a)]
"""Chunks of prompts no two of which begin alike further than after their first chunk."""

OWN = {"blend_recompute_ratio": 0.0}
"""Settings of the server: what is asked by them is compared."""

NEVER_TRIPS = {**OWN, "blend_canary_rate": 1.0, "blend_canary_max_kl": 1000.0}


def rag(*numbers: int, ratio: float = 0.0, **rest: Any) -> Prompt:
    params = {"sgl_blend_ratio": ratio}
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, params=params, **rest)


def kl(full: list[float], blended: list[float]) -> float:
    """KL(full || blended) of two rows of log-probabilities."""
    return math.fsum(math.exp(p) * (p - q) for p, q in zip(full, blended, strict=True))


def figures_of(driver: Driver) -> dict[str, Any]:
    figures: dict[str, Any] = driver.runtime.describe()["canary"]
    return figures


def begin(driver: Driver, *, salt: str | None = None) -> Counter[str]:
    """Empty the cache, store every chunk alone in it, and return the counts so far."""
    driver.settle()
    driver.flush()
    driver.ask(rag(*range(8), salt=salt))  # nothing is stored yet, so the canary leaves it alone
    driver.settle()
    return counts_of(driver)


def counts_of(driver: Driver) -> Counter[str]:
    figures = figures_of(driver)
    return Counter({name: figures[name] for name in ("compared", "skipped")})


def counted_since(driver: Driver, before: Counter[str]) -> tuple[int, int]:
    """Return how many requests were compared and skipped."""
    driver.settle()
    counts = counts_of(driver)
    return counts["compared"] - before["compared"], counts["skipped"] - before["skipped"]


def ask_in_turn(driver: Driver, prompts: list[Prompt]) -> tuple[list[Answer], tuple[int, int]]:
    before = begin(driver)
    answers = []
    for prompt in prompts:
        answers.append(driver.ask(prompt)[0])
        driver.settle()
    return answers, counted_since(driver, before)

"""Two ranks of one model find and learn alike (L9), or their collectives would not match."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from engines import model_folder
from harness import Driver, Prompt, Ranks, random_tokens
from tiny_models import make_model

__all__ = ["model_folder"]  # fixture

pytestmark = pytest.mark.engine

DOCUMENTS = [random_tokens(900 + number, 64 + 20 * number) for number in range(6)]
FEW, MANY = 40, 500


@pytest.fixture(scope="module")
def ranks(model_folder: Any) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang wants a NUMA node for each rank
        running = Ranks(
            make_model("llama", model_folder),
            2,
            enable_blend=True,
            blend_check_layer=1,
            blend_when="always",
            blend_find="learned",
            blend_learn_share=0.5,
            max_total_tokens=3000,
        )
    yield running
    running.close()


def _ask_many(driver: Driver, count: int) -> tuple[list[int], dict[str, int]]:
    """Ask random mixes of documents; return what was found in each, and what was learned."""
    draw = random.Random(5)
    driver.settle()
    driver.flush()
    found = []
    for number in range(count):
        segments = [random_tokens(number, draw.randrange(1, 30))]
        for document in draw.sample(DOCUMENTS, draw.randrange(1, 4)):
            segments += [
                document[: draw.randrange(40, 200)],
                random_tokens(draw.randrange(10**6), 4),
            ]
        salt = draw.choice((None, "a"))
        (answer,) = driver.ask(Prompt(segments, salt=salt, logprobs=False))
        found.append(answer.report["found_tokens"])
        if number % 8 == 0:
            driver.settle()
    driver.settle()
    described: dict[str, int] = driver.runtime.describe()["finding"]
    return found, described


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_l9_two_ranks_learn_and_find_alike(ranks: Ranks, count: int) -> None:
    (found, described), (others, other) = ranks.call(_ask_many, count)
    assert found == others
    assert described == other
    # Documents are cut to 40 to 200 tokens, and parts below 64 tokens are not used.
    assert sum(map(bool, found)) > count // 8
    assert described["learned_chunks"] > 3

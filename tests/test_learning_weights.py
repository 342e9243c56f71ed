"""Text that was looked at under old weights is learned for the present ones, or not at all."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, random_tokens
from test_orders import other_weights
from tiny_models import make_model

from sgl_blend.radix_ext.namespaces import is_chunk_of

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

TEXT = random_tokens(700, 400)


def _prompt(number: int, salt: str) -> Prompt:
    return Prompt(
        [random_tokens(800 + number, 40), TEXT, random_tokens(900 + number, 9)], salt=salt
    )


def _learned_across_an_update(
    driver: Driver, own: str, other: str, in_prefill: bool
) -> dict[str, Any]:
    """Change the weights while a prompt waits or is prefilled, and see what is learned from it."""
    salt = f"in prefill {in_prefill}"
    driver.settle()
    driver.flush()
    driver.ask(_prompt(0, salt))
    driver.settle()
    if in_prefill:
        req = driver.submit(_prompt(1, salt))
        driver.run_until(lambda: driver.scheduler.chunked_req is req)
    else:
        first = driver.submit(Prompt([random_tokens(950, 600)]))
        driver.run_until(lambda: driver.scheduler.chunked_req is first)
        req = driver.submit(_prompt(1, salt))
    learner, finder = driver.runtime.learner, driver.runtime.finder
    watched = patch.object(learner.builder, "enqueue", wraps=learner.builder.enqueue)
    with watched as enqueue, other_weights(driver, own, other):
        driver.run_until(req.finished)
        driver.settle()
        (key,) = [key for call in enqueue.call_args_list for key in call.args[0]]
        model = driver.runtime.describe()["model_fingerprint"]
        return {
            "length": key.length,
            "is_of_present_weights": is_chunk_of(key.salt, model),
            "is_stored": finder.is_stored(key),
            "pending": learner.builder.num_pending,
        }


@pytest.mark.parametrize("in_prefill", [False, True])
def test_nothing_is_built_for_weights_that_are_gone(
    start_engine: StartEngine, model_folder: Path, in_prefill: bool
) -> None:
    other = str(make_model("llama", model_folder / "other", seed=1))
    engine = start_engine(
        blend_find="learned", blend_learn_share=1.0, chunked_prefill_size=256, max_total_tokens=8000
    )
    own = str(make_model("llama", model_folder))
    seen = engine.call(_learned_across_an_update, own, other, in_prefill)
    assert seen["length"] > 300
    assert seen["is_of_present_weights"] == (not in_prefill)
    assert seen["is_stored"] == (not in_prefill)
    assert seen["pending"] == 0


def _learned_again(driver: Driver) -> list[int]:
    """Show a text that is learned, and then forget how it begins; return what is found of it."""
    driver.settle()
    driver.flush()
    found = []
    for number in range(6):
        if number == 3:
            driver.runtime.finder.clear()
        (answer,) = driver.ask(_prompt(10 + number, "again"))
        found.append(answer.report["found_tokens"])
        driver.settle()
    return found


def test_a_chunk_whose_beginning_was_forgotten_is_found_again(start_engine: StartEngine) -> None:
    engine = start_engine(
        blend_find="learned", blend_learn_share=1.0, chunked_prefill_size=256, max_total_tokens=8000
    )
    found = engine.call(_learned_again)
    assert found[2] > 300
    assert found[3] == 0
    assert found[5] > 300

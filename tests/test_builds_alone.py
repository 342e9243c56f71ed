"""Requests that fit the pool one by one are blended, though together their chunks do not."""

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, rag_prompt, random_tokens

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
QUESTION = random_tokens(99, 20)


def _reasons(driver: Driver, clients: int) -> list[str | None]:
    """Send requests at once whose chunks push each other out; return why each was not blended."""
    reqs = []
    for client in range(clients):
        chunks = [random_tokens(900 + 10 * client + i, 120) for i in range(3)]
        prompt = rag_prompt(SYSTEM, chunks, QUESTION, max_new_tokens=12, logprobs=False)
        reqs.append(driver.submit(prompt))
    driver.run_until(lambda: all(req.finished() for req in reqs))
    return [req.sgl_blend.report.for_client()["fallback"] for req in reqs]


@pytest.mark.parametrize("clients", [2, 6])
def test_chunks_that_push_each_other_out_are_built_one_request_at_a_time(
    start_engine: StartEngine, clients: int
) -> None:
    engine = start_engine(blend_on_miss="build", max_total_tokens=1_000, blend_min_chunk_tokens=32)
    assert engine.call(_reasons, clients) == [None] * clients

"""Requests that fit the pool one by one are blended, though together their chunks do not."""

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, largest_difference, rag_prompt, random_tokens

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


def _steps_beside_a_decode(driver: Driver) -> tuple[int, str | None]:
    """Let a request decode whose KV leaves no room for all chunks of another; count build steps."""
    driver.settle()
    driver.flush()
    before = driver.runtime.builder.num_steps
    decoding = Prompt([random_tokens(970, 650)], max_new_tokens=30, logprobs=False)
    first = driver.submit(decoding)
    driver.run_until(lambda: len(first.output_ids) > 1)
    chunks = [random_tokens(950 + i, 120) for i in range(4)]
    params = {"sgl_blend_policy": "hkvd"}
    answer = driver.ask(rag_prompt(SYSTEM, chunks, QUESTION, params=params))[0]
    driver.settle()
    return driver.runtime.builder.num_steps - before, answer.report["fallback"]


def test_a_build_pushes_out_no_chunk_of_its_own_request(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build", max_total_tokens=1_120)
    assert engine.call(_steps_beside_a_decode) == (5, None)


def _layer_rows(driver: Driver, policy: str) -> tuple[str | None, int]:
    """Return the reason against blending, and layer rows, if one chunk stays and one moves."""
    segments = [SYSTEM, random_tokens(979, 33), random_tokens(980, 120), QUESTION]
    prompt = Prompt(segments, [1, 2], params={"sgl_blend_policy": policy}, logprobs=False)
    report = driver.ask(prompt)[0].report
    driver.settle()
    assert report["reused_tokens"] > 0
    return report["fallback"], report["layer_rows"]


def test_a_pool_without_room_for_probes_is_one_without_memory(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build", max_total_tokens=500, blend_min_chunk_tokens=32)
    without = engine.call(_layer_rows, "hkvd")
    assert without[0] is None
    assert engine.call(_layer_rows, "funnel") == without


def _after_smaller_requests(driver: Driver, policy: str) -> tuple[list[int], float]:
    """Ask cold, and again after others had the same chunks probed one at a time."""
    first, large, small = random_tokens(990, 40), random_tokens(991, 300), random_tokens(992, 100)
    params = {"sgl_blend_policy": policy}
    both = rag_prompt(SYSTEM, [first, large, small], QUESTION, params=params)
    driver.settle()
    driver.flush()
    cold = driver.ask(both)[0]
    driver.settle()
    driver.flush()
    for chunks in ([first, large], [large, small]):
        driver.ask(rag_prompt(SYSTEM, chunks, QUESTION, params=params))
        driver.settle()
    warm = driver.ask(both)[0]
    driver.settle()
    rows = [answer.report["layer_rows"] for answer in (cold, warm)]
    return rows, largest_difference(cold.logprobs[0], warm.logprobs[0])


@pytest.mark.parametrize("pool", [1_040, 1_060, 1_120])
def test_a_tight_pool_answers_alike_whatever_was_remembered(
    start_engine: StartEngine, pool: int
) -> None:
    engine = start_engine(blend_on_miss="build", max_total_tokens=pool)
    (cold, warm), difference = engine.call(_after_smaller_requests, "funnel")
    assert cold == warm
    assert difference < 1e-4


PAGE = 64


@pytest.mark.parametrize(
    ("settings", "shortest"),
    [
        ({"blend_on_miss": "build"}, PAGE - len(SYSTEM)),
        ({"blend_on_miss": "compute"}, PAGE - len(SYSTEM)),
        ({"blend_preset": "block"}, PAGE),
    ],
    ids=str,
)
def test_a_chunk_that_fills_no_page_is_text(
    start_engine: StartEngine, settings: dict[str, str], shortest: int
) -> None:
    engine = start_engine(**settings, page_size=PAGE, blend_min_chunk_tokens=1)
    engine.flush()
    for tokens, num_chunks in ((shortest - 1, 1), (shortest, 2)):
        chunks = [random_tokens(990, 150), random_tokens(991, tokens)]
        engine.ask(rag_prompt(SYSTEM, chunks, QUESTION))
        engine.settle()
        report = engine.ask(rag_prompt(SYSTEM, chunks[::-1], QUESTION))[0].report
        assert report["fallback"] is None
        assert (report["chunk_hits"], report["chunk_misses"]) == (num_chunks, 0)
        assert report["reused_tokens"] > 0


def _shortest_lesson(driver: Driver) -> int:
    shortest: int = driver.runtime.learner._lessons._least
    return shortest


@pytest.mark.parametrize(("page", "shortest"), [(16, 64), (128, 128)])
def test_no_chunk_is_learned_that_fills_no_page(
    start_engine: StartEngine, page: int, shortest: int
) -> None:
    engine = start_engine(blend_find="learned", page_size=page)
    assert engine.call(_shortest_lesson) == shortest


def test_the_build_prefix_is_exact_in_front_of_text_that_is_no_chunk(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(blend_on_miss="compute")
    engine.flush()
    short, *chunks = (random_tokens(980 + i, tokens) for i, tokens in enumerate((9, 150, 150)))
    engine.ask(rag_prompt(SYSTEM, [short, *chunks], QUESTION))
    engine.settle()
    params = {"sgl_blend_ratio": 0.3}  # in a namespace where no prompt was answered yet
    report = engine.ask(rag_prompt(SYSTEM, [short, *chunks[::-1]], QUESTION, params=params))[
        0
    ].report
    assert (report["chunk_hits"], report["chunk_misses"]) == (2, 0)
    assert report["prefix_tokens"] == len(SYSTEM)
    assert report["computed_tokens"] == len(short) + len(QUESTION)

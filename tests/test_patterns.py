"""L6: any pattern of prefix, chunk and hole is legal, on the real scheduler with a pool that evicts."""

from dataclasses import dataclass
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, largest_difference, random_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_blend.policies import POLICIES

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEMS = [random_tokens(1, 24), random_tokens(2, 9), []]
DOCUMENTS = [random_tokens(100 + i, length) for i, length in enumerate((33, 40, 64, 70, 47, 12))]
DOCUMENTS.append([*DOCUMENTS[2][:40], *random_tokens(7, 25)])  # begins like another
HOLES = [random_tokens(200 + i, length) for i, length in enumerate((1, 8, 40))]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """One request of a case, as numbers that Hypothesis can shrink."""

    system: int
    pieces: tuple[tuple[bool, int], ...]
    question: int
    ratio: float
    policy: str
    tenant: str | None
    new_tokens: int

    def prompt(self) -> Prompt:
        segments = [SYSTEMS[self.system]]
        chunk_at = []
        for is_chunk, number in self.pieces:
            source = DOCUMENTS if is_chunk else HOLES
            if is_chunk:
                chunk_at.append(len(segments))
            segments.append(source[number % len(source)])
        segments.append(random_tokens(300 + self.question, 1 + self.question))
        return Prompt(
            segments,
            chunk_at,
            params={"sgl_blend_ratio": self.ratio, "sgl_blend_policy": self.policy},
            salt=self.tenant,
            max_new_tokens=self.new_tokens,
        )


requests = st.builds(
    Request,
    system=st.integers(0, len(SYSTEMS) - 1),
    pieces=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=6).map(tuple),
    question=st.integers(0, 8),
    ratio=st.sampled_from([0.0, 0.15, 1.0, 1.0]),
    policy=st.sampled_from(
        ["hkvd", "funnel", "remembered", "first-k", "random", "none", "block", "all"]
    ),
    tenant=st.sampled_from([None, "a", "b"]),
    new_tokens=st.integers(1, 3),
)
cases = st.lists(st.lists(requests, min_size=1, max_size=3), min_size=1, max_size=3)

SETUPS: dict[str, dict[str, Any]] = {
    "compute": {"blend_on_miss": "compute"},
    "build": {"blend_on_miss": "build"},
    "chunked": {"blend_on_miss": "build", "chunked_prefill_size": 40},
    "pages": {"blend_on_miss": "compute", "page_size": 8},
    "budget": {"chunked_prefill_size": 96},
    "overlap": {"disable_overlap_schedule": False},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 64, "page_size": 8},
}


def _run_case(driver: Driver, batches: list[list[Request]]) -> None:
    """Serve the batches one after another and check every answer."""
    for batch in batches:
        prompts = [request.prompt() for request in batch]
        answers = driver.ask(*prompts)
        for request, prompt, answer in zip(batch, prompts, answers, strict=True):
            check_report(answer.report, len(prompt.tokens))
            own = POLICIES[request.policy].fixed_ratio
            assert answer.report["policy"] == request.policy, answer.report
            assert answer.report["ratio"] == (request.ratio if own is None else own), answer.report
            keeps_none = request.policy in ("none", "block")
            exact = request.policy == "all" or (request.ratio == 1.0 and not keeps_none)
            if exact:
                check_against_full_prefill(driver, prompt, answer.output_ids, answer.logprobs)
        driver.settle()


def check_report(report: dict[str, Any], num_tokens: int) -> None:
    counts = [report[f"{kind}_tokens"] for kind in ("prefix", "reused", "recomputed", "computed")]
    assert all(count >= 0 for count in counts), report
    assert sum(counts) == report["prompt_tokens"] == num_tokens, report
    assert report["computed_tokens"] >= 1, report


def check_against_full_prefill(
    driver: Driver, prompt: Prompt, output_ids: list[int], logprobs: list[list[float]]
) -> None:
    plain = Prompt([prompt.tokens], salt="reference", max_new_tokens=prompt.max_new_tokens)
    full = driver.ask(plain)[0]
    assert output_ids == full.output_ids
    for got, want in zip(logprobs, full.logprobs, strict=True):
        assert largest_difference(got, want) <= TOLERANCE


def _check_patterns(start_engine: StartEngine, setup: str, num_cases: int) -> None:
    engine = start_engine(max_total_tokens=1400, **SETUPS[setup])

    @settings(
        max_examples=num_cases,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(cases)
    def run(case: list[list[Request]]) -> None:
        engine.call(_run_case, case)

    run()


@pytest.mark.parametrize("setup", SETUPS)
def test_l6_any_pattern_is_legal(start_engine: StartEngine, setup: str) -> None:
    _check_patterns(start_engine, setup, 30)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_l6_any_pattern_is_legal_thousands_of_times(start_engine: StartEngine, setup: str) -> None:
    _check_patterns(start_engine, setup, 2000)

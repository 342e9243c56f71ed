"""The engine against CacheBlend written down once more (reference.py).

Whatever the engine does with slots, rows, windows and stages, its logits must be the reference's.
"""

from array import array
from pathlib import Path

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, rag_prompt, random_tokens
from reference import CHUNKS, MAX_ASKED, QUESTION, SYSTEM, Reference, find_scores
from tiny_models import VOCAB_SIZE, make_model

from sgl_blend.policies import EXACT, MOVED, NAMED, POLICIES
from sgl_blend.scheduler.probes import made_up_texts

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

TEXTS = [array("q", text).tolist() for text in made_up_texts(VOCAB_SIZE)]
TOLERANCE = 2e-4
"""On log-probabilities; the engine computes in float32."""


def test_every_score_is_written_down_once_more() -> None:
    scored = {name for name in NAMED if POLICIES[name].score is not None}
    assert find_scores().keys() == scored, "SCORES in a tests/test_policy_NAME.py"


@pytest.mark.parametrize("check_layer", [1, 2])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != MOVED])
def test_the_engine_blends_as_written_down(
    start_engine: StartEngine, model_folder: Path, policy: str, check_layer: int
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=check_layer)
    reference = Reference(make_model("llama", model_folder))
    for ratio in (0.1, 0.4, 0.8):
        prompt = rag_prompt(
            SYSTEM,
            CHUNKS,
            QUESTION,
            params={"sgl_blend_policy": policy, "sgl_blend_ratio": ratio},
        )
        answer = engine.ask(prompt)[0]

        want = reference.blend(policy, ratio, check_layer, texts=TEXTS)

        assert answer.report["chunk_hits"] == 3
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"ratio {ratio}"


# Several steps, and beside requests that blend what is not true: chunks 1 and 2 are moved in all.
@pytest.mark.parametrize("chunked", [-1, 64])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name.startswith(EXACT)])
def test_dropping_rows_of_true_kv_is_a_full_prefill(
    start_engine: StartEngine, model_folder: Path, policy: str, chunked: int
) -> None:
    engine = start_engine(
        blend_on_miss="build", blend_eval=True, blend_check_layer=1, chunked_prefill_size=chunked
    )
    want = Reference(make_model("llama", model_folder)).blend("all", 1.0, 1)
    params = [
        {"sgl_blend_policy": name, "sgl_blend_ratio": 0.3} for name in (policy, "hkvd", policy)
    ]
    prompts = [rag_prompt(SYSTEM, CHUNKS, QUESTION, params=one) for one in params]

    answers, _ = engine.call(_ask_at_once, prompts)

    for answer in (answers[0], answers[2]):
        assert answer.report["reused_tokens"] > 0
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE


def test_oracle_gives_every_layer_the_same_say(
    start_engine: StartEngine, model_folder: Path
) -> None:
    # Layers deviate on scales of their own. Only some budgets tell whether that was made up for.
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    reference = Reference(make_model("llama", model_folder))
    moved, stored = reference.stored(len(SYSTEM) + len(CHUNKS[0]))
    truth = reference.prefill([*SYSTEM, *(token for chunk in CHUNKS for token in chunk), *QUESTION])
    layers = [
        (true.v[moved] - copy.v).square().sum((1, 2))
        for true, copy in zip(truth[2:], stored[2:], strict=True)
    ]
    even, raw = sum(one / one.mean() for one in layers), sum(layers)
    assert isinstance(even, torch.Tensor)
    assert isinstance(raw, torch.Tensor)
    budgets = [
        budget
        for budget in range(1, len(moved))
        if set(even.topk(budget).indices.tolist()) != set(raw.topk(budget).indices.tolist())
    ]
    assert budgets, "this model's layers deviate alike"
    for budget in budgets[:4]:
        ratio = budget / len(moved)
        params = {"sgl_blend_policy": "oracle", "sgl_blend_ratio": ratio}

        answer = engine.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, params=params))[0]

        want = reference.blend("oracle", ratio, 1)
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"budget {budget}"


def test_a_long_question_asks_with_its_last_rows(
    start_engine: StartEngine, model_folder: Path
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    reference = Reference(make_model("llama", model_folder))
    question = random_tokens(98, MAX_ASKED + 70)
    for ratio in (0.1, 0.4):
        params = {"sgl_blend_policy": "query-aware", "sgl_blend_ratio": ratio}

        answer = engine.ask(rag_prompt(SYSTEM, CHUNKS, question, params=params))[0]

        want = reference.blend("query-aware", ratio, 1, question)
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"ratio {ratio}"


def _ask_at_once(driver: Driver, prompts: list[Prompt]) -> tuple[list[Answer], int]:
    """Return the answers and how many batches it took."""
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))  # builds
    driver.settle()
    before = driver.num_batches
    return driver.ask(*prompts), driver.num_batches - before


def test_policies_that_drop_rows_in_different_layers_share_a_batch(
    start_engine: StartEngine, model_folder: Path
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    reference = Reference(make_model("llama", model_folder))
    policies = ["query-aware", "first-k", "gradual", "hkvd-k", "edge", "query-aware", "hybrid"]
    questions = [random_tokens(200 + number, 15 + 3 * number) for number in range(len(policies))]
    prompts = [
        rag_prompt(
            SYSTEM,
            CHUNKS,
            questions[number],
            params={"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3 + 0.01 * number},
        )
        for number, policy in enumerate(policies)
    ]

    answers, num_batches = engine.call(_ask_at_once, prompts)

    assert num_batches == 1
    for number, (policy, answer) in enumerate(zip(policies, answers, strict=True)):
        want = reference.blend(policy, 0.3 + 0.01 * number, 1, questions[number])
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"{number}: {policy}"

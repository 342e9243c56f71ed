"""Prompts of the laws, the models they hold for, and what a full prefill answers."""

from importlib.metadata import version
from typing import Any

import pytest
import torch
from harness import Answer, Engine, Prompt, random_tokens
from tiny_models import class_of

from sgl_blend.engine.compatibility import NOT_TESTED

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 60 + 9 * i) for i in range(6)]
HOLE = random_tokens(50, 15)
QUESTION = random_tokens(99, 20)

OFTEN = (
    "llama",
    "llama-mha-tied",
    "llama-llama3",
    "llama-linear",
    "llama-partial-gptj",
    "mistral",
    "qwen2",
    "qwen3-yarn",
    "qwen3-moe",
    "glm4-moe",
    "mixtral",
    "llama+fp8_e4m3",
)
"""Every way that layers are run, rotated and headed, and KV in 8 bit. .ci/run runs the others, too."""
SELDOM = (
    *("qwen2-moe", "minimax-m2"),
    *("llama-partial-gptj+fp8_e4m3", "qwen3-yarn+fp8_e5m2", "glm4-moe+fp8_e5m2"),
    *("arcee", "gemma", "glm4", "ministral3", "mistral3", "phi3"),
)
SERVED_KINDS = (*OFTEN, *SELDOM)


def full_prefill(engine: Engine, prompt: Prompt, salt: str = "reference") -> Answer:
    """Answer the same tokens without chunks, in a namespace of their own."""
    tokens = Prompt(
        [prompt.tokens],
        salt=salt,
        adapter=prompt.adapter,
        max_new_tokens=prompt.max_new_tokens,
        logprob_start_len=prompt.logprob_start_len,
    )
    return engine.ask(tokens)[0]


@pytest.fixture(
    scope="module",
    params=[*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SELDOM)],
)
def served_kind(request: pytest.FixtureRequest) -> str:
    """Name every model in turn; tests of one model run together and share its engine."""
    kind: str = request.param
    if version("sglang") in NOT_TESTED.get(class_of(kind), ()):
        pytest.skip("this class is refused with this SGLang")
    return kind


def scattered(**rest: Any) -> Prompt:
    """A chunk in its place, text of no chunk, two chunks that moved, and a question."""
    segments = [SYSTEM, CHUNKS[3], HOLE, CHUNKS[0], CHUNKS[2], QUESTION]
    return Prompt(segments, [1, 3, 4], **rest)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are equal bit for bit, whatever their dtype."""
    a, b = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and torch.equal(a, b)

"""What tests ask an engine, what came of it, and how far two answers are apart."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tiny_models import VOCAB_SIZE


@dataclass
class Prompt:
    """A request as a test writes it."""

    segments: list[list[int]]
    """Tokens before the first chunk, the chunks and pieces between, tokens after the last."""
    chunk_at: list[int] = field(default_factory=list)
    """Which segments are chunks."""
    params: dict[str, Any] = field(default_factory=dict)
    """custom_params beside the spans."""
    salt: str | None = None
    adapter: str | None = None
    """Id of a LoRA adapter that SGLang has loaded."""
    extra_key: str | None = None
    max_new_tokens: int = 1
    temperature: float = 0.0
    logprob_start_len: int = -1
    priority: int | None = None
    ignore_eos: bool = True
    logprobs: bool = True
    """Ask for the logprobs of the whole vocabulary; SGLang keeps such requests out of mixed batches."""

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment]

    @property
    def spans(self) -> list[int]:
        offsets: list[int] = []
        for index in self.chunk_at:
            start = sum(len(segment) for segment in self.segments[:index])
            offsets += [start, start + len(self.segments[index])]
        return offsets


@dataclass
class Answer:
    """What came of a request."""

    output_ids: list[int]
    logprobs: list[list[float]]
    """Per output token the log-probability of every token of the vocabulary."""
    input_logprobs: list[float]
    report: dict[str, Any]
    finish: str


def random_tokens(seed: int, length: int) -> list[int]:
    """Return tokens that no other seed gives, none of them special."""
    draw = random.Random(seed)
    return [draw.randrange(8, VOCAB_SIZE) for _ in range(length)]


def rag_prompt(
    system: list[int], chunks: list[list[int]], question: list[int], **rest: Any
) -> Prompt:
    """Build the usual prompt: a system prompt, chunks, a question."""
    return Prompt([system, *chunks, question], list(range(1, 1 + len(chunks))), **rest)


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest absolute difference of two rows of log-probabilities."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

"""Prompts of a system prompt, some of eight chunks, and a question."""

from typing import Any

from prompts import Prompt, rag_prompt, random_tokens

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 80) for i in range(8)]
QUESTION = random_tokens(99, 20)


def rag(*numbers: int, **rest: Any) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, **rest)

"""Prompts of random tokens: a system prompt, documents in changing order, a question that is new."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its chunks.

    Attributes:
        token_ids: What the model sees.
        spans: Start and end of every chunk in turn; the chunks follow one another.
    """

    token_ids: list[int]
    spans: list[int]

    @property
    def num_reusable(self) -> int:
        """Tokens whose KV is stored once every chunk is: system prompt and chunks."""
        return self.spans[-1]


class Library:
    """A system prompt and documents, and the prompts that can be made of them.

    Args:
        draw: Source of every random token.
        vocab_size: Of the model. Only the middle eight tenths are used: special tokens lie at
            the ends.
        system_tokens: Length of the system prompt.
        chunk_tokens: Length of every document.
        num_documents: How many there are.
    """

    def __init__(
        self,
        draw: random.Random,
        vocab_size: int,
        *,
        system_tokens: int,
        chunk_tokens: int,
        num_documents: int,
    ) -> None:
        self._draw = draw
        self._vocabulary = range(vocab_size // 10, vocab_size * 9 // 10)
        self._system = self._tokens(system_tokens)
        self._chunk_tokens = chunk_tokens
        self._documents = self._new_documents(num_documents)

    def _tokens(self, count: int, draw: random.Random | None = None) -> list[int]:
        return (draw or self._draw).choices(self._vocabulary, k=count)

    def _new_documents(self, count: int) -> list[list[int]]:
        return [self._tokens(self._chunk_tokens) for _ in range(count)]

    def renew(self) -> None:
        """Replace every document by a new one; the system prompt stays."""
        self._documents = self._new_documents(len(self))

    def __len__(self) -> int:
        return len(self._documents)

    def prompt(
        self, order: Sequence[int], question_tokens: int, draw: random.Random | None = None
    ) -> Prompt:
        """Return a prompt with a question of its own.

        Args:
            order: Indices of its documents.
            question_tokens: Length of the question.
            draw: Source of the question, by default the library's.
        """
        token_ids, spans = list(self._system), list[int]()
        for index in order:
            document = self._documents[index]
            spans += [len(token_ids), len(token_ids) + len(document)]
            token_ids += document
        return Prompt(token_ids + self._tokens(question_tokens, draw), spans)

    def order(self, count: int, first: int) -> list[int]:
        """Draw so many documents without repeating one, beginning with the first."""
        others = [index for index in range(len(self)) if index != first]
        return [first, *self._draw.sample(others, count - 1)]

    def introductions(self, count: int, question_tokens: int) -> Iterator[Prompt]:
        """Yield prompts of count documents each that hold every document at least once."""
        for start in range(0, len(self), count):
            order = [(start + place) % len(self) for place in range(count)]
            yield self.prompt(order, question_tokens)


def to_body(
    prompt: Prompt,
    params: dict[str, Any] | None,
    max_new_tokens: int,
    *,
    first_and_last: bool = False,
) -> bytes:
    """Return the body of a streamed request to ``/generate``.

    Args:
        prompt: What to send.
        params: ``custom_params`` beside the spans; None to send neither, as to a stock server.
        max_new_tokens: Length of the answer: the end-of-text token does not end it.
        first_and_last: Stream two pieces alone, the first token and the rest. A client that reads
            every token of a hundred answers at once would measure itself.
    """
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
    }
    if first_and_last:
        sampling["stream_interval"] = max(2, max_new_tokens)
    if params is not None:
        sampling["custom_params"] = {**params, "sgl_blend_spans": prompt.spans}
    return msgspec.json.encode(
        {"input_ids": prompt.token_ids, "sampling_params": sampling, "stream": True}
    )

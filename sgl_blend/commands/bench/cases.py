"""What kinds of prompts ``bench ttft`` sends."""

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_blend.errors import CommandError

PAPER = "paper"
PAPER_CHUNKS, PAPER_CHUNK_TOKENS = 6, 512
"""Setting of CacheBlend's own TTFT figures: six chunks of 512 tokens and a question."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of prompt, and how many are sent at once.

    Attributes:
        name: For people.
        system_tokens: In front of the chunks.
        num_chunks: In every prompt.
        chunk_tokens: Length of each.
        nominal_chunk_tokens: The length that was asked for.
        question_tokens: After them, new in every prompt.
        batch: Prompts sent at the same time.
    """

    name: str
    system_tokens: int
    num_chunks: int
    chunk_tokens: int
    nominal_chunk_tokens: int
    question_tokens: int
    batch: int

    @property
    def prompt_tokens(self) -> int:
        """Length of a prompt."""
        return self.system_tokens + self.num_chunks * self.chunk_tokens + self.question_tokens

    @property
    def num_documents(self) -> int:
        """How many chunks are needed for the prompts of a batch to begin with different ones."""
        return max(self.num_chunks, self.batch)

    @property
    def least_tokens(self) -> int:
        """Tokens of KV that a server must hold at least: all documents and a batch."""
        stored = self.system_tokens + self.num_documents * self.chunk_tokens
        return stored + self.batch * (self.prompt_tokens + 1)

    @property
    def ample_tokens(self) -> int:
        """Tokens of KV with which no document is evicted while it is needed."""
        return self.least_tokens + 3 * self.batch * self.prompt_tokens


def make_case(
    length: int | str, chunk_tokens: int, batch: int, *, system_tokens: int, question_tokens: int
) -> Case:
    """Describe prompts of a length, cut into equal chunks of about chunk_tokens each.

    Args:
        length: Tokens of a whole prompt, or PAPER for the paper's setting.
        chunk_tokens: Wanted length of the chunks; not used for PAPER.
        batch: Prompts sent at once.
        system_tokens: Length of the system prompt.
        question_tokens: Length of the question; it takes what equal chunks leave over.

    Raises:
        CommandError: Fewer than two chunks fit.
    """
    if length == PAPER:
        return Case(
            name=f"{PAPER_CHUNKS} x {PAPER_CHUNK_TOKENS} + question (the paper's)",
            system_tokens=system_tokens,
            num_chunks=PAPER_CHUNKS,
            chunk_tokens=PAPER_CHUNK_TOKENS,
            nominal_chunk_tokens=PAPER_CHUNK_TOKENS,
            question_tokens=question_tokens,
            batch=batch,
        )
    assert isinstance(length, int), "the only named length is the paper's"
    for_chunks = length - system_tokens - question_tokens
    num_chunks = round(for_chunks / chunk_tokens)
    if num_chunks < 2:
        raise CommandError(
            f"a prompt of {length} tokens must have room for 2 chunks of {chunk_tokens} beside "
            f"{system_tokens} tokens of system prompt and {question_tokens} of question"
        )
    size, rest = divmod(for_chunks, num_chunks)
    return Case(
        name=f"{length} tokens",
        system_tokens=system_tokens,
        num_chunks=num_chunks,
        chunk_tokens=size,
        nominal_chunk_tokens=chunk_tokens,
        question_tokens=question_tokens + rest,
        batch=batch,
    )


def make_cases(
    lengths: Sequence[int | str],
    chunk_tokens: Sequence[int],
    batches: Sequence[int],
    *,
    system_tokens: int,
    question_tokens: int,
) -> list[Case]:
    """Return every combination; PAPER has chunks of its own length only.

    Raises:
        CommandError: Fewer than two chunks fit a prompt.
    """
    return [
        make_case(length, size, batch, system_tokens=system_tokens, question_tokens=question_tokens)
        for length in lengths
        for size in ([PAPER_CHUNK_TOKENS] if length == PAPER else chunk_tokens)
        for batch in batches
    ]

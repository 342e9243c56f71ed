"""How strong a border of text each token is: chunks are best begun behind a strong one."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Strengths = NDArray[np.uint8]


class Border(IntEnum):
    """What ends with a token, the strongest last."""

    NONE = 0
    SENTENCE = 1
    LINE = 2
    BLANK_LINE = 3
    SPECIAL = 4


HEADER = 8
"""Tokens of a header in front of a message; special tokens no further apart belong together."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids of the special tokens that have a role."""
        ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Name tokens as the vocabulary spells them."""
        ...

    def __len__(self) -> int: ...


_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")  # noqa: RUF001 - those of Chinese and Japanese
_SPELLED = {"Ċ": "\n", "č": "\r", "Ġ": " ", "ĉ": "\t", "▁": " ", "<0x0A>": "\n", "<0x0D>": "\r"}
"""How byte-level vocabularies and those of SentencePiece write white space."""


class Borders:
    """Strengths of all tokens of a vocabulary; it never changes.

    Args:
        strengths: uint8 [num_ids], a Border for each id. Ids beyond it are no border.
    """

    def __init__(self, strengths: Strengths) -> None:
        # The last one stands for all ids beyond the vocabulary.
        self._strengths = np.append(strengths, np.uint8(Border.NONE))

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "Borders":
        """Read the borders off a tokenizer; without one no token is a border."""
        if tokenizer is None:
            return cls(np.zeros(0, np.uint8))
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        strengths = np.fromiter(map(strength_of, pieces), np.uint8, len(pieces))
        special = [number for number in _special_ids(tokenizer) if number < len(strengths)]
        strengths[special] = Border.SPECIAL
        return cls(strengths)

    def behind(self, tokens: NDArray[np.integer[Any]]) -> Strengths:
        """Return how strong a border each token is: uint8 [n] for integers [n]."""
        return self._strengths.take(tokens, mode="clip")

    def before(self, tokens: NDArray[np.integer[Any]]) -> Strengths:
        """Measure the border in front of each token of a prompt.

        Args:
            tokens: Integers [n], ids of a prompt from its first token on.

        Returns:
            uint8 [n]. The prompt's beginning is as strong as a special token. Two line ends in a
            row are a blank line.
        """
        strengths = np.empty(len(tokens), np.uint8)
        if not len(tokens):
            return strengths
        strengths[0] = Border.SPECIAL
        strengths[1:] = self.behind(tokens[:-1])
        is_line = strengths[1:] == Border.LINE
        two_lines = np.flatnonzero(is_line[1:] & is_line[:-1]) + 2
        strengths[two_lines] = Border.BLANK_LINE
        return strengths


def strength_of(piece: str | None) -> Border:
    """Judge a token by how the vocabulary spells it; special tokens look like any other.

    Args:
        piece: As convert_ids_to_tokens gives it; None where an id has no token.
    """
    if not piece:
        return Border.NONE
    text = piece
    for spelled, meant in _SPELLED.items():
        text = text.replace(spelled, meant)
    body = text.rstrip()
    num_lines = text.count("\n", len(body))
    if num_lines:
        return Border.BLANK_LINE if num_lines > 1 else Border.LINE
    return Border.SENTENCE if body.endswith(_SENTENCE_ENDS) else Border.NONE


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return ids with a role, and those that were only added as special, as Llama 3's headers."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = {number for number, token in added.items() if getattr(token, "special", False)}
    return marked | set(tokenizer.all_special_ids)

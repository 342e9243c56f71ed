"""What of a stream of prompts came before: the most that a server could find again."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

RUN = 32
"""Tokens of the shortest run that counts as repeated."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """What of a prompt came before.

    Attributes:
        exact: Tokens that an earlier prompt begins with as well: what a prefix cache serves.
        repeated: Tokens behind them in a run of at least RUN tokens that an earlier prompt holds.
    """

    exact: int
    repeated: int


def count_repeats(stream: Iterable[Tokens]) -> list[Repeats]:
    """Count what comes again, prompt after prompt.

    Args:
        stream: int64 [n] of each prompt.
    """
    seen: set[bytes] = set()
    earlier: list[Tokens] = []
    found = []
    for tokens in stream:
        exact = min(max((_common(tokens, one) for one in earlier), default=0), len(tokens) - 1)
        windows = [tokens[at : at + RUN].tobytes() for at in range(len(tokens) - RUN + 1)]
        comes_again = np.zeros(len(tokens), bool)
        for at, window in enumerate(windows):
            if window in seen:
                comes_again[at : at + RUN] = True
        comes_again[:exact] = False
        comes_again[-1] = False  # the last token is always computed
        found.append(Repeats(exact, int(comes_again.sum())))
        seen.update(windows)
        earlier.append(tokens)
    return found


def _common(one: Tokens, other: Tokens) -> int:
    size = min(len(one), len(other))
    parted = np.flatnonzero(one[:size] != other[:size])
    return int(parted[0]) if len(parted) else size

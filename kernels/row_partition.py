"""Numbering the rows of a batch."""

import itertools
from collections.abc import Sequence


def first_rows(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each run when runs of these lengths follow one another."""
    return list(itertools.accumulate(lengths, initial=0))[:-1]

"""Numbering the rows of a batch, without asking the device anything.

Splitting rows into two ascending lists on the device, when only their count is known on the host:

``nonzero`` would have to tell the host how many rows it found, which stalls a GPU. A stable sort of
a mark per row gives the same two lists without that question.
"""

import itertools
from collections.abc import Sequence

import torch


def first_rows(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each run when runs of these lengths follow one another."""
    return list(itertools.accumulate(lengths, initial=0))[:-1]


def complement(chosen: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the rows of range(num_rows) that are not chosen.

    Args:
        chosen: int64 [k], distinct rows in any order.
        num_rows: Size of the range.

    Returns:
        int64 [num_rows - k], ascending.
    """
    mark = torch.ones(num_rows, dtype=torch.int8, device=chosen.device)
    mark[chosen] = 0
    order = torch.sort(mark, descending=True, stable=True).indices
    return order[: num_rows - chosen.numel()]

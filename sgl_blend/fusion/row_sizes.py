"""Numbers of rows that a device multiplies well, and budgets that reach them.

A GPU multiplies matrices in tiles. A few rows more than a whole number of tiles cost a tile more, and a
few rows less cost nothing less. So a step may recompute a few tokens more or fewer than its ratio says,
if the rows above the check layer are then such a number.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

TOLERANCE = 0.1
"""A step recomputes at most this share of its budget more or fewer, rounded down."""
MAX_RATIO = 0.5
"""Above it budgets stay as they are. So no ratio is too near to 1 for a budget to grow."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Numbers of rows that a device multiplies well; none of them where nothing was measured.

    Attributes:
        sizes: Ascending.
    """

    sizes: tuple[int, ...] = ()

    def snap(self, budget: int, others: int, ratio: float) -> int:
        """Return how many reused tokens a step recomputes, near to its budget.

        The nearest size is taken, and of two the smaller. So over many prompts the ratio is what it
        was meant to be. A larger step never has fewer rows.

        Args:
            budget: What the ratio says.
            others: Rows that are computed in any case.
            ratio: Share of the reused tokens that is recomputed.
        """
        rows, most = budget + others, int(TOLERANCE * budget)
        if ratio > MAX_RATIO or most == 0 or not self.sizes:
            return budget
        at = bisect.bisect_left(self.sizes, rows)
        near = min(self.sizes[max(0, at - 1) : at + 1], key=lambda size: abs(size - rows))
        return near - others if abs(near - rows) <= most else budget


NO_SIZES = RowSizes()

"""The tensor-parallel ranks of a model, and what they must agree on.

Every rank runs its own scheduler on the same requests and must come to the same decisions, or their
collectives no longer match and the server hangs. What differs from rank to rank, a clock or a sum over
the rank's own heads, goes through here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


class TPGroup:
    """One rank's view of its group; owned by the scheduler thread.

    Args:
        group: SGLang's GroupCoordinator of the tensor-parallel ranks; None for a single process.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return 1 if self._group is None else int(self._group.world_size)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self._group is None or self._group.rank_in_group == 0

    def agree(self, values: list[float]) -> list[float]:
        """Return the first rank's values on every rank; all ranks must ask together."""
        if self._group is None:
            return values
        told = torch.tensor(values, dtype=torch.float64)
        torch.distributed.broadcast(told, src=self._group.ranks[0], group=self._group.cpu_group)
        agreed: list[float] = told.tolist()
        return agreed

    def any(self, found: bool) -> bool:
        """Tell whether some rank found it so; all ranks must ask together.

        Goes over the host: while graphs are captured, a sum on the device may be a stand-in.
        """
        if self._group is None:
            return found
        told = torch.tensor([int(found)])
        torch.distributed.all_reduce(
            told, op=torch.distributed.ReduceOp.MAX, group=self._group.cpu_group
        )
        return bool(told.item())

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Do something on all ranks at once; if it fails on one of them, it fails on all.

        Raises:
            Exception: What the work raised.
            RuntimeError: It failed on another rank.
        """
        try:
            result = work()
        except Exception:
            self.any(True)
            raise
        if self.any(False):
            raise RuntimeError("it failed on another rank, whose log says why")
        return result

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up what each rank found for its own heads; the very same bits on every rank.

        Args:
            partial: Any shape and dtype; on the model's device, which is not waited for.

        Returns:
            The sum, same shape.
        """
        if self._group is None:
            return partial
        total: torch.Tensor = self._group.all_reduce(partial)
        # An all-reduce need not round alike on every rank, and a tie that falls differently is fatal.
        self._group.broadcast(total, src=0)
        return total


def this_group() -> TPGroup:
    """Return the group of this process, once SGLang has set it up."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return TPGroup(get_tp_group())

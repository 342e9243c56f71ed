"""New weights: all ranks take note of them together, though an update may fail on one rank alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_blend.engine.tp_group import TPGroup


class WeightOrders:
    """Tells when weights have changed; owned by the scheduler thread.

    SGLang goes on after an update that failed on one rank, and its hook is called on the others only.
    But the name of new weights is agreed on, so all ranks must ask for it or none.

    Args:
        tp_group: The ranks.
        changed: Is called on every rank if one has new weights.
    """

    def __init__(self, tp_group: TPGroup, changed: Callable[[], None]) -> None:
        self._tp_group = tp_group
        self._changed = changed
        self._has_new: bool | None = None

    @contextmanager
    def carried_out(self, *, may_update: bool) -> Iterator[None]:
        """Let SGLang carry out what it received, and then follow new weights.

        Args:
            may_update: Whether an order is among it that can change weights. All ranks receive it.
        """
        self._has_new = False
        try:
            yield
        finally:
            has_new, self._has_new = self._has_new, None
        if self._tp_group.any(has_new) if may_update else has_new:
            self._changed()

    def note(self) -> None:
        """Note that this rank has new weights."""
        if self._has_new is None:
            self._changed()
        else:
            self._has_new = True

"""The switch of one server: whether requests that arrive are blended."""

from collections.abc import Callable


class BlendSwitch:
    """On until somebody turns it off; owned by the scheduler thread.

    Attributes:
        is_on: Whether requests that arrive from now on are blended.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._listeners: list[Callable[[], None]] = []

    def when_turned_off(self, listener: Callable[[], None]) -> None:
        """Call somebody when it is turned off."""
        self._listeners.append(listener)

    def turn_off(self) -> None:
        """Blend no request that arrives from now on."""
        self.is_on = False
        for listener in self._listeners:
            listener()

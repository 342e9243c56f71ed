"""How much of the requests' time background builds and probes may take."""

BUILD_SHARE = 0.025
"""While requests run or wait, builds take at most this share of the time."""
PROBE_SHARE = 0.01
"""And probes, while there is nothing to be built."""
_FIRST_PRICE_S = 0.025
"""What a step is taken to cost until one has been timed."""


class ServedTime:
    """The time in which requests were served since a background step last ran among them.

    There is one for builds and probes together. What a request meets of both is what one budget
    allows: one step that others' time has paid for, and the next after a step's worth of its own.

    Owned by the scheduler thread; whoever calls brings a clock on which all ranks agree.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen_s: float | None = None
        self._was_busy = False

    def elapse(self, now_s: float, *, busy: bool) -> None:
        """Count the time since the last call, if requests were served then.

        Args:
            now_s: The clock.
            busy: Whether requests are served from now on.
        """
        if self._seen_s is not None and self._was_busy:
            self.seconds += max(0.0, now_s - self._seen_s)
        self._seen_s, self._was_busy = now_s, busy

    def stop_clock(self) -> None:
        """Count nothing until elapse() is called again: there is no background work."""
        self._seen_s = None

    def spend(self) -> None:
        """Begin anew, because a step runs now: nothing beyond one step is ever saved up."""
        self.seconds = 0.0


class BuildBudget:
    """Tells when the served time pays for a step; learns what a step costs.

    Args:
        served: The account, shared with other kinds of background work.
        share: Of the time in which requests are served.
    """

    def __init__(self, served: ServedTime, share: float) -> None:
        self._served = served
        self._share = share
        self._price_s = _FIRST_PRICE_S

    def affords_step(self) -> bool:
        """Tell whether requests were served long enough since the last step."""
        return self._share * self._served.seconds >= self._price_s

    def learn(self, seconds: float) -> None:
        """Take note of how long a step took."""
        self._price_s = (self._price_s + max(seconds, 1e-6)) / 2

    def charge(self) -> None:
        """Pay for a step."""
        self._served.spend()

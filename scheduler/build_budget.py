"""How much of the requests' time background builds and probes may take."""

BUILD_SHARE = 0.025
"""While requests run or wait, builds take at most this share of the time."""
PROBE_SHARE = 0.01
"""And probes, while there is nothing to be built."""
_FIRST_PRICE_S = 0.025
"""What a step is taken to cost until one has been timed."""


class BuildBudget:
    """Credit in seconds, earned while requests are served and spent on steps of builds.

    At most one step is saved up. So a request meets at most one step that others' time has paid for,
    and one more for each 1 / share times a step's duration that it runs itself.

    Owned by the scheduler thread; whoever calls brings a clock on which all ranks agree.

    Args:
        share: Of the time in which requests are served.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_s = 0.0
        self._price_s = _FIRST_PRICE_S
        self._seen_s: float | None = None
        self._was_busy = False

    def elapse(self, now_s: float, *, busy: bool) -> None:
        """Earn for the time since the last call, if requests were served then.

        Args:
            now_s: The clock.
            busy: Whether requests are served from now on.
        """
        if self._seen_s is not None and self._was_busy:
            earned = self._share * max(0.0, now_s - self._seen_s)
            self._credit_s = min(self._credit_s + earned, self._price_s)
        self._seen_s, self._was_busy = now_s, busy

    def stop_clock(self) -> None:
        """Earn nothing until elapse() is called again: nothing is there to be built."""
        self._seen_s = None

    def affords_step(self) -> bool:
        """Tell whether the credit pays for a step."""
        return self._credit_s >= self._price_s

    def learn(self, seconds: float) -> None:
        """Take note of how long a step took."""
        self._price_s = (self._price_s + max(seconds, 1e-6)) / 2

    def charge(self) -> None:
        """Pay for a step."""
        self._credit_s -= self._price_s

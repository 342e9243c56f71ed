"""How fast KV comes from host memory or from a store: seconds = latency + bytes / bandwidth.

Both numbers are fitted to a trial first and follow every load afterwards. One stalled call teaches
nothing; a link that has become slow is believed from its second slow load on.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_LATENCY_S = 1e-6
"""No link is quicker than that; an estimate of 0 could never grow again by a factor."""
_WINDOW = 3
_STEP = 0.5
"""Share of an error that is corrected at once, as a power: the exponential weight of a new load."""
_LARGEST_ERROR = math.log(32.0)
_WAIT_FACTOR, _WAIT_S = 2.0, 0.05


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of one link.

    Attributes:
        latency_s: Seconds until the first byte, positive.
        bytes_per_s: Bandwidth after that, positive.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Return how long one load takes; nothing takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """One load that was measured.

    Attributes:
        num_bytes: At least 1.
        seconds: From its issue until the last byte was there, positive.
    """

    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or not 0.0 < self.seconds < math.inf:
            raise ValueError(
                f"a load needs at least 1 byte and some time, got {self.num_bytes} bytes "
                f"in {self.seconds} s"
            )


def fit_speed(trial: Sequence[TimedLoad]) -> LinkSpeed:
    """Return the speed that fits a trial: the median line through its points (Theil and Sen).

    A stalled load among several good ones changes nothing.

    Args:
        trial: Loads of at least two different sizes, best far apart.

    Raises:
        ValueError: All have the same size.
    """
    pairs = [
        (small, large)
        for one, other in itertools.combinations(trial, 2)
        for small, large in [sorted((one, other), key=lambda load: load.num_bytes)]
        if small.num_bytes < large.num_bytes
    ]
    if not pairs:
        raise ValueError("a trial needs loads of two different sizes")
    slope = statistics.median(
        (b.seconds - a.seconds) / (b.num_bytes - a.num_bytes) for a, b in pairs
    )
    # Where noise hides what a byte costs, the largest load says how much it can cost at most.
    largest = max(trial, key=lambda load: load.num_bytes)
    if slope <= 0.0:
        slope = largest.seconds / largest.num_bytes
    latency = statistics.median(load.seconds - slope * load.num_bytes for load in trial)
    return LinkSpeed(max(latency, LEAST_LATENCY_S), 1.0 / slope)


class LinkClock:
    """Follows the speed of a link from load to load; used by one thread.

    Each load moves latency and bandwidth by powers of the factor by which it took longer than
    expected, and each of the two by its share of the expected time. So small loads teach the latency
    and large ones the bandwidth, and both stay positive. The load that teaches is the median of the
    last three of its kind (small or large): of a single stall nothing is left.
    """

    def __init__(self, speed: LinkSpeed) -> None:
        """Start from a trial or a guess; the guess counts as long as there is one load only."""
        self._latency_s = max(speed.latency_s, LEAST_LATENCY_S)
        self._s_per_byte = 1.0 / speed.bytes_per_s
        self._small: deque[TimedLoad] = deque(maxlen=_WINDOW)
        self._large: deque[TimedLoad] = deque(maxlen=_WINDOW)

    @property
    def speed(self) -> LinkSpeed:
        """The present estimate."""
        return LinkSpeed(self._latency_s, 1.0 / self._s_per_byte)

    def update(self, load: TimedLoad) -> None:
        """Learn from a load that has ended."""
        moving_s = load.num_bytes * self._s_per_byte
        last = self._small if moving_s < self._latency_s else self._large
        last.append(load)
        # Loads that are missing so far took as long as expected.
        judged = sorted((self._error(one), one.num_bytes) for one in last)
        judged = sorted([*judged, *[(0.0, 0)] * (_WINDOW - len(judged))])
        error, num_bytes = judged[_WINDOW // 2]
        error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        moving_s = num_bytes * self._s_per_byte
        waiting, moving = self._latency_s, moving_s
        size = waiting * waiting + moving * moving
        # One step of normalised least squares in logarithms of both numbers.
        whole = waiting + moving
        self._latency_s *= math.exp(_STEP * error * waiting * whole / size)
        self._s_per_byte *= math.exp(_STEP * error * moving * whole / size)
        self._latency_s = max(self._latency_s, LEAST_LATENCY_S)

    def _error(self, load: TimedLoad) -> float:
        """Return the logarithm of the measured over the expected time."""
        return math.log(load.seconds / self.speed.seconds(load.num_bytes))


def deadline_s(expected_s: float) -> float:
    """Return how many seconds after its issue a chunk that has not come is computed instead.

    Args:
        expected_s: When it was expected, in seconds after its issue; queue and latency included.
    """
    return _WAIT_FACTOR * expected_s + _WAIT_S


def expected_end_s(num_come: float, num_left: float, passed_s: float) -> float:
    """Return when the rest of a load is there if it goes on at its pace so far.

    Args:
        num_come: Tokens or bytes that are there.
        num_left: Those that are not.
        passed_s: Seconds since its issue.

    Returns:
        Seconds after its issue; infinity if nothing is there.
    """
    return passed_s * (num_come + num_left) / num_come if num_come > 0 else math.inf

"""Calls of a store that may hang, fail or be gone: no caller waits long, and none dies of it.

Each call runs in one of a few threads of ours. A caller gives up after a time, and what comes later is
thrown away. So a call must own the memory it works on. After failures in a row there are no calls for
a while, then one on trial.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Clock = Callable[[], float]

FAILURES = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
TIMEOUT_S = 2.0
THREADS = 4
_LOOK_S = 0.02
"""How often it is asked whether somebody still needs a call's result."""


class CallFault(StrEnum):
    """Why a call has no result."""

    ERROR = "error"
    """The store raised."""
    TIMEOUT = "timeout"
    """The store did not answer in time."""
    BUSY = "busy"
    """All threads wait for calls that were given up."""
    OPEN = "open"
    """The store is left alone for a while."""
    UNWANTED = "unwanted"
    """Nobody needs the result any more."""


class Breaker:
    """Decides whether a store is asked at all. Safe to use from many threads.

    Args:
        failures: In a row, after which there are no calls.
        first_pause_s: How long there are none; doubled after each failed trial.
        longest_pause_s: Most of it.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._most = failures
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._pause_s = 0.0  # 0: closed
        self._until = 0.0
        self._on_trial = False

    @property
    def is_open(self) -> bool:
        """Tell whether the store is left alone, or on trial."""
        return self._pause_s > 0

    def admits(self) -> bool:
        """Tell whether a call may be made; its outcome must be reported."""
        with self._lock:
            if self._pause_s == 0:
                return True
            if self._on_trial or self._clock() < self._until:
                return False
            self._on_trial = True
            return True

    def succeeded(self) -> None:
        """Report a call that was answered."""
        with self._lock:
            if self._pause_s and not self._on_trial:
                return  # a call from before the failures
            if self._pause_s:
                logger.info("sgl-blend: the KV store answers again")
            self._failures, self._pause_s, self._on_trial = 0, 0.0, False

    def failed(self) -> None:
        """Report a call that was not answered, or too late."""
        with self._lock:
            self._failures += 1
            if self._on_trial:
                self._pause(min(2 * self._pause_s, self._longest_pause_s))
            elif self._pause_s == 0 and self._failures >= self._most:
                logger.warning(
                    "sgl-blend: the KV store failed %d times in a row and is left alone for a while",
                    self._failures,
                )
                self._pause(self._first_pause_s)

    def withdrawn(self) -> None:
        """Report a call that was not made, or whose outcome nobody waited for."""
        with self._lock:
            self._on_trial = False

    def _pause(self, seconds: float) -> None:
        self._pause_s, self._until, self._on_trial = seconds, self._clock() + seconds, False


class Pending(Generic[T]):
    """A call that was begun."""

    def __init__(self, job: Callable[[], T], deadline: float) -> None:
        self.job = job
        self.deadline = deadline
        self.done = Event()
        self.outcome: T | CallFault = CallFault.TIMEOUT
        self.running = False
        self.given_up = False


class GuardedCalls:
    """Makes calls in threads of its own and gives up on those that take too long.

    A call that hangs keeps its thread until it returns. There are never more threads than given here,
    however long the store hangs.

    Args:
        breaker: Decides whether there are calls.
        threads: That calls run in, at most.
        timeout_s: How long a call may take, from when it was begun.

    Attributes:
        timeout_s: How long a call may take.
    """

    def __init__(
        self, breaker: Breaker, *, threads: int = THREADS, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._breaker = breaker
        self._most = threads
        self.timeout_s = timeout_s
        self._queue: SimpleQueue[Pending[Any] | None] = SimpleQueue()
        self._lock = Lock()
        self._num_threads = 0
        self._unfinished = 0  # queued or running
        self._given_up: set[Pending[Any]] = set()  # of those, running and given up
        self._closed = False

    @property
    def num_threads(self) -> int:
        """How many threads there are."""
        return self._num_threads

    @property
    def num_unfinished(self) -> int:
        """How many calls have not returned yet, those included that were given up."""
        return self._unfinished

    def call(self, job: Callable[[], T], timeout_s: float | None = None) -> T | CallFault:
        """Make a call and wait for it.

        Args:
            job: What to do. It may raise, hang, or go on after it was given up.
            timeout_s: Another time than the usual one.

        Returns:
            What the job returned, or why there is nothing. It never raises what the job raised.
        """
        pending = self.start(job, timeout_s)
        if isinstance(pending, CallFault):
            return pending
        outcome: T | CallFault = GuardedCalls.finish(self, pending)
        return outcome

    def start(self, job: Callable[[], T], timeout_s: float | None = None) -> Pending[T] | CallFault:
        """Begin a call; it must be finished or dropped."""
        if self._closed or not self._breaker.admits():
            return CallFault.OPEN
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        now_s = time.monotonic()
        pending = Pending(job, now_s + wait_s)
        with self._lock:
            # One that nobody needs any more may be about to end; one that is late may hang.
            late = sum(each.deadline <= now_s for each in self._given_up)
            if late >= self._most:
                self._breaker.failed()
                return CallFault.BUSY
            if self._unfinished >= self._num_threads and self._num_threads < self._most:
                self._num_threads += 1
                Thread(target=self._work, name="sgl-blend-store", daemon=True).start()
            self._unfinished += 1
            self._queue.put(pending)
        return pending

    def finish(
        self, pending: Pending[T], is_wanted: Callable[[], bool] | None = None
    ) -> T | CallFault:
        """Wait for a call, until its time is over or nobody needs it.

        Args:
            pending: The call.
            is_wanted: Tells whether somebody needs it; None: somebody does.
        """
        while (left_s := pending.deadline - time.monotonic()) > 0:
            if pending.done.wait(left_s if is_wanted is None else min(left_s, _LOOK_S)):
                break
            if is_wanted is not None and not is_wanted():
                self.drop(pending)
                return CallFault.UNWANTED
        self._give_up(pending)
        outcome = pending.outcome
        if isinstance(outcome, CallFault):
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        return outcome

    def drop(self, pending: Pending[Any]) -> None:
        """Wait for a call no longer."""
        self._give_up(pending)
        self._breaker.withdrawn()

    def close(self) -> None:
        """Make no calls any more, and let the threads end when they can."""
        with self._lock:
            self._closed = True
            for _ in range(self._num_threads):
                self._queue.put(None)

    def _give_up(self, pending: Pending[Any]) -> None:
        with self._lock:
            if not pending.done.is_set():
                pending.given_up = True
                if pending.running:
                    self._given_up.add(pending)

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            with self._lock:
                pending.running = not pending.given_up
            outcome = _outcome(pending.job) if pending.running else CallFault.TIMEOUT
            with self._lock:
                self._unfinished -= 1
                self._given_up.discard(pending)
                if not pending.given_up:
                    pending.outcome = outcome
                    pending.done.set()
            del pending, outcome  # a page must not wait in here for the next call


def _outcome(job: Callable[[], T]) -> T | CallFault:
    try:
        return job()
    except Exception as err:  # noqa: BLE001 - whatever a store raises is a miss, counted and logged
        log_raised(err)
        return CallFault.ERROR


def log_raised(err: Exception) -> None:
    """Log what a store raised; the server goes on without it."""
    logger.warning("sgl-blend: the KV store raised %s: %s", type(err).__name__, err)

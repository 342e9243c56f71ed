"""Objects of a store, fetched in order and ahead, several in one call while they come fast."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from sgl_blend.storage.breaker import CallFault, GuardedCalls, Pending, log_raised
from sgl_blend.storage.container import PageLabel

_CALLS = 2
"""Calls in flight, of a store that is not slow."""
_SLOW_SHARE = 0.25
"""Of the time that a call may take. Calls in flight share a link, so of a slow store they would come
too late together, where each would have come in time alone."""
_CALL_BYTES = 2 << 20
"""KV of the objects of one call. To hand over half a megabyte of it takes as long as to decode it."""
_CALL_S = 0.003
"""What a call for several objects may take, by those before."""
_LONGEST_CALL_S = 0.02
"""After so long a call returns what it has: the store has become slow."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object that came.

    Attributes:
        data: Its bytes.
        span: When it was asked for and when it was there, by time.perf_counter.
    """

    data: memoryview
    span: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Call:
    """Objects that are fetched in one call.

    Attributes:
        labels: Of the objects.
        found: What came so far. Only the call's own thread adds to it.
        raised: What the store raised for one behind the first. The same thread adds it.
        pending: The call.
    """

    labels: Sequence[PageLabel]
    found: list[Fetched | None]
    raised: list[Exception]
    pending: Pending[None]


class ReadAhead:
    """Fetches the objects of one rank.

    Args:
        fetch: Fetches an object; None: it is not stored. It may raise or hang.
        calls: Makes the calls.
        page_bytes: KV of an object.
        on_fault: Is told of a fault after which the object is asked for again.
    """

    def __init__(
        self,
        fetch: Callable[[PageLabel], Fetched | None],
        calls: GuardedCalls,
        page_bytes: int,
        on_fault: Callable[[CallFault], None],
    ) -> None:
        self._fetch = fetch
        self._calls = calls
        self._on_fault = on_fault
        self._most = max(1, _CALL_BYTES // page_bytes)
        self._each_s = _CALL_S

    def objects(
        self, labels: Sequence[PageLabel], is_wanted: Callable[[], bool]
    ) -> Generator[Fetched | CallFault | None, None, None]:
        """Yield objects in their order; if one does not come, why is the last that is yielded.

        Once nobody wants them, nothing more is yielded.

        Args:
            labels: Of the objects.
            is_wanted: Tells whether they are still needed.
        """
        begun: deque[_Call] = deque()
        try:
            left, refused = self._begin(begun, labels)
            while begun and is_wanted():
                found, fault = self._finish(begun, is_wanted)
                if fault is None and found[-1] is not None:
                    left, refused = self._begin(
                        begun, left
                    )  # while the caller takes what was found
                for each in found:
                    if not is_wanted():
                        return
                    yield each
                    if each is None:
                        return
                if fault is not None:
                    if fault is not CallFault.UNWANTED:
                        yield fault
                    return
            if left and is_wanted():
                yield refused
        finally:
            for call in begun:
                self._calls.drop(call.pending)

    def _begin(
        self, begun: deque[_Call], left: Sequence[PageLabel]
    ) -> tuple[Sequence[PageLabel], CallFault]:
        """Begin as many calls as may be in flight.

        Returns:
            The labels that are left, and why no call was begun for them.
        """
        refused = CallFault.OPEN
        is_slow = self._each_s > _SLOW_SHARE * self._calls.timeout_s
        while left and len(begun) < (1 if is_slow else _CALLS):
            num = max(1, min(self._most, int(_CALL_S / self._each_s)))
            call = self._start(left[:num])
            if isinstance(call, CallFault):
                refused = call
                break
            begun.append(call)
            left = left[num:]
        return left, refused

    def _start(self, labels: Sequence[PageLabel]) -> _Call | CallFault:
        found, raised = list[Fetched | None](), list[Exception]()
        job = functools.partial(self._fetch_some, labels, found, raised)
        pending = self._calls.start(job)
        return pending if isinstance(pending, CallFault) else _Call(labels, found, raised, pending)

    def _finish(
        self, begun: deque[_Call], is_wanted: Callable[[], bool]
    ) -> tuple[list[Fetched | None], CallFault | None]:
        """Wait for the first call, and ask again for what it leaves out.

        Returns:
            What it fetched, and why the rest does not come.
        """
        call = begun.popleft()
        fault: CallFault | None = self._calls.finish(call.pending, is_wanted)
        if fault is CallFault.TIMEOUT:
            self._each_s = max(self._each_s, self._calls.timeout_s)
        found = list(call.found)  # it is of use, whatever became of the rest
        left = call.labels[len(found) :]
        if not left:
            return found, None  # also if the last one came just when the call was given up
        if fault is None and found[-1] is not None:
            for err in call.raised:
                log_raised(err)
                self._on_fault(CallFault.ERROR)
            again = self._start(left)
            if isinstance(again, CallFault):
                return found, again
            begun.appendleft(again)
        return found, fault

    def _fetch_some(
        self, labels: Sequence[PageLabel], found: list[Fetched | None], raised: list[Exception]
    ) -> None:
        """Fetch objects up to the first that is not there, but no longer than a call may take.

        Args:
            labels: Of the objects.
            found: Each is added to it as it comes.
            raised: Gets what the store raises for another than the first, which ends the call.

        Raises:
            Exception: Whatever the store raises for the first.
        """
        began = time.perf_counter()
        for label in labels:
            try:
                found.append(self._fetch(label))
            except Exception as err:  # a store may raise anything; the caller counts and logs it
                if not found:
                    raise
                raised.append(err)
                return
            if found[-1] is None:
                return  # that took no time, and says nothing of the store's speed
            elapsed_s = time.perf_counter() - began
            self._each_s = elapsed_s / len(found)
            if elapsed_s > _LONGEST_CALL_S:
                return

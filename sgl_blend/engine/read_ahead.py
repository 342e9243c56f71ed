"""Stored pages, read in order and ahead, several in one call where they are small and come fast."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sgl_blend.storage.breaker import CallFault, GuardedCalls, Pending
from sgl_blend.storage.container import PageLabel
from sgl_blend.storage.envelope import Fault

_CALLS = 2
"""Calls in flight: one waits for the store while the other decodes."""
_CALL_BYTES = 2 << 20
"""KV of the pages of one call. To hand a page of half a megabyte over takes as long as to decode it."""
_CALL_S = 0.005
"""What a call of several pages may take, by the pages before."""
_LONGEST_CALL_S = 0.02
"""After so long a call returns what it has: the store has become slow."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that came.

    Attributes:
        data: The bytes of [K/V, layer, token, head, channel].
        level: It was coded at.
        stored_bytes: Of its object.
        fetch: When its object was asked for and when it was there, by time.perf_counter.
        decode_s: Seconds to check and decode it.
    """

    data: bytearray
    level: str
    stored_bytes: int
    fetch: tuple[float, float]
    decode_s: float


Read: TypeAlias = Page | Fault | None
"""A page, or why its object is none; None: it is not stored."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Pages that are read in one call.

    Attributes:
        labels: Of the pages.
        found: What was read so far. Only the call's own thread adds to it.
        pending: The call.
    """

    labels: Sequence[PageLabel]
    found: list[Read]
    pending: Pending[None]


class ReadAhead:
    """Reads the pages of one rank.

    Args:
        read: Reads a page. It may raise or hang.
        calls: Makes the calls.
        page_bytes: KV of a page.

    Attributes:
        most_pages: How many are in memory at a time.
    """

    def __init__(
        self, read: Callable[[PageLabel], Read], calls: GuardedCalls, page_bytes: int
    ) -> None:
        self._read = read
        self._calls = calls
        self._most = max(1, _CALL_BYTES // page_bytes)
        self._page_s = _CALL_S
        self.most_pages = _CALLS * self._most  # the next call is begun when all of one are taken

    def pages(
        self, labels: Sequence[PageLabel], is_wanted: Callable[[], bool]
    ) -> Generator[Read | CallFault, None, None]:
        """Yield pages in their order; if one does not come, why is the last that is yielded.

        Once nobody wants them, nothing more is yielded.

        Args:
            labels: Of the pages.
            is_wanted: Tells whether they are still needed.
        """
        begun: deque[_Call] = deque()
        left, refused = labels, CallFault.OPEN
        try:
            while (begun or left) and is_wanted():
                while left and len(begun) < _CALLS:
                    call = self._start(left[: self._num_pages()])
                    if isinstance(call, CallFault):
                        refused = call
                        break
                    begun.append(call)
                    left = left[len(call.labels) :]
                for read in self._finish(begun.popleft(), is_wanted) if begun else [refused]:
                    if read is CallFault.UNWANTED or not is_wanted():
                        return
                    yield read
                    if not isinstance(read, Page):
                        return
        finally:
            for call in begun:
                self._calls.drop(call.pending)

    def _num_pages(self) -> int:
        """Return how many pages a call is to read."""
        return max(1, min(self._most, int(_CALL_S / self._page_s)))

    def _start(self, labels: Sequence[PageLabel]) -> _Call | CallFault:
        found = list[Read]()
        pending = self._calls.start(functools.partial(self._read_some, labels, found))
        return pending if isinstance(pending, CallFault) else _Call(labels, found, pending)

    def _finish(
        self, call: _Call | CallFault, is_wanted: Callable[[], bool]
    ) -> Iterator[Read | CallFault]:
        """Yield what a call reads, and ask again for what it leaves out."""
        while not isinstance(call, CallFault):
            fault: CallFault | None = self._calls.finish(call.pending, is_wanted)
            found = list(call.found)  # what came is of use, whatever became of the rest
            yield from found
            left = call.labels[len(found) :]
            if not left:
                return  # also if the last one came just when the call was given up
            call = self._start(left) if fault is None else fault
        yield call

    def _read_some(self, labels: Sequence[PageLabel], found: list[Read]) -> None:
        """Read pages up to the first that does not come, but no longer than a call may take.

        Args:
            labels: Of the pages.
            found: Each is added to it as it comes.

        Raises:
            Exception: Whatever the store raises for the first.
        """
        began = time.perf_counter()
        for label in labels:
            try:
                found.append(self._read(label))
            except Exception:
                if not found:
                    raise
                return  # it is asked for again, and the fault is counted there
            elapsed_s = time.perf_counter() - began
            self._page_s = elapsed_s / len(found)
            if not isinstance(found[-1], Page) or elapsed_s > _LONGEST_CALL_S:
                return

"""Streams and events for a CPU, with the meaning that ``torch.cuda`` gives them.

The streams of ``torch.cpu`` do nothing: work is done at once, by whoever asks for it. So nothing ever
overlaps, and a wait that is missing is never missed. Here a stream is a queue that a thread of its own
works off. Work that can overlap is handed to a stream with ``submit``; it runs in order within a
stream, and beside all others. Torch's copies release the interpreter's lock while they run.

Code that is given this module as its device module finds the names that it uses of ``torch.cuda``.
Like there a thread works on a default stream until it enters another. The default stream does
everything at once, in the calling thread, as a CPU does.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], object]


class _Mark:
    """A place in a stream's order."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.time = 0.0

    def set(self) -> None:
        self.time = time.perf_counter()
        self._passed.set()

    def is_set(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        self._passed.wait()


class Event:
    """A place in the order of a stream that others can wait for.

    It may be recorded again. Whoever waits already goes on waiting for the place it was recorded at
    before. An event that was never recorded has passed.

    Args:
        enable_timing: Taken for the sake of ``torch.cuda``. Times are always kept.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self._mark = _Mark()
        self._mark.set()

    def record(self, stream: Queue | None = None) -> None:
        """Mark the place that a stream has been filled to; the current stream if none is given."""
        mark = self._mark = _Mark()
        (stream or current_stream()).submit(mark.set)

    def query(self) -> bool:
        """Tell whether the stream has passed the place."""
        return self._mark.is_set()

    def wait(self, stream: Queue | None = None) -> None:
        """Let a stream go on only after the place is passed; the current stream if none is given."""
        (stream or current_stream()).submit(self._mark.wait)

    def synchronize(self) -> None:
        """Return when the place is passed."""
        self._mark.wait()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two places; both must be passed."""
        return 1000 * (end._mark.time - self._mark.time)


class Queue(ABC):
    """What takes work and does it in order."""

    @abstractmethod
    def submit(self, work: Work) -> None:
        """Do work after all that was given before."""

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the place that this stream has been filled to."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Go on only after an event."""
        event.wait(self)

    def wait_stream(self, stream: object) -> None:
        """Go on only after what another stream has been given; streams of torch.cpu are idle."""
        if isinstance(stream, Queue):
            self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Tell whether everything is done."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """Return when everything is done."""
        self.record_event().synchronize()


class _Caller(Queue):
    """The default stream: work is done at once."""

    def submit(self, work: Work) -> None:
        work()


class Stream(Queue):
    """A queue of work and the thread that does it in order.

    Work that fails ends the stream, as an error on a GPU does: what comes later is dropped but for
    events, and the next caller gets the error.

    Args:
        device: Taken for the sake of ``torch.cuda``, like priority.
        priority: Not used.
    """

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._works: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="cpu-stream", daemon=True).start()

    def submit(self, work: Work) -> None:
        """Do work after all that was given before.

        Raises:
            RuntimeError: If earlier work failed.
        """
        if self._error is not None:
            raise RuntimeError("work on a stream failed") from self._error
        self._works.put(work)

    def synchronize(self) -> None:
        """Return when everything is done.

        Raises:
            RuntimeError: If something failed.
        """
        super().synchronize()
        if self._error is not None:
            raise RuntimeError("work on a stream failed") from self._error

    def _run(self) -> None:
        while True:
            work = self._works.get()
            # A place in the order is passed whatever happened before it: nobody may wait for ever.
            if self._error is not None and not isinstance(getattr(work, "__self__", None), _Mark):
                continue
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the next caller gets it
                self._error = error


_default = _Caller()
_entered = threading.local()


def current_stream(device: object = None) -> Queue:
    """Return the stream that the calling thread works on."""
    entered: Queue = getattr(_entered, "stream", _default)
    return entered


@contextmanager
def stream(entered: Queue | None) -> Iterator[None]:
    """Work on another stream; None changes nothing."""
    before = current_stream()
    _entered.stream = before if entered is None else entered
    try:
        yield
    finally:
        _entered.stream = before

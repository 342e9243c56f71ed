"""Objects that are fetched ahead, several in one call: their order, and what stores do meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.engine.read_ahead import Fetched, ReadAhead
from sgl_blend.storage.breaker import Breaker, CallFault, GuardedCalls

pytestmark = pytest.mark.engine

_KIB = 1 << 10
_PAGE_BYTES = 512 * _KIB  # four objects a call
_MOST = 12
"""Objects of two calls in flight, and of one that the caller takes."""


def _object(number: int) -> Fetched:
    return Fetched(memoryview(bytes([number])), (0.0, 0.0))


def _unexpected(fault: CallFault) -> None:
    raise AssertionError(fault)


class _Calls(GuardedCalls):
    """Counts the calls that are begun, and knows those that were neither finished nor dropped."""

    def __init__(self, timeout_s: float = 5.0, **breaker: Any) -> None:
        super().__init__(Breaker(**breaker), timeout_s=timeout_s)
        self.begun = 0
        self.left: set[Any] = set()

    def start(self, job: Callable[[], Any], timeout_s: float | None = None) -> Any:
        self.begun += 1
        pending = super().start(job, timeout_s)
        if not isinstance(pending, CallFault):
            self.left.add(pending)
        return pending

    def finish(self, pending: Any, is_wanted: Callable[[], bool] | None = None) -> Any:
        self.left.discard(pending)
        return super().finish(pending, is_wanted)

    def drop(self, pending: Any) -> None:
        self.left.discard(pending)
        super().drop(pending)


class _Store:
    """Answers a label, which is a number here, as it is told to."""

    def __init__(self, answer: Callable[[int], Any] = _object) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self.asked: Counter[int] = Counter()
        self.by_thread: dict[int, list[int]] = {}
        self.faults: list[CallFault] = []

    def read(self, number: Any) -> Any:
        with self._lock:
            self.asked[number] += 1
            self.by_thread.setdefault(threading.get_ident(), []).append(number)
        return self._answer(number)


def _read(
    store: _Store,
    count: int,
    calls: _Calls,
    is_wanted: Callable[[], bool] = lambda: True,
    page_bytes: int = _PAGE_BYTES,
) -> list[Any]:
    """Return what is yielded, an object as its number."""
    labels: Any = range(count)
    ahead = ReadAhead(store.read, calls, page_bytes, store.faults.append)
    found = list(ahead.objects(labels, is_wanted))
    assert not calls.left
    return [read.data[0] if isinstance(read, Fetched) else read for read in found]


def _waits_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def hang() -> Iterator[Callable[[], None]]:
    """A job that hangs until the test is over."""
    over = threading.Event()
    yield lambda: (over.wait(30), None)[1]
    over.set()


def test_small_objects_that_come_fast_share_calls() -> None:
    calls, store = _Calls(), _Store()
    assert _read(store, 100, calls) == list(range(100))
    assert calls.begun <= 40
    assert set(store.asked.values()) == {1}


def test_large_objects_have_a_call_each() -> None:
    calls = _Calls()
    assert _read(_Store(), 20, calls, page_bytes=1100 * _KIB) == list(range(20))
    assert calls.begun == 20


def test_a_slow_store_is_asked_for_one_object_a_call() -> None:
    def slow(number: int) -> Fetched:
        time.sleep(0.01)
        return _object(number)

    calls = _Calls()
    assert _read(_Store(slow), 20, calls) == list(range(20))
    assert calls.begun == 20


def test_a_store_that_becomes_slow_is_not_waited_for_by_whole_calls() -> None:
    def slower(number: int) -> Fetched:
        time.sleep(0.03 if number >= 40 else 0)
        return _object(number)

    calls, store = _Calls(), _Store(slower)
    assert _read(store, 60, calls) == list(range(60))
    assert set(store.asked.values()) == {1}
    assert calls.begun >= 10 + 20  # of four at most, and then of one


def test_objects_in_flight_are_no_more_than_two_calls_fetch() -> None:
    made, returned, most = 0, 0, 0
    lock = threading.Lock()

    def count(number: int) -> Fetched:
        nonlocal made, most
        with lock:
            made += 1
            most = max(most, made - returned)
        return _object(number)

    ahead = ReadAhead(_Store(count).read, _Calls(), _PAGE_BYTES, _unexpected)
    labels: Any = range(200)
    for _ in ahead.objects(labels, lambda: True):
        time.sleep(0.0005)  # the caller is the slower one
        with lock:
            returned += 1
    assert returned == 200
    assert 4 < most <= _MOST


_OUTCOMES = st.sampled_from(["there", "there", "there", "there", "raises once", "none", "raises"])


@settings(max_examples=200, deadline=None)
@given(outcomes=st.lists(_OUTCOMES, max_size=30), size=st.sampled_from([300, 512, 1100]))
def test_what_comes_is_the_objects_up_to_the_first_that_does_not(
    outcomes: list[str], size: int
) -> None:
    def answer(number: int) -> Any:
        outcome = outcomes[number]
        if outcome == "raises" or (outcome == "raises once" and store.asked[number] == 1):
            raise OSError(number)
        return None if outcome == "none" else _object(number)

    store, calls = _Store(answer), _Calls(failures=1000)
    found = _read(store, len(outcomes), calls, page_bytes=size * _KIB)
    last = {"none": None, "raises": CallFault.ERROR}
    shared = found + [None] * (len(outcomes) - len(found))
    for number, outcome in enumerate(outcomes):
        if outcome == "raises once" and found[number] is CallFault.ERROR:
            break  # the first of its call: nobody asks again
        if outcome in last:
            assert found[number:] == [last[outcome]]
            break
        assert shared[number] == number
    else:
        assert found == list(range(len(outcomes)))
    _waits_until(lambda: calls.num_unfinished == 0)
    calls.close()


class _Link:
    """Takes a time for an object, and twice as long for each of two."""

    def __init__(self, object_s: float) -> None:
        self.object_s = object_s
        self._lock = threading.Lock()
        self._sending = 0
        self.most = 0

    def send(self, number: int) -> Fetched:
        left_s = self.object_s
        with self._lock:
            self._sending += 1
            self.most = max(self.most, self._sending)
        while left_s > 0:
            began, sharing = time.monotonic(), self._sending
            time.sleep(0.005)
            left_s -= (time.monotonic() - began) / sharing
        with self._lock:
            self._sending -= 1
        return _object(number)


def test_calls_do_not_share_a_link_on_which_both_would_come_too_late() -> None:
    link, calls = _Link(0.6), _Calls(timeout_s=1.0)
    is_stored = True

    def fetch(label: Any) -> Fetched | None:
        return link.send(label) if is_stored else None

    ahead = ReadAhead(fetch, calls, 2 << 20, _unexpected)

    def read(count: int) -> list[bool | CallFault | None]:
        labels: Any = range(count)
        found = ahead.objects(labels, lambda: True)
        return [isinstance(each, Fetched) or each for each in found]

    assert read(3) == [CallFault.TIMEOUT], "nobody knows yet"
    assert read(3) == read(3) == [True] * 3
    is_stored = False
    assert read(3) == [None]
    is_stored = True
    assert read(3) == [True] * 3, "a miss takes no time, and says nothing of the link"
    link.most, link.object_s = 0, 0.02
    assert read(8) == [True] * 8
    assert link.most == 2, "fast again"


@pytest.mark.parametrize("last", range(50, 54))  # wherever it is in its call
def test_objects_before_one_that_hangs_come(hang: Callable[[], None], last: int) -> None:
    def answer(number: int) -> Fetched:
        if number == last:
            hang()
        return _object(number)

    began, calls = time.monotonic(), _Calls(timeout_s=0.3)
    assert _read(_Store(answer), 60, calls) == [*range(last), CallFault.TIMEOUT]
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("last", [57, 59])
def test_objects_that_come_just_when_their_call_is_given_up_count(last: int) -> None:
    class _Preempted(_Calls):
        """After a call that was too late, the caller gets the core back when all has been read."""

        def finish(self, pending: Any, is_wanted: Callable[[], bool] | None = None) -> Any:
            fault = super().finish(pending, is_wanted)
            if fault is CallFault.TIMEOUT:
                _waits_until(lambda: self.num_unfinished == 0)
            return fault

    def answer(number: int) -> Fetched:
        time.sleep(1.5 if number == last else 0)
        return _object(number)

    found = _read(_Store(answer), 60, _Preempted(timeout_s=1.0))
    there = [read for read in found if isinstance(read, int)]
    assert there == list(range(len(there)))
    assert len(there) > last
    assert found == there if len(there) == 60 else found == [*there, CallFault.TIMEOUT]


def test_an_object_that_fails_behind_others_of_its_call_is_asked_for_once_more() -> None:
    again = 0

    def read(failing: int) -> list[Any]:
        nonlocal again

        def answer(number: int) -> Fetched:
            if number == failing and store.asked[number] == 1:
                raise OSError(number)
            return _object(number)

        store = _Store(answer)
        came = _read(store, 60, _Calls())
        assert store.faults == [CallFault.ERROR] * (len(came) == 60), (
            "those that end it are told there"
        )
        again += len(store.faults)
        return came

    found = [read(failing) for failing in range(50, 54)]
    assert list(range(60)) in found
    assert again
    firsts = [[*range(failing), CallFault.ERROR] for failing in range(50, 54)]
    assert all(each in (list(range(60)), first) for each, first in zip(found, firsts, strict=True))


@pytest.mark.parametrize("last", [57, 59])
def test_what_fails_after_its_call_was_given_up_is_told_once(last: int) -> None:
    def answer(number: int) -> Fetched:
        if number == last:
            time.sleep(0.8)
            raise OSError(number)
        return _object(number)

    calls, store = _Calls(timeout_s=0.5), _Store(answer)
    assert _read(store, 60, calls)[-1] is CallFault.TIMEOUT
    _waits_until(lambda: calls.num_unfinished == 0)
    assert not store.faults


def test_behind_an_object_that_is_not_stored_nothing_is_fetched() -> None:
    store, calls = _Store(lambda number: _object(number) if number < 60 else None), _Calls()
    ahead = ReadAhead(store.read, calls, _PAGE_BYTES, _unexpected)
    labels: Any = range(60)
    assert len(list(ahead.objects(labels, lambda: True))) == 60
    begun, labels = calls.begun, range(60, 80)
    assert list(ahead.objects(labels, lambda: True)) == [None]
    assert calls.begun == begun + 2  # those in flight
    assert sum(number >= 60 for number in store.asked) <= 2  # the first of each


@pytest.mark.parametrize("last", range(20, 24))
def test_nothing_comes_once_nobody_wants_it(last: int) -> None:
    calls, store = _Calls(failures=1), _Store()
    ahead = ReadAhead(store.read, calls, _PAGE_BYTES, _unexpected)
    labels: Any = range(60)
    found: list[Any] = []
    for read in ahead.objects(labels, lambda: len(found) < last):
        assert isinstance(read, Fetched)
        found.append(read.data[0])
    assert found == list(range(last))
    assert len(store.asked) < last + _MOST
    assert not calls.left
    _waits_until(lambda: calls.num_unfinished == 0)
    assert _read(_Store(), 4, calls) == [0, 1, 2, 3], "that was no failure"


def test_one_that_hangs_is_waited_for_only_while_it_is_wanted(hang: Callable[[], None]) -> None:
    unwanted: list[bool] = []

    def answer(number: int) -> Fetched:
        if number == 3:
            hang()
        return _object(number)

    def is_wanted() -> bool:
        if not store.asked[3] or unwanted:
            return True
        unwanted.append(True)  # told once
        return False

    store, calls = _Store(answer), _Calls(timeout_s=20)
    began = time.monotonic()
    found = _read(store, 8, calls, is_wanted)
    assert found == [0, 1, 2][: len(found)]
    assert time.monotonic() - began < 2


def test_a_caller_who_leaves_gives_up_what_was_begun() -> None:
    calls, store = _Calls(), _Store()
    labels: Any = range(60)
    objects = ReadAhead(store.read, calls, _PAGE_BYTES, _unexpected).objects(labels, lambda: True)
    assert isinstance(next(objects), Fetched)
    objects.close()
    assert not calls.left
    _waits_until(lambda: calls.num_unfinished == 0)
    assert len(store.asked) < 12


def test_a_store_that_is_left_alone_is_asked_for_nothing_and_then_for_one_call() -> None:
    now = [0.0]

    def fail(number: int) -> Fetched:
        raise OSError

    calls = _Calls(failures=1, first_pause_s=1.0, clock=lambda: now[0])
    assert _read(_Store(fail), 8, calls) == [CallFault.ERROR]
    store = _Store()
    assert _read(store, 8, calls) == [CallFault.OPEN]
    assert not store.asked
    now[0] = 1.5
    assert _read(store, 8, calls) == list(range(8)), "the trial closes the breaker"
    assert set(store.asked.values()) == {1}

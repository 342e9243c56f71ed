"""A store that hangs or fails holds nobody up, and is used again when it is well."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.storage.breaker import Breaker, CallFault, GuardedCalls


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admits()
        breaker.failed()


def _pauses(breaker: Breaker, clock: Clock, trials: int) -> Iterator[float]:
    """Yield how long an open breaker admits nothing, trial after trial, and let each fail."""
    for _ in range(trials):
        begin = clock.now
        while not breaker.admits():
            clock.now += 0.25
        yield clock.now - begin
        breaker.failed()


# --- the breaker --------------------------------------------------------------------------------


def test_it_opens_after_failures_in_a_row_and_waits_twice_as_long_each_time() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    _fail(breaker, 5)
    assert breaker.is_open
    assert list(_pauses(breaker, clock, 8)) == [1, 2, 4, 8, 16, 32, 60, 60]


def test_failures_count_only_in_a_row() -> None:
    breaker = Breaker(clock=Clock())
    for _ in range(5):
        _fail(breaker, 4)
        breaker.succeeded()
    assert not breaker.is_open


def test_a_trial_is_one_call_and_closes_it_when_answered() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    _fail(breaker, 5)
    list(_pauses(breaker, clock, 2))
    clock.now += 4
    assert breaker.admits()
    assert not breaker.admits()
    breaker.succeeded()
    assert breaker.admits()
    assert breaker.admits()
    assert not breaker.is_open
    _fail(breaker, 4)
    assert not breaker.is_open  # the count begins anew, and so does the pause
    _fail(breaker, 1)
    assert list(_pauses(breaker, clock, 1)) == [1]


def test_a_trial_that_was_not_made_leaves_the_next_call_to_try() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    _fail(breaker, 5)
    clock.now += 1
    assert breaker.admits()
    breaker.withdrawn()
    assert breaker.admits()


def test_an_answer_from_before_the_failures_closes_nothing() -> None:
    breaker = Breaker(clock=Clock())
    assert breaker.admits()
    _fail(breaker, 5)
    breaker.succeeded()
    assert not breaker.admits()


@given(st.lists(st.sampled_from(["ask", "good", "bad", "withdrawn", "wait"]), max_size=60))
def test_whatever_happens_it_asks_again_within_a_minute(steps: list[str]) -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    asked = 0
    for step in steps:
        if step == "wait":
            clock.now += 1
        elif step == "ask":
            asked += breaker.admits()
        elif asked:
            asked -= 1
            {"good": breaker.succeeded, "bad": breaker.failed, "withdrawn": breaker.withdrawn}[
                step
            ]()
    for _ in range(asked):
        breaker.failed()
    clock.now += 60
    assert breaker.admits()


# --- guarded calls ------------------------------------------------------------------------------


@pytest.fixture
def hang() -> Iterator[Callable[..., str]]:
    """A job that returns when the test is over, or after the event that is given."""
    over = threading.Event()

    def job(event: threading.Event = over) -> str:
        event.wait(30)
        return "late"

    yield job
    over.set()


def _calls(threads: int = 4, timeout_s: float = 0.3, **breaker: Any) -> GuardedCalls:
    return GuardedCalls(Breaker(**breaker), threads=threads, timeout_s=timeout_s)


def _boom() -> None:
    raise OSError("boom")


def test_a_call_returns_what_the_job_returns(caplog: pytest.LogCaptureFixture) -> None:
    calls = _calls(timeout_s=5)
    assert calls.call(lambda: 7) == 7
    assert calls.call(lambda: None) is None
    assert calls.call(lambda: "error") == "error"
    assert calls.call(lambda: "well") == "well"
    assert calls.call(_boom) is CallFault.ERROR
    assert "OSError: boom" in caplog.text


def test_nobody_waits_longer_than_the_time(hang: Callable[..., str]) -> None:
    calls = _calls(timeout_s=0.1)
    begin = time.monotonic()
    assert calls.call(hang) is CallFault.TIMEOUT
    assert 0.1 <= time.monotonic() - begin < 1
    assert calls.call(lambda: "next") == "next"


def test_a_store_that_hangs_for_ever_collects_no_threads(hang: Callable[..., str]) -> None:
    before = threading.active_count()
    calls = _calls(threads=3, failures=100)
    found = [calls.call(hang) for _ in range(3)]
    begin = time.monotonic()
    found += [calls.call(hang) for _ in range(20)]
    assert found == [CallFault.TIMEOUT] * 3 + [CallFault.BUSY] * 20
    assert time.monotonic() - begin < 0.25  # nobody waits where no thread is left
    assert calls.num_threads == 3
    assert threading.active_count() - before == 3


def test_threads_that_come_back_are_used_again(hang: Callable[..., str]) -> None:
    calls = _calls(threads=2, failures=100)
    event = threading.Event()
    assert [calls.call(lambda: hang(event)) for _ in range(2)] == [CallFault.TIMEOUT] * 2
    assert calls.call(hang) is CallFault.BUSY
    event.set()
    deadline = time.monotonic() + 5
    while calls.call(lambda: "well") != "well":
        assert time.monotonic() < deadline
    assert calls.num_threads == 2


def test_calls_that_nobody_needs_any_more_are_not_taken_for_hung(hang: Callable[..., str]) -> None:
    calls = _calls(threads=2, timeout_s=0.3)
    for _ in range(2):
        pending = calls.start(hang)
        assert not isinstance(pending, CallFault)
        while not pending.running:
            time.sleep(0.001)
        calls.drop(pending)
    later = calls.start(lambda: 1)
    assert not isinstance(later, CallFault), "they may end in a moment"
    calls.drop(later)
    time.sleep(0.35)
    assert calls.start(lambda: 1) is CallFault.BUSY, "they are late"


def test_what_is_still_in_the_queue_when_given_up_is_never_done(hang: Callable[..., str]) -> None:
    calls = _calls(threads=1, timeout_s=5, failures=100)
    event, done = threading.Event(), []
    first = calls.start(lambda: hang(event))
    second = calls.start(lambda: done.append(1))
    third = calls.start(lambda: done.append(2))
    assert not isinstance(first, CallFault)
    assert not isinstance(second, CallFault)
    assert not isinstance(third, CallFault)
    calls.drop(second)
    event.set()
    assert calls.finish(first) == "late"
    calls.finish(third)
    assert done == [2]


def test_a_late_result_is_thrown_away() -> None:
    class Page:
        pass

    made: list[weakref.ref[Page]] = []
    event, over = threading.Event(), threading.Event()

    def job() -> Page:
        page = Page()
        made.append(weakref.ref(page))
        event.wait(5)
        over.set()
        return page

    calls = _calls(threads=1)
    pending = calls.start(job)
    assert not isinstance(pending, CallFault)
    assert calls.finish(pending) is CallFault.TIMEOUT
    event.set()
    assert over.wait(5)
    deadline = time.monotonic() + 5
    while made[0]() is not None:  # also while the thread waits for the next call
        gc.collect()
        assert time.monotonic() < deadline
    assert pending.outcome is CallFault.TIMEOUT


def test_timeouts_and_errors_open_the_breaker_and_then_the_job_is_not_called() -> None:
    clock = Clock()
    calls, asked = _calls(clock=clock), []
    assert [calls.call(_boom) for _ in range(5)] == [CallFault.ERROR] * 5
    assert calls.call(lambda: asked.append(1)) is CallFault.OPEN
    assert not asked
    clock.now += 1
    assert calls.call(lambda: "well") == "well"
    assert calls.call(lambda: "well") == "well"


def test_a_dropped_trial_is_not_the_last_one(hang: Callable[..., str]) -> None:
    clock = Clock()
    calls = _calls(clock=clock)
    for _ in range(5):
        calls.call(_boom)
    clock.now += 1
    pending = calls.start(hang)
    assert not isinstance(pending, CallFault)
    calls.drop(pending)
    assert calls.call(lambda: "well") == "well"


def test_many_threads_may_call_at_once() -> None:
    calls = _calls(timeout_s=5)
    found: list[Any] = []

    def ask(number: int) -> None:
        found.extend(calls.call(lambda n=n: n) for n in range(number, number + 50))  # type: ignore[misc]

    threads = [threading.Thread(target=ask, args=(i * 50,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(400))
    assert calls.num_threads <= 4


def test_after_close_there_are_no_calls_and_no_threads() -> None:
    calls = _calls()
    calls.call(lambda: 1)
    before = threading.active_count()
    calls.close()
    assert calls.call(lambda: 1) is CallFault.OPEN
    deadline = time.monotonic() + 5
    while threading.active_count() == before:
        assert time.monotonic() < deadline

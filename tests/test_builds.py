"""The order and the budget of background builds: no engine is needed for either."""

import random
from array import array
from collections import OrderedDict

import msgspec

from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.scheduler.build_budget import BuildBudget, ServedTime
from sgl_blend.scheduler.build_queue import BuildQueue


def key(salt: str, number: int, length: int = 10, prefix: int = 2) -> ChunkKey:
    return ChunkKey(salt, None, bytes(8 * prefix), array("q", [number] * length).tobytes())


# --- budget ---


def steps_in(seconds: float, step_s: float, *, busy: bool = True) -> list[float]:
    """Return when steps ran that take step_s each, among rounds of 10 ms."""
    served = ServedTime()
    budget = BuildBudget(served, 0.025)
    ran, now = [], 0.0
    while now < seconds:
        served.elapse(now, busy=busy)
        if budget.affords_step():
            budget.charge()
            ran.append(now)
            now += step_s
            budget.learn(step_s)
        now += 0.01
    return ran


def test_builds_take_a_fortieth_of_the_time_in_which_requests_are_served() -> None:
    for step_s in (0.002, 0.02, 0.2):
        ran = steps_in(200.0, step_s)
        assert 0.9 * 0.025 * 200 <= len(ran) * step_s <= 1.1 * 0.025 * 200, step_s


def test_at_most_one_step_is_saved_up() -> None:
    served = ServedTime()
    budget = BuildBudget(served, 0.025)
    budget.learn(0.02)
    served.elapse(0.0, busy=True)
    served.elapse(1000.0, busy=True)
    assert budget.affords_step()
    budget.charge()
    assert not budget.affords_step()


def test_a_request_meets_a_build_or_a_probe_and_not_both() -> None:
    served = ServedTime()
    builds, probes = BuildBudget(served, 0.025), BuildBudget(served, 0.01)
    served.elapse(0.0, busy=True)
    served.elapse(1000.0, busy=True)
    assert builds.affords_step()
    assert probes.affords_step()
    builds.charge()
    assert not probes.affords_step()
    served.elapse(1001.0, busy=True)
    assert builds.affords_step()
    assert not probes.affords_step()
    served.elapse(1002.5, busy=True)
    assert probes.affords_step()


def test_idle_time_earns_nothing() -> None:
    assert steps_in(100.0, 0.02, busy=False) == []


def test_time_without_background_work_earns_nothing() -> None:
    served = ServedTime()
    served.elapse(0.0, busy=True)
    served.stop_clock()
    served.elapse(1000.0, busy=True)
    assert served.seconds == 0.0


# --- queue ---


def test_tenants_take_turns_by_steps() -> None:
    queue = BuildQueue(100, 10**6)
    queue.add([key("a", i) for i in range(3)])
    queue.add([key("b", 9)])
    order = []
    for _ in range(4):
        first = queue.first()
        assert first is not None
        queue.spend(first)
        order.append(first.salt)
    assert order == ["a", "b", "a", "b"]


def test_a_key_keeps_its_place_until_it_is_removed() -> None:
    queue = BuildQueue(100, 10**6)
    queue.add([key("a", 0), key("a", 1)])
    assert [queue.spend(key("a", 0)) for _ in range(3)] == [1, 2, 3]
    assert queue.first() == key("a", 0)
    assert queue.since_s(key("a", 0), 1.0) == 1.0
    queue.add([key("a", 0)])
    assert queue.since_s(key("a", 0), 5.0) == 1.0
    queue.remove(key("a", 0))
    assert queue.first() == key("a", 1)
    # The next one has not waited yet, and lets first tokens out.
    assert queue.since_s(key("a", 1), 7.0) == 7.0


def test_what_was_missed_last_comes_first_also_if_it_waits_already() -> None:
    queue = BuildQueue(100, 10**6)
    queue.add([key("a", i) for i in range(3)])
    assert queue.first() == key("a", 2)
    queue.add([key("a", 0)])
    assert queue.first() == key("a", 0)
    queue.remove(key("a", 0))
    assert queue.first() == key("a", 2)


def test_classes_that_do_not_fit_are_passed_over() -> None:
    queue = BuildQueue(100, 10**6)
    keys = [key("a", 0), key("a", 1), key("b", 2), key("b", 3)]
    keys = [
        msgspec.structs.replace(one, extra_key=None if number % 2 else "x")
        for number, one in enumerate(keys)
    ]
    queue.add(keys)
    assert queue.first() == keys[1]
    assert queue.first(lambda extra_key: extra_key == "x") == keys[0]
    queue.spend(keys[0])  # begun, and its turn is over
    assert queue.first(lambda extra_key: True) == keys[3]
    assert queue.first(lambda extra_key: extra_key == "x") == keys[2]
    queue.spend(keys[2])
    assert queue.first(lambda extra_key: extra_key is None) == keys[1]
    assert queue.first(lambda extra_key: False) is None


def test_build_prefixes_take_turns_in_the_order_in_which_they_were_missed() -> None:
    queue = BuildQueue(100, 10**6)
    short, long = array("q", [1]).tobytes(), array("q", [1, 2]).tobytes()
    keys = [msgspec.structs.replace(key("a", i), prefix=short if i < 3 else long) for i in range(5)]
    queue.add(keys)
    order = []
    while (first := queue.first()) is not None:
        order.append(keys.index(first))
        queue.remove(first)
    assert order == [2, 4, 1, 3, 0]


def test_what_was_begun_is_finished_first() -> None:
    queue = BuildQueue(3, 10**6)
    queue.add([key("a", 0)])
    queue.spend(key("a", 0))
    queue.add([key("a", i) for i in range(1, 3)])
    assert queue.first() == key("a", 0)


def test_the_line_with_the_most_bytes_loses_its_oldest() -> None:
    bytes_each = 8 * (10 + 2)
    queue = BuildQueue(100, 4 * bytes_each)
    queue.add([key("flood", i) for i in range(3)])
    queue.add([key("quiet", 7)])
    queue.add([key("flood", 3), key("flood", 4)])
    assert queue.num_bytes == 4 * bytes_each
    assert queue.num_forgotten == 2
    assert key("quiet", 7) in queue
    assert [i for i in range(5) if key("flood", i) in queue] == [2, 3, 4]


def test_the_line_with_the_most_bytes_is_found_as_by_looking_at_all_of_them() -> None:
    drawn, bytes_each = random.Random(3), 8 * (10 + 2)
    queue, held = BuildQueue(100, 40 * bytes_each), OrderedDict[str, OrderedDict[int, None]]()
    for number in range(3000):
        salt = f"tenant-{drawn.randrange(9)}"
        if drawn.random() < 0.3 and held.get(salt):
            gone = drawn.choice(list(held[salt]))
            queue.remove(key(salt, gone))
            del held[salt][gone]
        else:
            queue.add([key(salt, number)])
            held.setdefault(salt, OrderedDict())[number] = None
        if sum(map(len, held.values())) > 40:
            most = max(map(len, held.values()))
            largest = min(name for name, line in held.items() if len(line) == most)
            held[largest].popitem(last=False)
        assert len(queue) == sum(map(len, held.values()))
        assert all(key(name, i) in queue for name, line in held.items() for i in line)
    assert queue.num_forgotten > 100
    assert len(queue._by_size) <= 4 * 9 + 64


def test_keys_are_bounded_too() -> None:
    queue = BuildQueue(3, 10**6)
    queue.add([key("a", i) for i in range(5)])
    assert (len(queue), queue.num_forgotten) == (3, 2)
    queue.clear()
    assert (len(queue), queue.num_bytes, queue.first()) == (0, 0, None)

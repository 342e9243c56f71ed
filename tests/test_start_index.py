"""The index of chunk starts against a dict, against an LRU pool, and against the clock."""

from collections import OrderedDict

import numpy as np
import pytest
from finding_cases import milliseconds, random_tokens, slowness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from sgl_blend.finding.fingerprints import WindowHash
from sgl_blend.radix_ext.start_index import StartIndex

Fingerprints = NDArray[np.uint64]
POOL = 4_000
MILLION = 1_000_000


def some_fingerprints(seed: int, count: int) -> Fingerprints:
    return np.random.default_rng(seed).integers(1, 2**64 - 1, count, dtype=np.uint64)


def lengths_of(*numbers: int) -> NDArray[np.uint32]:
    return np.array(numbers, np.uint32)


def found(index: StartIndex, fingerprints: Fingerprints) -> dict[int, int]:
    at, lengths = index.probe(fingerprints)
    return dict(zip(fingerprints[at].tolist(), lengths.tolist(), strict=True))


NAMES = some_fingerprints(1, 40)


class Entries(RuleBasedStateMachine):
    """Two generations, kept in two dicts, and what was learned."""

    def __init__(self) -> None:
        super().__init__()
        self.index = StartIndex(POOL)
        self.old: dict[int, int] = {}
        self.young: dict[int, int] = {}
        self.learned: set[int] = set()
        self.clock = 0

    @rule(
        picks=st.lists(st.integers(0, 39), max_size=20),
        seed=st.integers(1, 2**30 - 99),
        learned=st.booleans(),
    )
    def register(self, picks: list[int], seed: int, learned: bool) -> None:
        lengths = [seed + at for at in range(len(picks))]
        self.index.register(NAMES[picks], lengths_of(*lengths), learned=learned)
        names = set(NAMES[picks].tolist())
        self.learned = self.learned | names if learned else self.learned - names
        for name, length in zip(NAMES[picks].tolist(), lengths, strict=True):
            self.old.pop(name, None)
            self.young[name] = length

    @rule(picks=st.lists(st.integers(0, 39), max_size=20))
    def use(self, picks: list[int]) -> None:
        self.index.use(NAMES[picks])
        for name in NAMES[picks].tolist():
            if name in self.old:
                self.young[name] = self.old.pop(name)

    @rule(picks=st.lists(st.integers(0, 39), max_size=3))
    def discard(self, picks: list[int]) -> None:
        self.index.discard(NAMES[picks])
        for name in NAMES[picks].tolist():
            self.old.pop(name, None)
            self.young.pop(name, None)

    @rule(tokens=st.integers(0, POOL))
    def evict(self, tokens: int) -> None:
        self.index.evicted(tokens)
        self.clock += tokens
        if self.clock >= POOL:
            self.old, self.young, self.clock = self.young, {}, 0

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.old, self.young, self.clock = {}, {}, 0

    @invariant()
    def all_is_found(self) -> None:
        expected = self.old | self.young
        assert found(self.index, NAMES) == expected
        assert len(self.index) == len(expected)
        assert self.index.num_forgotten == 0
        learned = self.index.are_learned(NAMES).tolist()
        assert learned == [name in self.learned & expected.keys() for name in NAMES.tolist()]


TestEntries = Entries.TestCase
TestEntries.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)


def test_no_live_start_is_lost_in_two_million_cycles() -> None:
    # A pool that evicts what was used least recently, with chunks of 64 to 600 tokens.
    capacity, batch = 320_000, 512
    random = np.random.default_rng(7)
    index = StartIndex(capacity)
    pool: OrderedDict[int, int] = OrderedDict()
    held = registered = checked = turns = 0
    while registered < 2_000_000:
        new = random.integers(1, 2**64 - 1, batch, dtype=np.uint64)
        lengths = random.integers(64, 600, batch, dtype=np.uint32)
        registered += batch
        pool.update(zip(new.tolist(), lengths.tolist(), strict=True))
        held += int(lengths.sum())
        index.register(new, lengths)
        used = list(pool)[:40]  # those that would go next
        for name in used:
            pool.move_to_end(name)
        index.use(np.array(used, np.uint64))
        gone = 0
        while held - gone > capacity:
            gone += pool.popitem(last=False)[1]
        held -= gone
        index.evicted(gone)
        turns += gone
        if registered % (batch * 16) == 0:
            live = np.fromiter(pool, np.uint64, len(pool))
            assert found(index, live) == pool
            checked += len(live)
    assert checked > 200_000
    # What neither generation saw is gone: no more than two pools of the shortest.
    assert len(index) < 4 * capacity / 64
    assert index.num_bytes < 1_000_000
    assert turns > 1_000 * capacity


def test_a_use_counts_and_a_probe_does_not() -> None:
    index = StartIndex(100)
    names = some_fingerprints(2, 3)
    index.register(names, lengths_of(5, 6, 7))
    index.evicted(100)
    index.use(names[:1])
    index.probe(names[1:2])
    index.evicted(99)
    assert found(index, names) == dict(zip(names.tolist(), (5, 6, 7), strict=True))
    index.evicted(1)
    assert found(index, names) == {int(names[0]): 5}


def test_the_last_of_two_lengths_counts() -> None:
    index = StartIndex(100)
    name = some_fingerprints(2, 1)
    index.register(np.repeat(name, 2), lengths_of(9, 4))
    assert found(index, name) == {int(name[0]): 4}
    assert len(index) == 1


def test_beyond_its_bound_the_oldest_are_forgotten_and_counted() -> None:
    index = StartIndex(10**9, most_starts=1_000)
    first, second, third = np.split(some_fingerprints(3, 1_500), 3)
    for names in (first, second):
        index.register(names, np.full(500, 64, np.uint32))
    assert len(index) == 1_000
    assert index.num_forgotten == 0
    index.register(third[:1], lengths_of(64))  # all that were there become old
    index.use(second)
    index.register(third, np.full(500, 64, np.uint32))
    assert len(index) + index.num_forgotten == 1_500
    assert len(index) <= 1_000
    assert len(found(index, third)) == 500
    assert len(found(index, second)) > 400
    assert len(found(index, first)) == len(index) - 500 - len(found(index, second))


def test_more_at_once_than_fit() -> None:
    index = StartIndex(10**9, most_starts=100)
    names = some_fingerprints(3, 1_000)
    index.register(names, np.full(1_000, 64, np.uint32))
    assert len(index) + index.num_forgotten == 1_000
    assert 50 <= len(found(index, names)) == len(index) <= 100


def test_equal_buckets_overflow_into_nothing_worse_than_a_count() -> None:
    # All have the same first bucket; the second ones differ.
    names = some_fingerprints(4, 300) >> np.uint64(20)
    index = StartIndex(10**9, most_starts=10_000)
    index.register(names, np.arange(300, dtype=np.uint32))
    known = found(index, names)
    assert len(known) == len(index) == 300 - index.num_forgotten
    assert index.num_forgotten < 30
    assert all(known[name] == at for at, name in enumerate(names.tolist()) if name in known)


@pytest.fixture(scope="module")
def million() -> tuple[StartIndex, Fingerprints]:
    index = StartIndex(10**9)
    names = some_fingerprints(5, MILLION)
    index.register(names, np.arange(MILLION, dtype=np.uint32))
    return index, names


def test_a_million_starts_are_all_found(million: tuple[StartIndex, Fingerprints]) -> None:
    index, names = million
    at, lengths = index.probe(names)
    assert np.array_equal(at, np.arange(MILLION))
    assert np.array_equal(lengths, at)
    assert index.num_forgotten == 0
    assert index.num_bytes <= 40 * MILLION
    assert len(index.probe(some_fingerprints(6, 100_000))[0]) == 0


def test_a_probe_among_a_million_is_fast(million: tuple[StartIndex, Fingerprints]) -> None:
    index, names = million
    windows = WindowHash(9)
    salt = windows.salt(b"namespace", b"prefix")
    prompts = iter([random_tokens(seed, 8_150) for seed in range(60)])

    def look_up() -> None:
        fingerprints = windows.salted(windows.windows(next(prompts)), salt)
        fingerprints[::512] = names[:: MILLION // 16][:16]
        assert len(index.probe(fingerprints)[0]) == 16

    assert milliseconds(look_up) < 0.6 * slowness()


def test_what_is_not_known_was_not_learned_even_if_the_last_place_is_taken() -> None:
    index = StartIndex(POOL)
    names = some_fingerprints(8, 10_000)
    first, second = index._buckets(names)
    last = (first == first.max()) & (second == second.max())
    index.register(names[last][:8], np.full(8, 64, np.uint32), learned=True)
    assert index._places.reshape(-1)[-1] != 0
    assert index.are_learned(names[last][:8]).all()
    assert not index.are_learned(names[~last]).any()

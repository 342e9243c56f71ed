"""Chunk store, lookups, tree, allocator against a plain model: what is stored, locked, evicted next.

The plain model evicts what was used least recently. Fair shares keep chunks longer than that, so they
are off where the two are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Engine, Prompt, random_tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

CAPACITY = 1000
PREFIXES = [random_tokens(1, 30), random_tokens(2, 17)]
LENGTHS = (40, 64, 90, 33, 120, 77)
CHUNKS = {
    (p, c): random_tokens(10 + 10 * p + c, length)
    for p in (0, 1)
    for c, length in enumerate(LENGTHS)
}
Name = tuple[int, int]


# --- in the worker: the real thing ---


def _key(driver: Driver, name: Name) -> Any:
    from array import array

    from sgl_blend.radix_ext.chunk_store import ChunkKey

    prefix, tokens = (array("q", t).tobytes() for t in (PREFIXES[name[0]], CHUNKS[name]))
    return ChunkKey(driver.chunk_salt(), None, prefix, tokens)


def _store(driver: Driver) -> Any:
    return driver.runtime.builder._store


def _build(driver: Driver, name: Name) -> None:
    key = _key(driver, name)
    builder = driver.runtime.builder
    builder.enqueue([key])
    driver.run_until(lambda: not builder.num_unfinished and not builder.in_flight, 10**6)
    driver.step()
    driver.__dict__.setdefault("slots", {})[name] = driver.slots_of(
        PREFIXES[name[0]] + CHUNKS[name], driver.chunk_salt()
    )


def _look_up(driver: Driver, prefix: int) -> list[int]:
    """Look up a request with all chunks after a prefix, as at every attempt to admit it."""
    waiting = driver.__dict__.setdefault("waiting", {})
    if prefix not in waiting:
        chunks = [CHUNKS[prefix, c] for c in range(len(LENGTHS))]
        received = driver.receive(Prompt([PREFIXES[prefix], *chunks, [9]], [*range(1, 7)]))
        state = driver.runtime.intake.read(received)
        waiting[prefix] = driver.queued(received), state
    req, state = waiting[prefix]
    lookup = driver.runtime.admission._lookups.look_up(req, state)
    found = dict.fromkeys(state.spans, 0)
    for hit in lookup.hits:
        name = (prefix, state.spans.index(hit.span))
        first = hit.prefix_length - hit.match.start
        slots = hit.match.slots[first : first + hit.num_tokens]
        assert slots.tolist() == driver.__dict__["slots"][name][len(PREFIXES[prefix]) :]
        found[hit.span] = hit.num_tokens
    missing = [key for key, tokens in zip(state.keys, found.values(), strict=True) if not tokens]
    assert list(lookup.missing) == missing
    return list(found.values())


def _find(driver: Driver, name: Name) -> int:
    from sgl_blend.protocol.request import Span

    hit = _store(driver).find(_key(driver, name), Span(0, len(CHUNKS[name])))
    return 0 if hit is None else int(hit.num_tokens)


def _touch(driver: Driver, name: Name) -> None:
    _store(driver).touch(_key(driver, name))


def _lock(driver: Driver, name: Name) -> None:
    from sgl_blend.protocol.request import Span

    held = driver.__dict__.setdefault("held", {})
    hit = _store(driver).find(_key(driver, name), Span(0, len(CHUNKS[name])))
    held.setdefault(name, []).append(_store(driver).lock(hit.match))


def _unlock(driver: Driver, name: Name) -> None:
    _store(driver).unlock(driver.__dict__["held"][name].pop())


def _evict(driver: Driver, num_tokens: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=num_tokens))


def _pool(driver: Driver) -> dict[str, int]:
    use: dict[str, int] = driver.runtime.describe()["pool"]
    return use


def _evict_least_recently_used(driver: Driver) -> None:
    """Let fair shares change nothing in the order of eviction from now on."""
    driver.runtime._shares.before_evict = lambda num_tokens: None


def _restart(driver: Driver) -> None:
    for locks in driver.__dict__.pop("held", {}).values():
        for held in locks:
            _store(driver).unlock(held)
    driver.__dict__.pop("waiting", None)
    driver.settle()
    assert driver.scheduler.flush_cache(empty_cache=False)  # emptying takes half a second


# --- the plain model ---


@dataclass
class Node:
    """A stored build prefix (number -1) or chunk."""

    tokens: int
    used: int
    locks: int = 0


@dataclass
class Plain:
    """What must be stored: nodes by name, and a clock that ticks with every use."""

    nodes: dict[Name, Node] = field(default_factory=dict)
    clock: int = 0
    changed: set[int] = field(default_factory=lambda: {0, 1})
    """Prefixes whose request was not looked up since the tree changed."""
    late: dict[int, list[Name]] = field(default_factory=dict)
    """Chunks that lookups found since the last eviction, by prefix, in the order of the lookups."""

    def use(self, name: Name) -> None:
        """A use of a chunk: whatever lies on its path was used now."""
        self.clock += 1
        for node in (self.nodes.get((name[0], -1)), self.nodes.get(name)):
            if node is not None:
                node.used = self.clock

    def look_up(self, prefix: int) -> list[int]:
        names = [(prefix, c) for c in range(len(LENGTHS))]
        if prefix in self.changed:
            self.changed.discard(prefix)
            self.use((prefix, -1))
        self.late.pop(prefix, None)
        self.late[prefix] = [name for name in names if name in self.nodes]
        return [self.nodes[name].tokens if name in self.nodes else 0 for name in names]

    def build(self, name: Name) -> None:
        self.changed |= {0, 1}
        self.nodes.setdefault((name[0], -1), Node(len(PREFIXES[name[0]]), 0))
        self.nodes.setdefault(name, Node(len(CHUNKS[name]), 0))
        self.use(name)

    def lock(self, name: Name, by: int) -> None:
        for part in ((name[0], -1), name):
            self.nodes[part].locks += by

    def fits(self, name: Name) -> bool:
        """Tell whether a build finds room: for the prefix, chunk, one token and a page beside locks."""
        needed = len(PREFIXES[name[0]]) + len(CHUNKS[name]) + 8
        locked = sum(node.tokens for node in self.nodes.values() if node.locks)
        return needed + locked + len(PREFIXES[name[0]]) < CAPACITY

    def evict(self, num_tokens: int) -> None:
        self.changed |= {0, 1}
        for names in self.late.values():
            for name in names:
                self.use(name)
        self.late.clear()
        gone = 0
        while gone < num_tokens:
            leaves = [name for name, node in self.nodes.items() if self._may_go(name, node)]
            if not leaves:
                return
            oldest = min(leaves, key=lambda name: self.nodes[name].used)
            gone += self.nodes.pop(oldest).tokens

    def _may_go(self, name: Name, node: Node) -> bool:
        is_leaf = name[1] >= 0 or not any(n[0] == name[0] and n[1] >= 0 for n in self.nodes)
        return is_leaf and node.locks == 0

    @property
    def free(self) -> int:
        return CAPACITY - sum(node.tokens for node in self.nodes.values())

    @property
    def locked(self) -> int:
        return sum(node.tokens for node in self.nodes.values() if node.locks)


names = st.sampled_from(sorted(CHUNKS))


class Storage(RuleBasedStateMachine):
    """Both sides do the same; afterwards they must agree."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.engine.call(_restart)
        self.plain = Plain()

    @rule(name=names)
    def build(self, name: Name) -> None:
        if name in self.plain.nodes or not self.plain.fits(name):
            return
        # A build that needs room takes it before it runs, prefix and chunk by turns.
        short = len(CHUNKS[name]) + 2 * len(PREFIXES[name[0]]) + 16 - self.plain.free
        if short > 0:
            self.evict(short)
            if name[1] >= 0 and self.plain.free < len(CHUNKS[name]) + 16:
                return
        self.engine.call(_build, name)
        self.plain.build(name)

    @rule(name=names)
    def find(self, name: Name) -> None:
        stored = self.plain.nodes.get(name)
        self.plain.use((name[0], -1))
        assert self.engine.call(_find, name) == (0 if stored is None else stored.tokens)

    @rule(name=names)
    def touch(self, name: Name) -> None:
        self.plain.use(name)
        self.engine.call(_touch, name)

    @rule(prefix=st.sampled_from([0, 1]))
    def look_up(self, prefix: int) -> None:
        assert self.engine.call(_look_up, prefix) == self.plain.look_up(prefix)

    @rule(name=names)
    def lock(self, name: Name) -> None:
        if name in self.plain.nodes:
            self.plain.use((name[0], -1))
            self.engine.call(_lock, name)
            self.plain.lock(name, 1)

    @precondition(lambda self: self.plain.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        locked = [n for n, node in self.plain.nodes.items() if node.locks and n[1] >= 0]
        name = data.draw(st.sampled_from(sorted(locked)))
        self.engine.call(_unlock, name)
        self.plain.lock(name, -1)

    @rule(num_tokens=st.integers(1, 400))
    def evict(self, num_tokens: int) -> None:
        self.engine.call(_evict, num_tokens)
        self.plain.evict(num_tokens)

    @precondition(lambda self: not self.plain.locked)
    @rule()
    def flush(self) -> None:
        self.engine.call(_restart)
        self.plain = Plain()

    @invariant()
    def agrees(self) -> None:
        free, locked = self.plain.free, self.plain.locked
        want = {
            "capacity": CAPACITY,
            "free": free,
            "evictable": CAPACITY - free - locked,
            "locked": locked,
        }
        assert self.engine.call(_pool) == want


def _run(engine: Engine, num_examples: int) -> None:
    engine.call(_evict_least_recently_used)
    Storage.engine = engine
    run_state_machine_as_test(
        Storage,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_store_does_what_a_plain_model_does(start_engine: StartEngine) -> None:
    _run(start_engine(max_total_tokens=CAPACITY), 100)


@pytest.mark.slow
def test_the_store_does_what_a_plain_model_does_thousands_of_times(
    start_engine: StartEngine,
) -> None:
    _run(start_engine(max_total_tokens=CAPACITY), 2000)

"""The worker's side of benchmarks/novel.py: SGLang's scheduler serves requests by a clock of its own.

The clock counts the CPU time of the scheduler's thread, which other programs on the machine hardly
stretch. Where the scheduler has nothing to do, it jumps: to the next request, or on by a moment while
background work waits. What the small model takes is multiplied, so that a prompt takes as long as with
a large one: background work keeps quiet for fixed times, and would hardly get a turn else. By how much
is measured while the requests are served: what a prompt takes here changes from minute to minute.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from harness import Driver, Prompt

from benchmarks.novel_traffic import Request

MOMENT_S = 0.005
"""How far the clock jumps while background work waits for a quiet moment."""
NEW_TOKENS = 4
ALIKE_TOKENS = 20
"""Passages may begin alike: so few tokens that were found beside the head leave a prompt whole."""


class Clock:
    """Seconds of the scheduler's thread; takes the place of the time module for background work.

    Args:
        stretch: How many seconds a second of CPU time counts as.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._more_s = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        return self._stretch * time.thread_time() + self._more_s

    def stretch_to(self, stretch: float) -> None:
        """Count a second of CPU time as so many from now on; what has passed stays as it was."""
        now_s = self.monotonic()
        self._stretch = stretch
        self._more_s += now_s - self.monotonic()

    def jump(self, seconds: float) -> None:
        """Let time pass in which nothing happens, or take time back that was not the scheduler's."""
        self._more_s += seconds


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet; times in seconds of the clock."""

    request: Request
    req: Any
    sent_s: float
    first_s: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request.

    Attributes:
        ttft_s: From its time of arrival to its first token.
        share: Of the passages' tokens, how many were found: stored before the request came.
    """

    ttft_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Use:
    """What occupies the pool, as shares of it.

    Attributes:
        chunks: Passages.
        probation: Blended prompts and probes that are evicted before passages are.
        locked: Of running requests.
        free: Nothing.
    """

    chunks: float
    probation: float
    locked: float
    free: float


class Session:
    """One server under one configuration's requests, which come in parts.

    Args:
        driver: The scheduler.
        head: Tokens of the system prompt.
        distance_s: Mean distance of two requests, in seconds of the clock.
        stretch: How many of its seconds a second of CPU time counts as.
    """

    def __init__(self, driver: Driver, head: list[int], distance_s: float, stretch: float) -> None:
        self._driver = driver
        self._head = head
        self._distance_s = distance_s
        self._blends = hasattr(driver.scheduler, "sgl_blend")
        self.clock = Clock(stretch)
        self.prompts_s: list[float] = []
        """CPU seconds of prompts that were computed by themselves and found no passage."""
        self._begun_s = self.clock.monotonic()
        self._open: list[_Open] = []
        self._asked: dict[str | None, dict[int, bytes]] = {}

    def serve(self, requests: Sequence[Request]) -> list[Served]:
        """Serve some requests and return what became of each."""
        coming = deque(enumerate(requests))
        served: dict[int, Served] = {}
        numbers: dict[int, int] = {}
        while coming or self._open:
            now_s = self.clock.monotonic()
            while coming and self._due_s(coming[0][1]) <= now_s:
                number, request = coming.popleft()
                numbers[id(request)] = number
                self._send(request)
            before_s = time.thread_time()
            ran = self._driver.step()
            if ran:
                self._note(time.thread_time() - before_s)
            for one in self._look():
                served[numbers[id(one.request)]] = self._served(one)
            if not ran:
                self._rest(self._due_s(coming[0][1]) if coming else None)
        return [served[number] for number in range(len(requests))]

    def serve_by_clock(self, requests: Sequence[Request]) -> list[Served]:
        """Serve some requests; background work reads the same clock."""
        if not self._blends:
            return self.serve(requests)
        with patch("sgl_blend.scheduler.rounds.time", self.clock):
            return self.serve(requests)

    def _due_s(self, request: Request) -> float:
        return self._begun_s + request.at * self._distance_s

    def _send(self, request: Request) -> None:
        before_s = self.clock.monotonic()
        segments = [self._head, *(one.tokens for one in request.passages), request.question]
        chunk_at = list(range(1, 1 + len(request.passages))) if self._blends else []
        prompt = Prompt(
            segments,
            chunk_at,
            salt=request.tenant,
            max_new_tokens=NEW_TOKENS,
            logprobs=False,
        )
        received = self._driver.receive(prompt)
        known = self._asked.setdefault(request.tenant, {})
        known.update({one.number: array("q", one.tokens).tobytes() for one in request.passages})
        self.clock.jump(before_s - self.clock.monotonic())
        req = self._driver.hand_over(received)
        self._open.append(_Open(request, req, self._due_s(request)))

    def _note(self, step_s: float) -> None:
        """Note what a step took if it computed one whole prompt."""
        batch = self._driver.scheduler.cur_batch_for_debug
        if len(batch.reqs) == 1 and batch.forward_mode.is_extend():
            (req,) = batch.reqs
            whole = req.cached_tokens <= len(self._head) + ALIKE_TOKENS
            if whole and any(one.req is req for one in self._open):
                self.prompts_s.append(step_s)

    def _look(self) -> list[_Open]:
        """Note first tokens, and return and forget what is answered."""
        now_s = self.clock.monotonic()
        for one in self._open:
            if one.first_s is None and len(one.req.output_ids) > 0:
                one.first_s = now_s
        done = [one for one in self._open if one.req.finished()]
        self._open = [one for one in self._open if not one.req.finished()]
        return done

    def _served(self, one: _Open) -> Served:
        assert one.first_s is not None, "an answered request has a first token"
        request, req = one.request, one.req
        if self._blends:
            state = req.sgl_blend
            computed = state.report.computed_tokens
            if self._driver.runtime.describe()["blend_on_miss"] == "build":
                computed += sum(key.length for key in state.missed)
        else:
            computed = len(self._head) + request.num_tokens - req.cached_tokens
        computed = max(0, computed - len(request.question))
        return Served(one.first_s - one.sent_s, max(0.0, 1 - computed / request.num_tokens))

    def _rest(self, next_s: float | None) -> None:
        """Let time pass until something may happen."""
        now_s = self.clock.monotonic()
        busy = self._open or (self._blends and any(j.num_pending for j in self._jobs))
        until_s = now_s + MOMENT_S if busy or next_s is None else next_s
        if next_s is not None:
            until_s = min(until_s, next_s)
        self.clock.jump(max(0.0, until_s - now_s))

    @property
    def _jobs(self) -> Any:
        return self._driver.runtime.rounds.jobs

    def look_into_pool(self) -> Use | None:
        """Return what occupies the pool now; None of a server that does not blend.

        Each passage that was asked for is looked for, which is no use of it.
        """
        from sgl_blend.protocol.request import Span
        from sgl_blend.radix_ext.chunk_store import ChunkKey

        if not self._blends:
            return None
        before_s = self.clock.monotonic()
        runtime = self._driver.runtime
        store, pool = runtime.admission._store, runtime.describe()["pool"]
        chunks = 0
        for tenant, passages in self._asked.items():
            salt = self._driver.chunk_salt(tenant)
            for tokens in passages.values():
                key = ChunkKey(salt, None, array("q", self._head).tobytes(), tokens)
                hit = store.find(key, Span(0, key.length))
                chunks += 0 if hit is None else hit.num_tokens
        self.clock.jump(before_s - self.clock.monotonic())
        return Use(
            chunks=chunks / pool["capacity"],
            probation=runtime.probation.num_tokens / pool["capacity"],
            locked=pool["locked"] / pool["capacity"],
            free=pool["free"] / pool["capacity"],
        )


# --- called in the worker -----------------------------------------------------------------------


def begin(driver: Driver, head: list[int], distance_s: float, stretch: float) -> None:
    """Empty the cache and begin a configuration."""
    driver.settle()
    driver.flush()
    driver.novel = Session(driver, head, distance_s, stretch)  # type: ignore[attr-defined]


def serve(driver: Driver, requests: Sequence[Request]) -> list[Served]:
    """Serve the next requests."""
    session: Session = driver.novel  # type: ignore[attr-defined]
    return session.serve_by_clock(requests)


def look_into_pool(driver: Driver) -> Use | None:
    """Return what occupies the pool now; None of a server that does not blend."""
    session: Session = driver.novel  # type: ignore[attr-defined]
    return session.look_into_pool()


def take_prompt_seconds(driver: Driver) -> list[float]:
    """Return what whole prompts took since the last call, each in CPU seconds."""
    session: Session = driver.novel  # type: ignore[attr-defined]
    taken, session.prompts_s = session.prompts_s, []
    return taken


def stretch_to(driver: Driver, stretch: float) -> None:
    """Count a second of CPU time as so many from now on."""
    session: Session = driver.novel  # type: ignore[attr-defined]
    session.clock.stretch_to(stretch)


def totals(driver: Driver) -> dict[str, Any]:
    """Return what a blending server counted since it was started."""
    told = driver.runtime.describe()
    names = ("fallbacks", "chunks_built", "chunks_pending", "build_steps", "probes_run", "pool")
    return {name: told[name] for name in names}

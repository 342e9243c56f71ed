"""Which chunks a request loads, from where, how long it waits, and how much it recomputes.

The formulas are in tuning/loading.py and tuning/load_choice.py. Here are the times that they go by:
those of the layers were measured at start, those of host memory and storage follow every load. With
``--blend-when always`` and with ``--blend-on-miss build`` there is no controller. Then everything that
is found is loaded.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.tuning.links import LinkClock, LinkSpeed, TimedLoad, deadline_s, expected_end_s
from sgl_blend.tuning.load_choice import Choice, Ratios, choose
from sgl_blend.tuning.loading import Chunk, Links, ModelTimes, Place, Prompt

logger = logging.getLogger(__name__)

UNKNOWN_STORAGE = LinkSpeed(latency_s=1e-3, bytes_per_s=1e9)
"""What a store is taken for until it has answered: fast enough to be tried."""
_FIRST_RETRY_S, _LAST_RETRY_S = 10.0, 60.0
"""A store that was too slow for every chunk is tried again after so long, ever later to the last."""
_BELIEVED_AFTER = 6
"""Reads since it was last tried, after which a store that is still chosen counts as fast again."""


class Patience(NamedTuple):
    """How long a request waits for its KV.

    Attributes:
        least_s: Until then in any case.
        most_s: Until then if the rest is expected by that time at the pace so far.
    """

    least_s: float
    most_s: float


class LoadingController:
    """Decides by measured times; owned by the scheduler thread.

    Args:
        times: Of the model on this machine.
        host: Speed of host memory in a trial.
        token_bytes: KV of one token in all layers, on this rank.
        tp_group: Of which the first rank's times count.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        times: ModelTimes,
        host: LinkSpeed,
        token_bytes: int,
        tp_group: TPGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._times = times
        self._host = LinkClock(host)
        self._storage = LinkClock(UNKNOWN_STORAGE)
        self._heard: deque[TimedLoad] = deque()
        self._clock = clock
        self._left_since_s: float | None = None
        self._retry_s = _FIRST_RETRY_S
        self._num_heard = 0
        self._tp_group = tp_group
        self.token_bytes = token_bytes

    def choose(
        self, chunks: Sequence[Chunk], num_plain: int, *, ratios: Ratios, num_queued: int = 0
    ) -> Choice:
        """Choose the chunks to load; all ranks must ask together.

        Args:
            chunks: Of one request, in the order of the prompt.
            num_plain: Its other tokens that are computed.
            ratios: The least and the most of the reused tokens that may be recomputed.
            num_queued: Bytes that storage has been asked for before.
        """
        self._listen()
        host, storage = self._host.speed, self._storage.speed
        agreed = self._tp_group.agree(
            [host.latency_s, host.bytes_per_s, storage.latency_s, storage.bytes_per_s]
        )
        host, storage = LinkSpeed(*agreed[:2]), LinkSpeed(*agreed[2:])
        links = Links(host, storage, num_queued / storage.bytes_per_s)
        prompt = Prompt(tuple(chunks), num_plain)
        choice = choose(prompt, self._times, links, ratios)
        self._note(chunks, choice)
        return choice

    def _listen(self) -> None:
        """Learn from what storage has sent; where nothing was worth asking for, try it again."""
        while self._heard:
            self._storage.update(self._heard.popleft())
            self._num_heard += 1
            self._left_since_s = None
        left_s = self._left_since_s
        if left_s is not None and self._clock() - left_s >= self._retry_s:
            self._storage = LinkClock(UNKNOWN_STORAGE)
            self._left_since_s, self._num_heard = None, 0
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _note(self, chunks: Sequence[Chunk], choice: Choice) -> None:
        """Note since when storage was asked for nothing, because it was slow when last heard."""
        stored = {index for index, chunk in enumerate(chunks) if chunk.place is Place.STORAGE}
        if not stored.isdisjoint(choice.loaded):
            if self._num_heard >= _BELIEVED_AFTER:
                self._retry_s = _FIRST_RETRY_S
        elif stored and self._left_since_s is None:
            self._left_since_s = self._clock()

    @staticmethod
    def patience(choice: Choice) -> Patience:
        """Return how long a request waits for what it chose: then the rest is computed instead.

        Even where nothing is worth a wait it hears that storage holds nothing for it.
        """
        most_s = max(choice.patience_s, deadline_s(0.0))
        return Patience(min(deadline_s(choice.wait_s), most_s), most_s)

    def is_in_time(self, num_come: int, num_left: int, waited_s: float, patience: Patience) -> bool:
        """Tell whether the rest of what a request waits for comes soon enough; all ranks ask together.

        Args:
            num_come: Tokens that are there, on this rank; the first rank's count.
            num_left: Those that are still on their way.
            waited_s: How long it has waited.
            patience: How long it waits.
        """
        come, left = self._tp_group.agree([num_come, num_left])
        return expected_end_s(come, left, waited_s) <= patience.most_s

    def host_loaded(self, num_bytes: int, seconds: float) -> None:
        """Take note of how long a load from host memory took."""
        if num_bytes > 0 and seconds > 0:
            self._host.update(TimedLoad(num_bytes, seconds))

    def storage_read(self, num_bytes: int, seconds: float) -> None:
        """Take note of how long a read from storage took; may be called by any thread."""
        if num_bytes > 0 and seconds > 0:
            self._heard.append(TimedLoad(num_bytes, seconds))

    def describe(self) -> dict[str, float]:
        """Return the present speeds for /server_info, in milliseconds and GB/s."""
        found = {}
        for name, clock in (("host", self._host), ("storage", self._storage)):
            found[f"{name}_latency_ms"] = round(1e3 * clock.speed.latency_s, 3)
            found[f"{name}_gb_per_s"] = round(clock.speed.bytes_per_s / 1e9, 3)
        return found

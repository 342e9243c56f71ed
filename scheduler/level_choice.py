"""At which level the chunks of a request come from storage: the finest that is there in time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.storage.codec.streams import RequestStream
from sgl_blend.storage.level_names import LOSSLESS
from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.loading import ModelTimes, Step, step_seconds

_ON_DEVICE = LinkSpeed(latency_s=1e-6, bytes_per_s=1e15)
"""Nothing is loaded in the step whose time is asked for."""
_WINDOW = 5
"""Prefills of which the second slowest tells how much longer they take than the formulas say."""


class LevelChoice:
    """Says until when a request's chunks must be there; owned by the scheduler thread.

    The formulas know neither attention nor who else is served. So the time from the last chunk to the
    first token is measured, and tells by which factor the formulas are too short. Half of all prefills
    take longer than the median, so it is the second slowest of the last ones that time is left for.

    Args:
        levels: At which chunks are stored.
        times: Of a prefill on this machine.
        token_bytes: KV of one token in all layers, on this rank.

    Attributes:
        levels: At which chunks are stored.
        token_bytes: KV of one token in all layers, on this rank.
    """

    def __init__(self, levels: StoredLevels, times: ModelTimes, token_bytes: int) -> None:
        self.levels = levels
        self._times = times
        self._factors: deque[float] = deque(maxlen=_WINDOW)
        self.token_bytes = token_bytes

    def stream(self, state: RequestState, keys: Collection[ChunkKey]) -> RequestStream:
        """Return what chooses the level of each of the chunks that storage is asked for.

        Args:
            state: Of the request.
            keys: The chunks.
        """
        pairs = zip(state.keys, state.spans, strict=True)
        coming = {key: len(span) for key, span in pairs if key in keys}
        num_tokens = sum(coming.values()) + state.keys[0].prefix_length
        reused = sum(map(len, state.spans))
        deadline_s = None
        if state.slo_s is not None:
            compute_s = self._seconds(state.num_tokens - reused, reused, state.ratio)
            deadline_s = state.since_s + state.slo_s - compute_s
        kv_bytes = num_tokens * self.token_bytes
        return RequestStream(deadline_s, kv_bytes, self.levels.speed, self._text_s)

    def has_time_for_exact(self, stream: RequestStream | None, num_tokens: int) -> bool:
        """Tell whether exact KV, which is never rounded, may be read before a request's chunks.

        Args:
            stream: Of the request; None if it asks for no chunks.
            num_tokens: Of which there may be exact KV.
        """
        if stream is None:
            return True
        share = self.levels.lossless_share
        return stream.affords(LOSSLESS, share, num_tokens * self.token_bytes)

    def prefilled(self, state: RequestState) -> None:
        """Learn how long a prefill took, if its request waited for chunks: its first token is there."""
        if state.came_s is None or state.ahead:
            return
        report = state.report
        reused = report.reused_tokens + report.recomputed_tokens
        expected_s = self._formula(report.computed_tokens, reused, state.ratio)
        self._factors.append((time.monotonic() - state.came_s) / expected_s)

    def _text_s(self, kv_bytes: int) -> float:
        return self._seconds(kv_bytes // self.token_bytes, 0, 0.0)

    def _seconds(self, num_computed: int, num_reused: int, ratio: float) -> float:
        factor = min(sorted(self._factors)[-2:], default=1.0)
        return factor * self._formula(num_computed, num_reused, ratio)

    def _formula(self, num_computed: int, num_reused: int, ratio: float) -> float:
        step = Step(max(1, num_computed), num_reused)
        return step_seconds(step, ratio, self._times, _ON_DEVICE)

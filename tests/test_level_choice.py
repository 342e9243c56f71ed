"""Until when chunks must be there: the deadline of the request, less what its prefill takes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import torch
from codec_cases import profile_of

from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.scheduler.level_choice import LevelChoice
from sgl_blend.scheduler.request_state import Ahead, RequestState
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.storage.container import PageFormat
from sgl_blend.tuning.loading import ModelTimes

TOKEN_BYTES, LAYERS, CHECK = 1000, 10, 2
ROW_S = 1e-4
TIMES = ModelTimes(LAYERS, CHECK, TOKEN_BYTES // LAYERS, lambda rows: ROW_S * rows)
PREFILL_S = ROW_S * (3 * 250 + 7 * 70)
SHARES = [("lossless", 0.5), ("q4", 0.1)]


def _state(slo_s: float | None) -> RequestState:
    """Return 50 tokens of text and two chunks of 100."""
    spans = (Span(40, 140), Span(140, 240))
    keys = tuple(
        ChunkKey(salt="s", extra_key=None, prefix=b"", tokens=array("q", [number] * 100).tobytes())
        for number in range(2)
    )
    return RequestState(
        num_tokens=250, spans=spans, keys=keys, client_salt=None, policy="hkvd", ratio=0.1,
        slo_s=slo_s, since_s=1000.0,
    )  # fmt: skip


def _choose(
    now_s: float,
    slo_s: float | None,
    rate: float,
    num_keys: int = 2,
    slower: Sequence[float] = (),
) -> str | None:
    """Return a level; prefills took these times as long as the formulas say."""
    levels = StoredLevels(("lossless",), None, None)
    levels.speed.heard(round(rate), 1.0)
    choice = LevelChoice(levels, TIMES, TOKEN_BYTES)
    for factor in slower:
        choice.prefilled(_prefilled(factor))
    state = _state(slo_s)
    stream = choice.stream(state, state.keys[:num_keys])
    stream._clock = lambda: now_s
    return stream.choose(100 * TOKEN_BYTES, SHARES)


def _prefilled(factor: float) -> RequestState:
    """Return a state whose prefill has just ended: 50 rows, and 180 that were reused of 200."""
    state = _state(None)
    state.report.computed_tokens = 50
    state.report.reused_tokens, state.report.recomputed_tokens = 180, 20
    state.came_s = time.monotonic() - factor * PREFILL_S
    return state


def test_the_prefill_is_taken_off_the_deadline() -> None:
    # Three layers of 250 rows and seven of 50 + 20 take 0.075 + 0.049 s. Lossless takes 0.1 s of
    # 200,000 bytes of KV at 1 MB/s, and may take 0.125 s.
    for slo_s, level in ((0.250, "lossless"), (0.248, "q4")):
        assert _choose(1000.0, slo_s, 1e6) == level, slo_s
    assert _choose(1000.006, 0.256, 1e6) == "lossless"
    assert _choose(1000.007, 0.255, 1e6) == "q4"


def test_a_prefill_that_takes_longer_leaves_less_time() -> None:
    assert _choose(1000.0, 0.375, 1e6, slower=[1.0]) == "lossless"
    # Twice 0.124 s leave 0.127 s, and 0.123 s.
    assert _choose(1000.0, 0.375, 1e6, slower=[2.0, 2.0, 100.0]) == "lossless"
    assert _choose(1000.0, 0.371, 1e6, slower=[2.0, 2.0, 100.0]) == "q4"


def test_time_is_left_for_a_slow_prefill_but_not_for_the_slowest() -> None:
    for slower in ([100.0, 1.0, 1.0, 2.0, 1.0], [2.0, 100.0], [2.0]):
        assert _choose(1000.0, 0.375, 1e6, slower=slower) == "lossless", slower
        assert _choose(1000.0, 0.371, 1e6, slower=slower) == "q4", slower


def test_what_waited_for_nothing_teaches_nothing() -> None:
    choice = LevelChoice(StoredLevels(("lossless",), None, None), TIMES, TOKEN_BYTES)
    state = _prefilled(2.0)
    state.came_s = None
    choice.prefilled(state)
    state = _prefilled(2.0)
    state.ahead = [Ahead.computed(0, 40, LAYERS)]
    choice.prefilled(state)
    assert not choice._factors


def test_only_chunks_that_come_count() -> None:
    assert _choose(1000.0, 0.190, 1e6, num_keys=1) == "lossless"
    assert _choose(1000.0, 0.190, 1e6, num_keys=2) == "q4"


def test_without_a_deadline_the_coarsest_comes() -> None:
    assert _choose(1000.0, None, 1e12) == "q4"


def test_text_where_computing_is_faster() -> None:
    # Computing a chunk takes ten layers of 100 rows, 0.1 s; the coarsest takes 0.01 MB.
    assert _choose(2000.0, 0.1, 1e6) == "q4"
    assert _choose(2000.0, 0.1, 0.9e5) is None


def test_half_a_bin_is_of_the_finest_level_and_nothing_beside_lossless() -> None:
    form = PageFormat("float32", 3, 16, 2, 8)
    made = profile_of(form)

    def half_bins(*names: str) -> torch.Tensor | None:
        return StoredLevels(names, made, None).half_bins()

    assert half_bins("lossless", "q4") is None
    fine, coarse = half_bins("q8", "q4-2.0"), half_bins("q4-2.0")
    assert fine is not None
    assert coarse is not None
    assert fine.shape == coarse.shape == (3, 2, 8)
    torch.testing.assert_close(24 * fine, coarse)  # bins of 1/12 and of 2 standard deviations


def _has_time(slo_s: float | None, rate: float | None, num_tokens: int) -> bool:
    """Tell whether exact KV of so many tokens may be read first, at a lossless share of 0.75."""
    levels = StoredLevels(("lossless",), None, None)
    if rate is not None:
        levels.speed.heard(round(rate), 1.0)
    choice = LevelChoice(levels, TIMES, TOKEN_BYTES)
    state = _state(slo_s)
    stream = choice.stream(state, state.keys)
    stream._clock = lambda: 1000.0
    return choice.has_time_for_exact(stream, num_tokens)


def test_exact_kv_is_read_first_if_it_is_there_in_time() -> None:
    # The prefill leaves 0.126 s of 0.25, in which 168 tokens of 1 kB come at 1 MB/s.
    assert _has_time(0.250, 1e6, 160)
    assert not _has_time(0.250, 1e6, 175)
    assert not _has_time(0.250, None, 1), "nobody knows how fast the store is"
    assert not _has_time(0.1, 1e9, 1), "it is too late for everything"


def test_without_a_deadline_exact_kv_is_read_unless_computing_is_faster() -> None:
    # A token takes 1 ms to compute, and 0.75 kB to read.
    assert _has_time(None, None, 100)
    assert _has_time(None, 0.9e6, 100)
    assert not _has_time(None, 0.6e6, 100)

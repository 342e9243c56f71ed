"""Chunks that are stored in few bits come back through the real engine; exact KV loses nothing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from coded_chunks import coded, of_chunk, profile, rounded_kv
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from stored_chunks import (
    CHUNKS,
    QUESTION,
    SYSTEM,
    ask,
    ask_for_stored,
    chunk_kv,
    fill,
    flush,
    prompt_of,
    same,
)
from stored_files import NEEDS_NAMESPACES, PAGE, slow_reads, store

from sgl_blend.scheduler.level_choice import LevelChoice
from sgl_blend.scheduler.storage_tier import StorageTier
from sgl_blend.storage.codec.levels import (
    LEVELS,
    CodecProfile,
    floats,
    read_profile,
    write_profile,
)

__all__ = ["model_folder", "profile", "start_engine", "store"]  # fixtures

pytestmark = [pytest.mark.engine, NEEDS_NAMESPACES]

CHECK = 1
"""The check layer of engines in tests."""


def _store_and_ask(driver: Driver, salt: str) -> tuple[Answer, Answer, list[Any], list[Any]]:
    """Return answers and KV of a chunk before and after it was in storage alone."""
    flush(driver)
    ask(driver, salt, (0, 1, 2))
    warm, kv = ask(driver, salt), chunk_kv(driver, salt)
    flush(driver)
    back = ask(driver, salt)
    return warm, back, kv, rounded_kv(driver, salt)


def _error(kv: list[Any], other: list[Any]) -> float:
    pairs = [(x, y) for a, b in zip(kv, other, strict=True) for x, y in zip(a, b, strict=True)]
    wrong = sum(float((x - y).square().sum()) for x, y in pairs)
    return math.sqrt(wrong / sum(float(x.square().sum()) for x, _ in pairs))


@pytest.mark.parametrize("level", ["q8", "q4-2.0"])
def test_chunks_come_back_about_as_they_were(
    start_engine: StartEngine, profile: Path, store: Path, level: str
) -> None:
    before = set(store.iterdir())
    engine = start_engine(**coded(profile, level))
    warm, back, kv, kv_back = engine.call(_store_and_ask, f"back {level}")
    assert back.report["storage_tokens"] > 0
    assert back.report["chunk_levels"] == [level] * 3
    assert warm.report["chunk_levels"] == []
    assert back.report["chunk_hits"] == 3
    least, most = {"q8": (1e-4, 0.05), "q4-2.0": (0.05, 0.8)}[level]
    assert least < _error(kv, kv_back) < most
    # Tokens beyond the last whole page were not stored.
    new = [path for path in store.iterdir() if path not in before]
    assert {path.name.split("_")[0].rsplit("-", 1)[0] for path in new} == {f"sgb2-{level}"}


def _roundings(driver: Driver, salt: str) -> list[tuple[list[float], torch.Tensor] | None]:
    """Ask for a prompt of stored chunks and one that is built here; return what scores went by."""
    from sgl_blend.kernels import kv_deviation

    flush(driver)
    ask(driver, salt, (0, 1, 2))
    warm = []
    seen: list[tuple[list[float], torch.Tensor] | None] = []
    real = kv_deviation.kv_deviation_at

    def note(*args: Any, **more: Any) -> Any:
        rounding = more.get("rounding")
        told = None if rounding is None else (rounding.share.tolist(), rounding.half_bins.clone())
        seen.append(told)
        return real(*args, **more)

    with patch.object(kv_deviation, "kv_deviation_at", note):
        ask(driver, salt)
        warm = list(seen)
        flush(driver)
        seen.clear()
        ask(driver, salt)
    assert warm == [None]
    return seen


def test_scores_leave_out_what_coding_explains(
    start_engine: StartEngine, profile: Path, store: Path
) -> None:
    engine = start_engine(**coded(profile, "q8,q4-2.0"))
    (told,) = engine.call(_roundings, "scores")
    assert told is not None, "the chunks came in few bits"
    share, half_bins = told
    assert share == [1.0] * len(share)
    assert len(share) > sum(map(len, CHUNKS)) // 2
    # Of the finest level, which explains least: the level of each chunk is not kept.
    made = read_profile(profile)
    sigma = torch.from_numpy(floats(made.units[2 * CHECK + 1].sigma))
    wanted = sigma.view(made.heads, made.dim) * LEVELS["q8"].bin_of(CHECK, made.layers) / 2
    torch.testing.assert_close(half_bins, wanted)


def test_lossless_levels_lose_nothing(start_engine: StartEngine, profile: Path) -> None:
    engine = start_engine(**coded(profile, "lossless,q4"))
    warm, back, kv, kv_back = engine.call(_store_with_slo, "finest", 1e6)
    assert back.report["chunk_levels"] == ["lossless"] * 3
    assert same(of_chunk(kv), of_chunk(kv_back))
    # What stands first in the prompt was exact before, and is not known to be now.
    assert warm.report["prefix_tokens"] > back.report["prefix_tokens"] == 0


def _store_with_slo(
    driver: Driver, salt: str, slo_ms: float | None, seconds: float = 0.0
) -> tuple[Answer, Answer, list[Any], list[Any]]:
    flush(driver)
    ask(driver, salt, (0, 1, 2))
    warm, kv = ask(driver, salt), chunk_kv(driver, salt)
    flush(driver)
    prompt = _with(prompt_of(salt), sgl_blend_slo_ms=slo_ms)
    with slow_reads(seconds):
        req = driver.submit(prompt)
        driver.run_until(req.finished, limit=10**7)
        back = driver.answer(req)
        driver.settle()
    return warm, back, kv, rounded_kv(driver, salt) if back.report["chunk_hits"] == 3 else []


def _with(prompt: Prompt, **params: Any) -> Prompt:
    given = {name: value for name, value in params.items() if value is not None}
    return replace(prompt, params={**prompt.params, **given})


def test_deadlines_decide_what_comes(start_engine: StartEngine, profile: Path) -> None:
    engine = start_engine(**coded(profile, "q8,q4-2.0"))
    for slo_ms, level in ((1e6, "q8"), (None, "q4-2.0")):
        _, back, _, _ = engine.call(_store_with_slo, f"slo {slo_ms}", slo_ms)
        assert back.report["chunk_levels"] == [level] * 3, slo_ms
    # They waited for their chunks, so how long their prefills took is known.
    factors = engine.call(_learned)
    assert len(factors) >= 2
    assert all(factor > 0 for factor in factors)


def _first_by_new_weights(driver: Driver, salt: str) -> Answer:
    flush(driver)
    ask(driver, salt, (0, 1, 2))
    flush(driver)
    driver.runtime.storage.weights_changed()  # to those of before
    (answer,) = driver.ask(prompt_of(salt))
    driver.settle()
    return answer


def test_the_first_request_by_new_weights_may_read_coded_pages(
    start_engine: StartEngine, profile: Path
) -> None:
    answer = start_engine(**coded(profile, "q4-2.0")).call(_first_by_new_weights, "new weights")
    assert answer.report["chunk_levels"] == ["q4-2.0"] * 3


def _learned(driver: Driver) -> list[float]:
    return list(driver.runtime._levels._factors)


def test_a_deadline_lets_a_request_wait_for_a_slow_store(
    start_engine: StartEngine, profile: Path
) -> None:
    # Two pages are read at a time, 17 in all: longer than the two seconds that it would wait else.
    engine = start_engine(**coded(profile, "q4-2.0"))
    for slo_ms, waits in ((None, False), (60_000, True)):
        _, back, _, _ = engine.call(_store_with_slo, f"slow {slo_ms}", slo_ms, 0.4)
        assert (back.report["chunk_hits"] == 3) == waits, slo_ms


def _two_at_once(driver: Driver, salt: str, first: float | None) -> tuple[Answer, Answer, int]:
    """Have chunks asked for by a request with a deadline, or none, and by one that has all the time."""
    flush(driver)
    ask(driver, salt, (0, 1, 2))
    flush(driver)
    ask(driver, salt)  # so that the store is known to be fast
    flush(driver)
    prompts = [
        _with(prompt_of(salt, order), sgl_blend_slo_ms=slo_ms)
        for order, slo_ms in (((0, 1, 2), first), ((2, 1, 0), 1e6))
    ]
    text_is_fast = patch.object(LevelChoice, "_text_s", lambda *args: 0.0)
    with text_is_fast, patch.object(StorageTier, "_give_up_doubles"):
        other, patient = driver.ask(*prompts)
        driver.settle()
    return other, patient, _storage(driver)["levels"].get("q8", 0)


@pytest.mark.parametrize(("slo_ms", "levels"), [(1e-3, []), (None, ["q4-2.0"] * 3)])
def test_a_request_does_not_decide_for_another(
    start_engine: StartEngine, profile: Path, slo_ms: float | None, levels: list[str]
) -> None:
    # An engine of its own: nobody else has read a fine page.
    engine = start_engine(**coded(profile, "q8,q4-2.0", max_total_tokens=1040 if levels else 1056))
    other, patient, fine_pages = engine.call(_two_at_once, f"at once {slo_ms}", slo_ms)
    assert other.report["chunk_levels"] == levels
    shared = len(SYSTEM) // PAGE
    assert fine_pages == sum((len(SYSTEM) + len(chunk)) // PAGE - shared for chunk in CHUNKS)
    # What is read twice is dropped by the tree, and its level is not the chunk's.
    came = patient.report["storage_tokens"] > 0
    assert patient.report["chunk_levels"] == (["q8"] * 3 if came else [])


def _after_another(driver: Driver, salt: str) -> tuple[Answer, Answer, int]:
    """Ask for chunks that are on their way for a request without a deadline."""
    flush(driver)
    ask(driver, salt, (0, 1, 2))
    flush(driver)
    with slow_reads(0.1):
        first = driver.submit(prompt_of(salt, (0, 1, 2)))
        driver.run_until(lambda: _reads(driver) > 3, limit=10**7)
        second = driver.submit(_with(prompt_of(salt, (2, 1, 0)), sgl_blend_slo_ms=60_000))
        driver.run_until(lambda: first.finished() and second.finished(), limit=10**7)
        reads = _reads(driver)
        driver.settle()
    return driver.answer(first), driver.answer(second), reads


def _reads(driver: Driver) -> int:
    return int(_storage(driver)["hits"])


def _storage(driver: Driver) -> dict[str, Any]:
    totals: dict[str, Any] = driver.runtime.describe()["storage"]
    return totals


def test_nobody_waits_for_what_came_for_another(start_engine: StartEngine, profile: Path) -> None:
    engine = start_engine(**coded(profile, "q8,q4-2.0"))
    first, second, _ = engine.call(_after_another, "another")
    assert first.report["chunk_levels"] == ["q4-2.0"] * 3
    assert second.report["chunk_hits"] == 3
    assert second.report["load_ms"] < first.report["load_ms"] + 500
    # It names no level at which it read what the tree had already.
    assert second.report["storage_tokens"] or second.report["chunk_levels"] == []


def _without_time(driver: Driver, salt: str, text_s: float) -> Answer:
    with patch.object(LevelChoice, "_text_s", lambda *args: text_s):
        return _store_with_slo(driver, salt, 1e-3)[1]


def test_a_request_without_time_takes_the_coarsest_or_text(
    start_engine: StartEngine, profile: Path
) -> None:
    engine = start_engine(**coded(profile, "q8,q4-2.0"))
    slow = engine.call(_without_time, "text is slow", 1e6)
    assert slow.report["chunk_levels"] == ["q4-2.0"] * 3
    fast = engine.call(_without_time, "text is fast", 0.0)
    assert fast.report["chunk_levels"] == []
    assert fast.report["storage_tokens"] == 0
    assert fast.report["chunk_misses"] == 3


def _ask_plain(driver: Driver, salt: str) -> Answer:
    tokens = sum(CHUNKS[:5], SYSTEM) + QUESTION  # SGLang asks storage for no short prompt
    (answer,) = driver.ask(Prompt([tokens], salt=salt, max_new_tokens=4))
    driver.settle()
    return answer


def _exact_after_lossy(driver: Driver, salt: str) -> list[Answer]:
    """Ask a plain prompt first, after coded traffic of the same tenant, and from storage."""
    answers = []
    for lossy in (False, True, True):
        flush(driver)
        if lossy:
            ask(driver, salt)
            ask(driver, salt, (1, 0, 2))
        answers.append(_ask_plain(driver, salt))
    return answers


def test_exact_prompts_are_bit_equal_after_coded_traffic(
    start_engine: StartEngine, profile: Path
) -> None:
    first, *later = start_engine(**coded(profile, "q4-2.0")).call(_exact_after_lossy, "exact")
    for answer in later:
        assert answer.report["storage_tokens"] + answer.report["prefix_tokens"] > 0
        assert answer.logprobs == first.logprobs


def test_exact_prompts_are_bit_equal_in_a_server_that_starts_after_coded_traffic(
    start_engine: StartEngine, profile: Path
) -> None:
    first, *_ = start_engine(**coded(profile, "q4-2.0")).call(_exact_after_lossy, "restart")
    new = start_engine(**coded(profile, "q4-2.0"), max_running_requests=3)  # a process of its own
    answer = new.call(_ask_plain, "restart")
    assert answer.report["prefix_tokens"] > 0, "nothing came from storage"
    assert answer.logprobs == first.logprobs


def _store_on_a_full_disk(driver: Driver, salt: str) -> Answer:
    stock = HiCacheFile.set

    def full(self: Any, key: str, *args: Any, **more: Any) -> Any:
        return False if key.startswith("sgb2-q8") else stock(self, key, *args, **more)

    with patch.object(HiCacheFile, "set", full):
        return _store_with_slo(driver, salt, 1e6)[1]


def test_a_full_disk_keeps_the_coarsest_level(start_engine: StartEngine, profile: Path) -> None:
    back = start_engine(**coded(profile, "q8,q4")).call(_store_on_a_full_disk, "full")
    assert back.report["chunk_levels"] == ["q4"] * 3


def test_with_build_nothing_is_lost(start_engine: StartEngine, profile: Path) -> None:
    engine = start_engine(**coded(profile, "q4", blend_on_miss="build"))
    warm, kv, _ = engine.call(fill, "build")
    back, kv_back, _ = engine.call(ask_for_stored, "build")
    assert same(kv, kv_back)
    assert back.logprobs == warm.logprobs
    assert back.report["storage_tokens"] > 0


def test_a_profile_of_other_weights_is_refused(
    start_engine: StartEngine, profile: Path, tmp_path: Path
) -> None:
    made = msgspec.msgpack.decode(profile.read_bytes(), type=CodecProfile)
    other = tmp_path / "other"
    write_profile(msgspec.structs.replace(made, weights="0" * 32), other)
    with pytest.raises(Exception, match="other weights"):
        start_engine(**coded(other, "q4"))

"""Probes: which chunks have a memory, when it may be trusted, and that it is a chunk's own.

That a memory holds the right numbers, and that the forward follows it, is what test_reference.py shows.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import (
    Answer,
    Driver,
    Prompt,
    largest_difference,
    rag_prompt,
    random_tokens,
    watch_rows,
)
from reference import CHUNKS, QUESTION, SYSTEM, Reference
from tiny_models import NUM_LAYERS, VOCAB_SIZE, make_model

from sgl_blend.engine.tree import match_prefix
from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.radix_ext.namespaces import probe_salt_of
from sgl_blend.scheduler.probes import NUM_PROBES, PROBE_TOKENS, Memories, made_up_texts
from sgl_blend.settings.config import BlendConfig

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

RATIO = 0.2
CHECK = 1
TOLERANCE = 2e-4
MOVED = sum(map(len, CHUNKS[1:]))


OTHERS = (0, 2, 1)
"""An order that shares no more than its beginning with the one that is looked at."""


def rag(policy: str, numbers: tuple[int, ...] = (0, 1, 2), **rest: Any) -> Prompt:
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": RATIO}
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, params=params, **rest)


def _drop_prompts(driver: Driver) -> None:
    """Evict what is on probation: blended prompts and what probes left."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = driver.scheduler.tree_cache
    kept = len(SYSTEM) + sum(map(len, CHUNKS))
    tree.evict(EvictParams(num_tokens=max(0, int(tree.evictable_size()) - kept)))


def _describe(driver: Driver) -> dict[str, Any]:
    found: dict[str, Any] = driver.runtime.describe()
    return found


def _ask(driver: Driver, *prompts: Prompt) -> list[Answer]:
    """Ask one after the other, each when all background work for the one before is done."""
    answers = []
    for prompt in prompts:
        answers += driver.ask(prompt)
        driver.settle()
    return answers


def _fresh(driver: Driver, *prompts: Prompt) -> tuple[list[Answer], int, int]:
    """Ask after a flush; return the answers, how many probes ran and how many chunks have a memory."""
    driver.settle()
    driver.flush()
    before = _describe(driver)["probes_run"]
    answers = _ask(driver, *prompts)
    after = _describe(driver)
    return answers, after["probes_run"] - before, after["chunks_remembered"]


def test_a_request_that_trusts_memory_has_its_chunks_probed(start_engine: StartEngine) -> None:
    answers, probes, chunks = start_engine().call(_fresh, rag("funnel", OTHERS), rag("funnel"))
    assert probes == NUM_PROBES * 3
    assert chunks == 3
    report = answers[1].report
    early = -(-MOVED * 3 // 10)  # of the moved rows pass the full layers
    kept = report["recomputed_tokens"]
    others = len(QUESTION) * NUM_LAYERS
    assert report["layer_rows"] == others + early * (CHECK + 1) + kept * (NUM_LAYERS - CHECK - 1)


def _probed_rows(driver: Driver) -> int:
    """Return how many rows pass the layers below the check layer because chunks are probed."""
    counts = []
    for policy in ("hkvd", "funnel"):
        driver.settle()
        driver.flush()
        with watch_rows(driver) as rows:
            _ask(driver, rag(policy, OTHERS))
        counts.append(sum(rows))
    return (counts[1] - counts[0]) // CHECK


def test_a_chunk_with_its_probes_costs_at_most_one_and_three_quarters(
    start_engine: StartEngine,
) -> None:
    """In a model of 32 layers with the default check layer; a prefill of the chunk costs one."""
    rows = start_engine().call(_probed_rows)
    # The made-up texts are prefilled once for all chunks.
    assert rows >= NUM_PROBES * (PROBE_TOKENS + sum(map(len, CHUNKS)))
    check = BlendConfig().blend_check_layer
    assert rows * (check + 1) <= 0.75 * 32 * sum(map(len, CHUNKS))


def test_others_cost_no_probe(start_engine: StartEngine) -> None:
    _, probes, chunks = start_engine().call(_fresh, rag("hkvd", OTHERS), rag("hkvd"))
    assert (probes, chunks) == (0, 0)


@pytest.mark.parametrize("policy", ["funnel", "remembered"])
def test_a_chunk_without_a_memory_takes_hkvd(start_engine: StartEngine, policy: str) -> None:
    answers, _, _ = start_engine().call(
        _fresh, rag("hkvd", OTHERS), rag("hkvd"), rag(policy), rag(policy, OTHERS)
    )
    assert largest_difference(answers[2].logprobs[0], answers[1].logprobs[0]) <= TOLERANCE
    assert answers[2].report["layer_rows"] == answers[1].report["layer_rows"]
    assert answers[3].report["layer_rows"] < answers[1].report["layer_rows"]


def _only_the_first_is_probed(driver: Driver, policy: str) -> Answer:
    driver.settle()
    driver.flush()
    _ask(driver, rag(policy, (2, 1)), rag("hkvd"))  # chunk 1 is moved here, 2 is exact
    entries = driver.runtime._memories._entries
    tokens = array("q", CHUNKS[2]).tobytes()
    entries.pop(next(key for key in entries if key.tokens == tokens))
    return driver.ask(rag(policy))[0]


@pytest.mark.parametrize("policy", ["funnel", "remembered"])
def test_chunks_with_and_without_a_memory_share_a_request(
    start_engine: StartEngine, model_folder: Path, policy: str
) -> None:
    reference = Reference(make_model("llama", model_folder))
    texts = [array("q", text).tolist() for text in made_up_texts(VOCAB_SIZE)]
    answer = start_engine().call(_only_the_first_is_probed, policy)
    want = reference.blend(policy, RATIO, CHECK, texts=texts, known=(True, False))
    got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
    assert float((got - want).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("policy", ["funnel", "remembered"])
def test_with_build_an_answer_does_not_depend_on_the_cache(
    start_engine: StartEngine, policy: str
) -> None:
    engine = start_engine(blend_on_miss="build")
    cold, probes, chunks = engine.call(_fresh, rag(policy))
    assert (probes, chunks) == (NUM_PROBES * 2, 2), "the chunk that stands where it was built"
    warm, _, _ = engine.call(_fresh, rag("hkvd", (2, 0)), rag(policy, (1, 2)), rag(policy))
    assert warm[2].logprobs == cold[0].logprobs
    assert warm[2].report["layer_rows"] == cold[0].report["layer_rows"]


def _evict_all(driver: Driver) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    driver.scheduler.tree_cache.evict(EvictParams(num_tokens=10**6))


def _twice(driver: Driver) -> list[int]:
    """Ask for the chunks in two orders; return the layer rows of each."""
    _drop_prompts(driver)
    answers = _ask(driver, rag("funnel", OTHERS), rag("funnel"))
    return [answer.report["layer_rows"] for answer in answers]


def _forgets(driver: Driver, how: str) -> list[int]:
    """Return the layer rows of a request: with a memory, after its chunks are gone, and once more."""
    driver.settle()
    driver.flush()
    rows = _twice(driver)[1:]
    if how == "flush":
        driver.flush()
    else:
        _evict_all(driver)
    _ask(driver, rag("hkvd"))
    return rows + _twice(driver)


def test_a_flush_forgets_what_is_remembered(start_engine: StartEngine) -> None:
    before, lost, back = start_engine().call(_forgets, "flush")
    assert before == back < lost


def test_a_memory_outlives_its_kv(start_engine: StartEngine) -> None:
    """Law L4: what is built again is the same, bit for bit, so it deviates as it did."""
    before, rebuilt, again = start_engine().call(_forgets, "evict")
    assert before == rebuilt == again


def _loses_chunks_alone(driver: Driver) -> tuple[list[int], int]:
    """Let chunks be evicted and built again while the KV of their probes stays."""
    driver.settle()
    driver.flush()
    rows = _twice(driver)[1:]
    driver.runtime._memories.clear()  # as if others had taken its places
    before = _describe(driver)["build_steps"]
    return rows + _twice(driver), _describe(driver)["build_steps"] - before


def test_a_probe_whose_kv_is_left_is_read_once_more(start_engine: StartEngine) -> None:
    (before, lost, back), _ = start_engine().call(_loses_chunks_alone)
    assert before == back < lost


def _tenants(driver: Driver) -> list[int]:
    driver.settle()
    driver.flush()
    prompts = [
        rag("funnel", OTHERS, salt="a"),
        rag("funnel", salt="a"),
        rag("hkvd", OTHERS, salt="b"),
        rag("funnel", salt="b"),
    ]
    rows = [answer.report["layer_rows"] for answer in _ask(driver, *prompts)]
    rows.append(_describe(driver)["chunks_remembered"])
    return rows


def test_tenants_do_not_share_a_memory(start_engine: StartEngine) -> None:
    _, warm, _, other, chunks = start_engine().call(_tenants)
    assert chunks == 6
    assert warm < other


def _probe_tokens(driver: Driver) -> list[int]:
    """Return how much KV of a tenant's probe is stored: in its own namespace, and in others'."""
    driver.settle()
    driver.flush()
    _ask(driver, rag("hkvd", OTHERS, salt="a"), rag("funnel", salt="a"))
    namespaces = [probe_salt_of(driver.chunk_salt(tenant)) for tenant in ("a", "b", None)]
    memories = driver.runtime._memories
    (key, *_) = memories.keys_of(list(memories._entries))
    tree = driver.scheduler.tree_cache
    return [len(match_prefix(tree, key.path, salt=salt, extra_key=None)) for salt in namespaces]


def test_tenants_do_not_share_the_kv_of_probes(start_engine: StartEngine) -> None:
    own, *others = start_engine().call(_probe_tokens)
    assert own > 0
    assert others == [0, 0]


def _pending(driver: Driver) -> tuple[int, int, int]:
    driver.settle()
    driver.flush()
    _ask(driver, rag("hkvd"))
    req = driver.submit(rag("funnel"))
    driver.run_until(req.finished)
    pending = driver.runtime.prober.num_pending
    while not driver.scheduler.flush_cache():
        driver.step()
    left = driver.runtime.prober.num_pending
    driver.settle()
    return pending, left, _describe(driver)["chunks_remembered"]


def test_a_flush_drops_pending_probes(start_engine: StartEngine) -> None:
    pending, left, chunks = start_engine().call(_pending)
    assert pending > 0
    assert (left, chunks) == (0, 0)


def test_made_up_texts_are_always_the_same() -> None:
    texts = [array("q", text).tolist() for text in made_up_texts(VOCAB_SIZE)]
    assert texts == [array("q", text).tolist() for text in made_up_texts(VOCAB_SIZE)]
    assert len({tuple(text) for text in texts}) == NUM_PROBES
    assert all(0 <= token < VOCAB_SIZE for text in texts for token in text)


def _evicted_meanwhile(driver: Driver) -> tuple[int, int]:
    """Evict all that can be while a probe is in flight; return what is left of its chunk, of none."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from sgl_blend.engine.tree import match_prefix

    driver.settle()
    driver.flush()
    driver.submit(rag("funnel", (1, 2)))
    prober, tree = driver.runtime.prober, driver.scheduler.tree_cache
    driver.run_until(lambda: any(step.is_last for step in prober.in_flight.values()))
    key = next(step.key for step in prober.in_flight.values() if step.is_last)
    tree.evict(EvictParams(num_tokens=10**6))
    kept = len(match_prefix(tree, key.chunk.path, salt=key.chunk.salt, extra_key=None))
    driver.settle()
    tree.evict(EvictParams(num_tokens=10**6))
    return len(key.chunk.path) - kept, tree.protected_size()


def test_a_chunk_stays_while_a_probe_of_it_is_in_flight(start_engine: StartEngine) -> None:
    """What is found out goes to its slots: by then they must not belong to another."""
    engine = start_engine(disable_overlap_schedule=False)
    assert engine.call(_evicted_meanwhile) == (0, 0)


X, Y = random_tokens(63, 100), random_tokens(64, 60)
FIRST = random_tokens(62, 40)
Differences = tuple[float, float]


def _short(policy: str) -> Prompt:
    return rag_prompt(SYSTEM, [FIRST, X], QUESTION, params=_params(policy))


def _longer(policy: str) -> Prompt:
    """Its second chunk begins with the other's."""
    return rag_prompt(SYSTEM, [FIRST, X + Y], QUESTION, params=_params(policy))


def _later_prefix(policy: str) -> Prompt:
    """Its build prefix ends within the other's chunk."""
    segments = [SYSTEM + X[:10], random_tokens(65, 40), X[10:] + Y, QUESTION]
    return Prompt(segments, [1, 2], params=_params(policy))


def _params(policy: str) -> dict[str, Any]:
    return {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.15}


def _meet(driver: Driver, policy: str, how: str) -> Differences:
    """Ask, meet a request whose chunk shares slots with the first one's, and ask again twice.

    Returns:
        How far the second and the third answer are from the first.
    """
    driver.settle()
    driver.flush()
    cold = driver.ask(_short(policy))[0]
    driver.settle()
    other = driver.submit((_later_prefix if how == "later prefix" else _longer)(policy))
    if how == "later prefix":
        driver.run_until(other.finished)
    else:
        driver.run_until(lambda: _is_half_probed(driver, len(X + Y)))
    if how == "aborted":
        from sglang.srt.managers.io_struct import AbortReq

        driver.scheduler.abort_request(AbortReq(rid=other.rid))
        driver.settle()
    answers = [driver.ask(_short(policy))[0]]
    driver.settle()
    answers += driver.ask(_short(policy))
    driver.settle()
    found = [largest_difference(cold.logprobs[0], answer.logprobs[0]) for answer in answers]
    return found[0], found[1]


def _is_half_probed(driver: Driver, length: int) -> bool:
    steps = list(driver.runtime.prober.in_flight.values())
    return any(
        step.is_last and step.key.number == 0 and step.key.chunk.length == length for step in steps
    )


@pytest.mark.parametrize("how", ["later prefix", "beside", "aborted"])
@pytest.mark.parametrize("policy", ["funnel", "remembered"])
def test_chunks_that_begin_alike_do_not_share_a_memory(
    start_engine: StartEngine, policy: str, how: str
) -> None:
    engine = start_engine(
        blend_on_miss="build", chunked_prefill_size=256, disable_overlap_schedule=False
    )
    assert max(engine.call(_meet, policy, how)) <= TOLERANCE


def test_what_was_remembered_first_makes_room() -> None:
    store: Any = None  # nothing is looked up
    memories = Memories(store, VOCAB_SIZE, 100, 10_000)
    draw, newest = random.Random(0), []
    for number in range(500):
        key = ChunkKey("salt", None, b"", bytes(8 * number + 8))
        memories._entries[key] = memories._make_room(draw.randint(1, 60))
        newest.append(key)
        entries = list(memories._entries.values())
        taken = [place for one in entries for place in range(one.place, one.place + one.length)]
        assert len(set(taken)) == len(taken), "a place was taken twice"
        assert set(taken) <= set(range(100)), "there is no such place"
        assert list(memories._entries) == newest[-len(entries) :], "it was not the oldest"
        # What makes room lies within the new one's places, or behind the last of the ring's.
        assert number < 10 or len(taken) >= 20

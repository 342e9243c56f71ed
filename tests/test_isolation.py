"""What a tenant does reaches no other: not its answers, not its share of the cache (L7, R19, R20)."""

import logging
import random
from array import array
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens

from sgl_blend.engine.tree import match_prefix
from sgl_blend.engine.versions import features

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 30)
QUESTION = random_tokens(99, 12)
CHUNKS = [random_tokens(20 + i, 80) for i in range(60)]


def ask_for(numbers: Sequence[int], salt: str | None, **rest: Any) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in numbers], QUESTION, salt=salt, **rest)


# --- HijackKV (arXiv 2607.19957): a benign chunk whose KV remembers what stood before it ---


def _kv_and_answer(driver: Driver, attack: bool) -> tuple[list[Any], list[list[float]], int]:
    driver.settle()
    driver.flush()
    document, victim_question = CHUNKS[0], random_tokens(98, 12)
    if attack:
        for turn in range(3):  # the attacker's text in front of the document, chunk and not chunk
            poison = random_tokens(500 + turn, 90)
            driver.ask(
                Prompt([SYSTEM, poison, document, QUESTION], [1, 2]),
                Prompt([SYSTEM, poison, document, QUESTION], [2]),
                Prompt([[*SYSTEM, *poison], document, QUESTION], [1]),
            )
            driver.settle()
    victim = Prompt([SYSTEM, CHUNKS[1], document, victim_question], [1, 2])
    driver.ask(victim)
    driver.settle()
    answer = driver.ask(
        Prompt([SYSTEM, document, CHUNKS[1], victim_question], [1, 2], max_new_tokens=4)
    )[0]
    driver.settle()
    stored = driver.kv([*SYSTEM, *document], driver.chunk_salt())
    return stored, answer.logprobs, answer.report["reused_tokens"]


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_hijacked_documents_leave_the_victim_as_it_was(
    start_engine: StartEngine, on_miss: str
) -> None:
    engine = start_engine(blend_on_miss=on_miss)
    clean, clean_logprobs, reused = engine.call(_kv_and_answer, False)
    stored, logprobs, reused_then = engine.call(_kv_and_answer, True)

    assert reused == reused_then > 0
    for (k, v), (clean_k, clean_v) in zip(stored, clean, strict=True):
        assert k.equal(clean_k)
        assert v.equal(clean_v)
    assert logprobs == clean_logprobs


# --- fair shares of the cache ---


def _flood(driver: Driver, num_active: int) -> tuple[int, int]:
    """Let a tenant miss fifty chunks while another holds four; return what the other still hits."""
    driver.settle()
    driver.flush()
    driver.ask(ask_for(range(4), "quiet"))
    driver.settle()
    for start in range(8, 48, 4):  # a tenant is forgotten once the pool was admitted twice
        driver.ask(ask_for(range(start, start + 4), "flood" if num_active == 2 else "quiet"))
        driver.settle()
    hits = driver.ask(ask_for(range(4), "quiet"))[0].report["chunk_hits"]
    driver.settle()
    return hits, driver.runtime.describe()["chunks_protected"]


def test_a_flood_does_not_push_a_tenant_below_its_fair_share(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=2000)
    hits, protected = engine.call(_flood, 2)
    assert hits == 4
    assert protected * 80 <= 2000, "metadata of more chunks than the pool can hold"


def test_one_tenant_alone_has_the_cache_to_itself(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=2000)
    hits, _ = engine.call(_flood, 1)
    assert hits == 0, "the oldest chunks were kept although nobody else needs protection"


def _stored_after_sixty(driver: Driver) -> list[int]:
    """Use sixty chunks one after the other, and return which are still stored."""
    driver.settle()
    driver.flush()
    for number in range(60):
        # Not probed: the texts of probes would take half of so small a pool.
        params = {"sgl_blend_policy": "hkvd"}
        driver.ask(ask_for([number], None, logprobs=False, params=params))
        driver.settle()
    salt, tree = driver.chunk_salt(), driver.scheduler.tree_cache
    paths = [array("q", SYSTEM + chunk) for chunk in CHUNKS]
    found = [match_prefix(tree, path, salt=salt, extra_key=None) for path in paths]
    return [i for i, path in enumerate(paths) if len(found[i]) == len(path)]


def test_protection_keeps_what_was_used_last(start_engine: StartEngine) -> None:
    """To be protected is no use: a chunk of long ago must not outlive those of now by it."""
    stored = start_engine(max_total_tokens=1200).call(_stored_after_sixty)
    assert len(stored) >= 10
    assert stored[0] >= 60 - 1200 // 80, "the pool has no room for what was used since"


def _flood_of_salts(driver: Driver, count: int) -> tuple[list[int], int, int]:
    """Let a tenant reuse four chunks while somebody sends one request under each of many salts.

    Returns:
        How many tokens the tenant's request computes after every six salts; the chunks and the
        tenants that metadata is held of.
    """
    driver.settle()
    driver.flush()
    for _ in range(2):
        driver.ask(ask_for(range(4), "tenant", logprobs=False))
        driver.settle()
    computed = []
    for start in range(0, count, 6):
        driver.ask(
            *(
                rag_prompt(SYSTEM, [random_tokens(5000 + i, 80)], QUESTION, salt=f"flood-{i}")
                for i in range(start, start + 6)
            )
        )
        driver.settle()
        answer = driver.ask(ask_for(range(4), "tenant", logprobs=False))[0]
        computed.append(answer.report["computed_tokens"])
        driver.settle()
    shares = driver.runtime._shares
    return computed, shares.num_chunks, getattr(shares, "num_tenants", 0)


def test_a_flood_of_salts_takes_no_more_than_one_share(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=2000)
    computed, protected, tenants = engine.call(_flood_of_salts, 120)
    assert max(computed) <= len(QUESTION), "a chunk was computed again"
    assert protected * 80 <= 2000, "metadata of more chunks than the pool can hold"
    assert tenants <= 32 + 256


def _busy_and_slow(driver: Driver) -> list[int]:
    """Let one tenant draw from twenty chunks, five requests a turn, and another from six, one a turn.

    Returns:
        How many of its three chunks the slow tenant hits in each turn.
    """
    driver.settle()
    driver.flush()
    draw = random.Random(3)
    hits = []
    for _ in range(20):
        for _ in range(5):
            driver.ask(ask_for(draw.sample(range(10, 30), 4), "busy"))
        driver.settle()
        answer = driver.ask(ask_for(draw.sample(range(6), 3), "slow"))[0]
        hits.append(answer.report["chunk_hits"])
        driver.settle()
    return hits


def test_a_slow_tenant_keeps_its_share_beside_a_busy_one(start_engine: StartEngine) -> None:
    hits = start_engine(max_total_tokens=2000).call(_busy_and_slow)
    assert sum(hits[8:]) >= 0.9 * 3 * len(hits[8:]), hits


def _pending_of_the_quiet(driver: Driver) -> int:
    """Return how many builds run before a quiet tenant's single chunk after a flood's twenty."""
    driver.settle()
    driver.flush()
    driver.ask(*(ask_for(range(i, i + 5), "flood") for i in range(0, 20, 5)))
    driver.ask(ask_for(range(40, 41), "quiet"))
    quiet = driver.chunk_salt("quiet")
    before = driver.runtime.builder.num_built

    def quiet_is_stored() -> bool:
        path = array("q", [*SYSTEM, *CHUNKS[40]])
        match = match_prefix(driver.scheduler.tree_cache, path, salt=quiet, extra_key=None)
        return len(match) == len(path)

    driver.run_until(quiet_is_stored, limit=10**6)
    built = driver.runtime.builder.num_built - before
    driver.settle()
    return int(built)


def test_tenants_take_turns_in_building(start_engine: StartEngine) -> None:
    built = start_engine(max_total_tokens=6000).call(_pending_of_the_quiet)
    assert built <= 4, f"{built} chunks of the flood were built before the quiet tenant's one"


def _earned(driver: Driver) -> list[int]:
    """Return the tokens of each chunk that are put down to its tenant, for two requests in turn."""
    driver.settle()
    driver.flush()
    with patch.object(driver.runtime._shares, "hit", autospec=True) as hit:
        for numbers in ((0, 1), (1, 0)):
            driver.ask(ask_for(numbers, "tenant", params={"sgl_blend_ratio": 0.4}))
            driver.settle()
    return [call.args[-1] for call in hit.call_args_list]


def test_chunks_that_were_built_for_a_request_earn_no_share(start_engine: StartEngine) -> None:
    earned = start_engine(max_total_tokens=6000, blend_on_miss="build").call(_earned)
    assert earned == [0, 0, len(CHUNKS[1]), len(CHUNKS[0])]


# --- request classes ---


def _hits_by_class(driver: Driver) -> list[int]:
    """Ask in two request classes of one tenant; a class may stand for another adapter."""
    driver.settle()
    driver.flush()
    hits = []
    for extra_key, numbers in (("a", (0, 1)), ("a", (1, 0)), ("b", (1, 0))):
        received = driver.receive(ask_for(numbers, "tenant"))
        received.extra_key = extra_key
        req = driver.hand_over(received)
        driver.run_until(req.finished)
        driver.settle()
        hits.append(driver.answer(req).report["chunk_hits"])
    return hits


def test_request_classes_share_no_chunks(start_engine: StartEngine) -> None:
    if not features().keys_have_salt:
        pytest.skip("SGLang 0.5.17 has one name for tenant and class")
    assert start_engine(max_total_tokens=6000).call(_hits_by_class) == [0, 2, 0]


# --- what is written down ---


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _log_of_all_kinds_of_requests(driver: Driver) -> list[str]:
    handler = _Keep()
    logger = logging.getLogger("sgl_blend")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        driver.settle()
        driver.flush()
        for _ in range(2):
            driver.ask(ask_for(range(4), "a-secret-salt"))
            driver.settle()
        driver.ask(Prompt([SYSTEM, CHUNKS[0]], [1], params={"sgl_blend_policy": "a-secret-policy"}))
        driver.settle()
    finally:
        logger.removeHandler(handler)
    return handler.lines


def test_no_user_text_and_no_salt_is_logged(start_engine: StartEngine) -> None:
    lines = start_engine(blend_canary_rate=1.0).call(_log_of_all_kinds_of_requests)
    assert lines, "nothing was logged, the test shows nothing"
    text = "\n".join(lines)
    assert "secret" not in text
    for chunk in CHUNKS[:4]:
        assert ", ".join(map(str, chunk[:5])) not in text

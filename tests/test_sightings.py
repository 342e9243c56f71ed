"""Runs against a search of all pairs of places, tenants kept apart, memory bounded, time bounded."""

import numpy as np
import pytest
from finding_cases import Tokens, milliseconds, random_tokens, slowness
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.finding.fingerprints import WINDOW, WindowHash
from sgl_blend.finding.sightings import NewText, Sightings
from sgl_blend.finding.spans import Span

LEAST = 64


def new_log(megabytes: float = 1.0) -> Sightings:
    return Sightings(WindowHash(77), megabytes, least=LEAST)


def add(log: Sightings, tokens: Tokens, tenant: str = "a") -> None:
    log.add(log.sample(tenant, tokens))


def find(log: Sightings, tokens: Tokens, tenant: str = "a", start: int = 0) -> list[Span]:
    return [run.span for run in log.find(log.sample(tenant, tokens), start)]


def maximal_runs(prompt: list[int], earlier: list[int]) -> set[Span]:
    """Return every run of the prompt that the earlier one holds, and that goes on to no side."""
    lengths = [[0] * (len(earlier) + 1) for _ in range(len(prompt) + 1)]
    runs = set()
    for i in reversed(range(len(prompt))):
        for j in reversed(range(len(earlier))):
            if prompt[i] == earlier[j]:
                lengths[i][j] = 1 + lengths[i + 1][j + 1]
                begins = not i or not j or prompt[i - 1] != earlier[j - 1]
                if begins and lengths[i][j] >= LEAST:
                    runs.add(Span(i, i + lengths[i][j]))
    return runs


blocks = [random_tokens(seed, 40 + 25 * seed, 500).tolist() for seed in range(5)]
block_lists = st.lists(st.integers(0, 4), max_size=3)
noise = st.integers(1, 10_000)


def mixed(picks: list[int], seed: int) -> list[int]:
    parts = []
    for number, pick in enumerate(picks):
        parts += random_tokens(seed + number, 10, 10**6).tolist() + blocks[pick]
    return parts


@settings(deadline=None, max_examples=60)
@given(one=block_lists, two=block_lists, seed=noise)
def test_runs_are_those_that_a_search_of_all_places_finds(
    one: list[int], two: list[int], seed: int
) -> None:
    earlier, prompt = mixed(one, seed), mixed(two, seed + 20_000)
    log = new_log()
    add(log, np.array(earlier, np.int32))
    sample = log.sample("a", np.array(prompt, np.int32))
    runs = [run.span for run in log.find(sample)]
    known = set(log.sample("a", np.array(earlier, np.int32)).fingerprints.tolist())
    sampled = {
        at
        for at, name in zip(sample.offsets.tolist(), sample.fingerprints.tolist(), strict=True)
        if name in known
    }
    # All that hold a sample are found, and nothing else. Here no two of them overlap.
    expected = [
        run
        for run in sorted(maximal_runs(prompt, earlier))
        if any(run.start <= at <= run.stop - WINDOW for at in sampled)
    ]
    assert runs == expected


@settings(deadline=None, max_examples=100)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=70, max_size=200), min_size=2, max_size=5)
)
def test_what_is_found_was_seen_and_is_disjoint(prompts: list[list[int]]) -> None:
    log = new_log()
    *earlier, last = prompts
    for numbers in earlier:
        add(log, np.array(numbers, np.int32))
    stop = 0
    for run in find(log, np.array(last, np.int32)):
        assert run.start >= stop
        assert run.num_tokens >= LEAST
        text = bytes(last[run.start : run.stop])
        assert any(text in bytes(numbers) for numbers in earlier)
        stop = run.stop


def test_nearly_all_documents_are_found_wherever_they_stand() -> None:
    documents = [random_tokens(seed, 300) for seed in range(100)]
    log = new_log(4.0)
    for document in documents:
        add(log, np.concatenate([random_tokens(1_000 + document[0], 50), document]))
    found = 0
    for document in documents:
        prompt = np.concatenate([random_tokens(5, 77), document, random_tokens(6, 30)])
        found += Span(77, 377) in find(log, prompt)
    assert found == 100


def test_a_run_ends_where_the_earlier_prompt_ends() -> None:
    log = new_log()
    one, two = random_tokens(1, 200), random_tokens(2, 200)
    add(log, one)
    add(log, two)  # stands behind it in the log
    assert find(log, np.concatenate([one, two])) == [(0, 200), (200, 400)]


def test_a_run_begins_where_the_earlier_prompt_begins() -> None:
    log = new_log()
    one, two = random_tokens(1, 200), random_tokens(2, 200)
    add(log, one)
    add(log, two)
    assert find(log, np.concatenate([one[-30:], two])) == [(30, 230)]


def test_the_same_text_is_remembered_at_two_places() -> None:
    log = new_log()
    for _ in range(5):
        add(log, random_tokens(1, 300))
        log.check()


def test_tokens_in_front_that_do_not_matter_are_left_out() -> None:
    log = new_log()
    tokens = random_tokens(1, 400)
    add(log, tokens)
    assert find(log, tokens, start=100) == [(100, 400)]
    assert find(log, tokens, start=337) == []


@pytest.mark.parametrize(("size", "expected"), [(63, []), (64, [Span(20, 84)])])
def test_a_run_has_sixty_four_tokens(size: int, expected: list[Span]) -> None:
    shared = random_tokens(10, size)
    log = new_log()
    add(log, np.concatenate([random_tokens(2, 50), shared, random_tokens(3, 50)]))
    assert find(log, np.concatenate([random_tokens(4, 20), shared])) == expected


def test_tenants_see_nothing_of_each_other() -> None:
    tokens = random_tokens(1, 500)
    log = new_log()
    for turn in range(5):
        other = random_tokens(50 + turn, 500)
        add(log, tokens, "a")
        add(log, other, "b")
        assert find(log, tokens, "b") == []
        assert find(log, other, "a") == []
        assert find(log, tokens, "a") == find(log, other, "b") == [(0, 500)]


def test_a_forged_place_of_another_tenant_is_not_read() -> None:
    # Even with the other tenant's fingerprints.
    tokens = random_tokens(1, 500)
    log = new_log()
    add(log, tokens, "a")
    mine = log.sample("a", tokens)
    forged = type(mine)("b", mine.tokens, mine.offsets, mine.fingerprints)
    assert log.find(mine) == [(Span(0, 500), 0)]
    assert log.find(forged) == []


def test_memory_is_bounded_and_the_oldest_are_forgotten() -> None:
    log = new_log(0.1)
    prompts = [random_tokens(seed, 300 + 37 * (seed % 7)) for seed in range(200)]
    for prompt in prompts:
        add(log, prompt)
        log.check()
        assert find(log, prompt) == [(0, len(prompt))]
    assert log.num_bytes <= 100_000
    assert len(log) + log.num_forgotten == 200
    kept = [bool(find(log, prompt)) for prompt in prompts]
    assert kept == [False] * log.num_forgotten + [True] * len(log)
    assert log.num_tokens == sum(len(prompt) for prompt in prompts[-len(log) :])
    assert log.num_tokens > 0.8 * 100_000 / 11


def come_again(log: Sightings, tokens: Tokens, tenant: str = "a") -> dict[int, int]:
    return dict(log.come_again(log.find(log.sample(tenant, tokens))))


def add_new(log: Sightings, tokens: Tokens, *new: NewText, tenant: str = "a") -> None:
    log.add(log.sample(tenant, tokens), new)


def test_new_text_is_counted_once_when_it_comes_again() -> None:
    log = new_log()
    one, two = random_tokens(1, 300), random_tokens(2, 300)
    both = np.concatenate([one, two])
    add_new(log, both, NewText(Span(0, 200), 7), NewText(Span(300, 600), 9))
    assert come_again(log, one) == {7: 200}
    assert come_again(log, one) == {}
    part = two[50:250]
    assert come_again(log, part) == {9: 200}
    add(log, part)  # nothing of it is new
    assert come_again(log, two) == {9: 100}
    assert come_again(log, both) == {}


@pytest.mark.parametrize("turns", range(5))
def test_what_goes_on_in_a_conversation_has_not_come_again(turns: int) -> None:
    log = new_log()
    document = random_tokens(1, 300)
    conversation = np.concatenate([random_tokens(2, 100), document])
    add_new(log, conversation, NewText(Span(0, 400), 7))
    for turn in range(turns):
        start = len(conversation)
        conversation = np.concatenate([conversation, random_tokens(10 + turn, 120)])
        sample = log.sample("a", conversation)
        assert log.come_again(log.find(sample, start)) == {}
        log.add(sample, [NewText(Span(start, start + 120), 9)], start)
    assert come_again(log, document) == {7: 300}
    assert come_again(log, document) == {}


def test_labels_are_those_of_the_prompt_that_stands_there_now() -> None:
    log = new_log(0.01)  # two prompts
    prompts = [random_tokens(seed, 300) for seed in range(9)]
    for number, prompt in enumerate(prompts):
        new = [NewText(Span(0, 300), 1 + number)] if number % 2 else []
        add_new(log, prompt, *new)
        if number % 3 == 0:
            assert come_again(log, prompt) == ({1 + number: 300} if new else {})
    assert come_again(log, prompts[0]) == {}
    assert come_again(log, prompts[-1]) == {}
    assert come_again(log, prompts[-2]) == {8: 300}


def test_what_is_longer_than_the_log_is_cut() -> None:
    log = new_log(0.01)
    tokens = random_tokens(1, 2_000)
    add_new(log, tokens, NewText(Span(0, 2_000), 3))
    assert come_again(log, tokens) == {3: 909}


def test_labels_are_forgotten_with_their_tenant() -> None:
    log = new_log()
    tokens = random_tokens(1, 300)
    add_new(log, tokens, NewText(Span(0, 300), 5))
    add_new(log, tokens, NewText(Span(0, 300), 6), tenant="b")
    log.forget("a")
    assert not log._labels[:300].any()
    assert come_again(log, tokens) == {}
    assert come_again(log, tokens, "b") == {6: 300}
    add_new(log, tokens, NewText(Span(0, 300), 5))
    log.clear()
    assert not log._labels.any()


def test_many_short_prompts_are_bounded_too() -> None:
    log = new_log(0.1)
    for seed in range(300):
        add(log, random_tokens(seed, 64))
        log.check()
    assert len(log) < 50


def test_of_a_prompt_longer_than_the_log_the_beginning_is_kept() -> None:
    log = new_log(0.01)
    tokens = random_tokens(1, 5_000)
    add(log, tokens)
    log.check()
    ((start, stop),) = find(log, tokens)
    assert start == 0
    assert stop == log.num_tokens < 5_000


def test_a_tenant_and_everything_can_be_forgotten() -> None:
    one, two = random_tokens(1, 300), random_tokens(2, 300)
    log = new_log()
    for _ in range(2):
        add(log, one, "a")
        add(log, two, "b")
        log.forget("a")
        log.check()
        assert find(log, one, "a") == []
        assert find(log, two, "b") == [(0, 300)]
    log.clear()
    log.check()
    assert find(log, two, "b") == []


def test_a_log_needs_memory() -> None:
    with pytest.raises(ValueError, match="more memory"):
        new_log(0.001)


def documents_of(seed: int) -> Tokens:
    """Return a prompt of 8,000 tokens made of 16 documents out of 100."""
    random = np.random.default_rng(seed)
    parts = []
    for document in random.integers(0, 100, 16).tolist():
        parts += [random_tokens(document, 480), random.integers(0, 10**5, 20, dtype=np.int32)]
    return np.concatenate(parts)


def test_learning_is_fast() -> None:
    log = new_log(16.0)
    for seed in range(50):
        add(log, documents_of(seed))
    prompts = iter([documents_of(seed) for seed in range(100, 150)])

    def learn() -> None:
        sample = log.sample("a", next(prompts))
        assert len(log.find(sample)) == 16
        log.add(sample)

    assert milliseconds(learn) < 2.0 * slowness()


@pytest.mark.parametrize("period", [1, 2, 9, 16, 17])
def test_repeated_text_is_learned_fast(period: int) -> None:
    log = new_log(4.0)
    tokens = np.resize(random_tokens(1, period), 8_000)
    for _ in range(3):
        add(log, tokens)

    def learn() -> None:
        sample = log.sample("a", tokens)
        log.find(sample)
        log.add(sample)

    assert find(log, tokens) == ([(0, 8_000)] if period > 8 else [])
    assert milliseconds(learn, 10) < 20.0 * slowness()

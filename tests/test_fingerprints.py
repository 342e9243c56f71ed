"""Fingerprints depend on 16 tokens, a seed and a salt, and on nothing else."""

import numpy as np
import pytest
from finding_cases import milliseconds, random_tokens, slowness
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.finding.fingerprints import RADIUS, WINDOW, WindowHash, sample_offsets

HASH = WindowHash(1234)
token_lists = st.lists(st.integers(0, 3), min_size=WINDOW, max_size=60)


def as_tokens(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


@settings(deadline=None)
@given(numbers=token_lists)
def test_windows_are_equal_exactly_where_their_tokens_are(numbers: list[int]) -> None:
    windows = HASH.windows(as_tokens(numbers)).tolist()
    assert len(windows) == len(numbers) - WINDOW + 1
    texts = [tuple(numbers[at : at + WINDOW]) for at in range(len(windows))]
    assert len(set(zip(windows, texts, strict=True))) == len(set(windows)) == len(set(texts))


@settings(deadline=None)
@given(numbers=token_lists, before=st.lists(st.integers(0, 9), max_size=40))
def test_what_stands_around_a_window_does_not_matter(numbers: list[int], before: list[int]) -> None:
    alone = HASH.windows(as_tokens(numbers))
    moved = HASH.windows(as_tokens([*before, *numbers, 7, 7]))
    assert np.array_equal(alone, moved[len(before) : len(before) + len(alone)])


@pytest.mark.parametrize("size", [0, 1, WINDOW - 1])
def test_a_short_prompt_has_no_window(size: int) -> None:
    assert len(HASH.windows(random_tokens(1, size))) == 0
    assert len(sample_offsets(HASH.windows(random_tokens(1, size)))) == 0


def test_swapped_tokens_do_not_collide() -> None:
    # A sum of powers collides for this sequence and its complement, whatever the base.
    thue_morse = np.array([number.bit_count() % 2 for number in range(WINDOW)])
    tokens = np.arange(2_000)[:, None]
    both = [np.where(thue_morse == side, tokens, tokens + 1) for side in (0, 1)]
    windows = [HASH.windows(row)[0] for rows in both for row in rows]
    assert len(set(windows)) == len(windows)


def test_seeds_and_salts_keep_fingerprints_apart() -> None:
    tokens = random_tokens(1, 3_000)
    made = [
        np.asarray(hashes.salted(hashes.windows(tokens), hashes.salt(*parts)))
        for hashes in (HASH, WindowHash(1235))
        for parts in ((b"a",), (b"b",), (b"a", b"b"), (b"ab",))
    ]
    assert len(np.unique(np.concatenate(made))) == 8 * (3_000 - WINDOW + 1)
    again = WindowHash(1234)
    assert np.array_equal(again.salted(again.windows(tokens), again.salt(b"a")), made[0])


def test_all_bits_are_uniform_and_none_is_zero() -> None:
    tokens = np.arange(50_000, dtype=np.int32) % 5_000  # neighbours that are hard to tell apart
    fingerprints = np.unique(HASH.salted(HASH.windows(tokens), HASH.salt(b"x")))
    assert len(fingerprints) == 5_000
    assert fingerprints[0] > 0
    for bit in range(64):
        share = np.mean(fingerprints >> np.uint64(bit) & np.uint64(1))
        assert abs(share - 0.5) < 0.04, bit  # five standard deviations


def test_a_fingerprint_of_zero_becomes_another() -> None:
    salt = HASH.salt(b"x")
    assert HASH.salted(np.array([salt], np.uint64), salt).tolist() == [1]


@settings(deadline=None)
@given(numbers=st.lists(st.integers(0, 20), max_size=80))
def test_the_sample_holds_the_strict_minima(numbers: list[int]) -> None:
    expected = []
    for at, number in enumerate(numbers):
        around = numbers[max(0, at - RADIUS) : at] + numbers[at + 1 : at + 1 + RADIUS]
        if all(number < other for other in around):
            expected.append(at)
    assert sample_offsets(np.array(numbers, np.uint64)).tolist() == expected


def test_about_one_in_seventeen_is_sampled() -> None:
    windows = HASH.windows(random_tokens(3, 50_000))
    assert 16.0 < len(windows) / len(sample_offsets(windows)) < 18.0


def test_fingerprints_of_a_long_prompt_are_fast() -> None:
    tokens = random_tokens(1, 8_150)
    salt = HASH.salt(b"x")
    taken = milliseconds(lambda: sample_offsets(HASH.salted(HASH.windows(tokens), salt)))
    assert taken < 0.5 * slowness()

"""KL of the first token against figures worked out by hand, and the bucket for the rest."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.commands.evaluation.distributions import FirstToken, kl_divergence


def first_token(probabilities: list[float]) -> FirstToken:
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array(probabilities, dtype=np.float64))
    return FirstToken(0, tuple(range(len(probabilities))), logprobs)


def test_kl_over_the_whole_vocabulary() -> None:
    full, blended = first_token([0.5, 0.25, 0.25]), first_token([0.25, 0.25, 0.5])
    # 0.5 ln 2 + 0 - 0.25 ln 2
    assert kl_divergence(full, blended, 3) == pytest.approx(0.25 * math.log(2))
    assert kl_divergence(full, full, 3) == 0.0


def test_what_is_not_known_is_one_bucket() -> None:
    full, blended = first_token([0.5, 0.3]), first_token([0.4, 0.2])
    # the rest has 0.2 against 0.4
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.4)
    assert kl_divergence(full, blended, 50_000) == pytest.approx(expected)


def test_a_token_that_blending_rules_out_costs_much_but_stays_finite() -> None:
    ruled_out = kl_divergence(first_token([0.5, 0.5]), first_token([1.0, 0.0]), 2)
    assert 100 < ruled_out < math.inf


def test_a_token_that_full_prefill_rules_out_costs_nothing() -> None:
    kl = kl_divergence(first_token([1.0, 0.0]), first_token([0.5, 0.5]), 2)
    assert kl == pytest.approx(math.log(2))


def test_rounding_to_float32_is_no_divergence() -> None:
    logits = np.random.default_rng(0).normal(size=1000) * 4
    exact = logits - np.log(np.exp(logits).sum())
    rounded = exact.astype(np.float32).astype(np.float64)
    ids = tuple(range(1000))
    for vocab_size in (1000, 128_000):
        kl = kl_divergence(FirstToken(0, ids, exact), FirstToken(0, ids, rounded), vocab_size)
        assert kl < 1e-9


distribution = st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6).map(
    lambda weights: [weight / sum(weights) for weight in weights]
)


@given(p=distribution, q=distribution, known=st.integers(1, 5))
def test_the_bucket_never_raises_kl_and_kl_is_never_negative(
    p: list[float], q: list[float], known: int
) -> None:
    whole = kl_divergence(first_token(p), first_token(q), 6)
    part = kl_divergence(first_token(p[:known]), first_token(q[:known]), 6)
    assert 0.0 <= part <= whole + 1e-9


def test_different_tokens_cannot_be_compared() -> None:
    swapped = FirstToken(0, (1, 0), np.log([0.5, 0.5]))
    with pytest.raises(ValueError, match="same tokens in the same order"):
        kl_divergence(first_token([0.5, 0.5]), swapped, 2)

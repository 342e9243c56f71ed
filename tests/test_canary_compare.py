"""The canary's comparison: how far two rows of logits are apart."""

import math
from typing import Any

import pytest
import torch
from canary_traffic import kl
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.scheduler.canary import compare

logits_rows = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40)


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - top - total for x in logits]


@given(logits_rows, st.randoms())
def test_kl_is_that_of_the_softmax(full: list[float], draw: Any) -> None:
    blended = [draw.uniform(-30, 30) for _ in full]

    got = compare(torch.tensor(full), torch.tensor(blended))

    want = kl(log_softmax(full), log_softmax(torch.tensor(blended).tolist()))
    assert got.kl == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert got.kl >= 0


@given(logits_rows, st.floats(-5, 5))
def test_logits_that_differ_by_a_constant_are_equal(full: list[float], shift: float) -> None:
    row = torch.tensor(full, dtype=torch.float64)
    got = compare(row, row + shift)
    assert got.kl == pytest.approx(0, abs=1e-12)


def test_a_row_agrees_with_itself_to_the_last_digit() -> None:
    row = torch.randn(1000)
    got = compare(row, row.clone())
    assert (got.kl, got.agrees) == (0.0, True)


def test_agreement_is_about_the_likeliest_token() -> None:
    full = torch.tensor([0.0, 3.0, 1.0])
    assert compare(full, torch.tensor([2.9, 3.0, 0.0])).agrees
    assert not compare(full, torch.tensor([3.1, 3.0, 0.0])).agrees


def test_tokens_that_both_exclude_do_not_count() -> None:
    full = torch.tensor([1.0, -math.inf, 2.0])
    assert compare(full, full.clone()).kl == 0


def test_a_token_that_only_blending_excludes_is_infinitely_far() -> None:
    full = torch.tensor([1.0, 1.0, 2.0])
    assert compare(full, torch.tensor([1.0, -math.inf, 2.0])).kl == math.inf


def test_logits_that_are_no_numbers_are_infinitely_far() -> None:
    full = torch.tensor([1.0, 1.0])
    assert compare(full, torch.tensor([1.0, math.nan])).kl == math.inf

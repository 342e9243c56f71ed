"""From answers to a row: shares, breakdowns and differences worked out by hand."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from sgl_blend.commands.evaluation.distributions import FirstToken
from sgl_blend.commands.evaluation.items import Item
from sgl_blend.commands.evaluation.runner import Answer
from sgl_blend.commands.evaluation.scores import (
    FULL,
    Score,
    Variant,
    layer_rows_share,
    make_row,
    recomputed_share,
    score_answer,
)

HKVD = Variant("hkvd", 0.15, 2, "first")


def report(**changed: Any) -> dict[str, Any]:
    """A request of 100 tokens and 4 layers: 20 exact, 60 reused, 15 recomputed, 5 computed."""
    counts = {"prompt": 100, "prefix": 20, "reused": 60, "recomputed": 15, "computed": 5}
    tokens = {f"{kind}_tokens": count for kind, count in counts.items()}
    return {**tokens, "layer_rows": 80 + 80 + 20 + 20, "fallback": None, **changed}


def item(kind: str | None = None) -> Item:
    return Item(chunks=("a",), question="?", answers=("black sea",), kind=kind)


def score(right: float, kl: float = 0.0, **changed: Any) -> Score:
    return Score(right, right, right, kl, right, report(**changed))


def answer(text: str, chosen: int, probabilities: list[float]) -> Answer:
    return Answer(text, FirstToken(chosen, (0, 1), np.log(probabilities)), report())


def test_an_answer_is_scored_against_what_is_right_and_against_full_prefill() -> None:
    full = answer("Black Sea", 0, [0.75, 0.25])

    scored = score_answer(item(), answer("the sea", 1, [0.25, 0.75]), full, 2)

    assert (scored.right, scored.agrees) == (0.0, 0.0)
    assert scored.f1 == pytest.approx(2 / 3)
    assert scored.rouge_l == pytest.approx(0.5)
    assert scored.kl == pytest.approx(0.5 * np.log(3))
    same = score_answer(item(), full, full, 2)
    assert (same.right, same.f1, same.rouge_l, same.kl, same.agrees) == (1.0, 1.0, 1.0, 0.0, 1.0)


def test_an_answer_that_nobody_judges_needs_no_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("sgl_blend.commands.evaluation.scores.rouge_l")
    full, other = answer("", 0, [0.75, 0.25]), answer("", 1, [0.25, 0.75])

    scored = score_answer(item(), other, full, 2, judge=False)
    row = make_row(HKVD, [item()], [scored], [scored], num_layers=4, seed=0)

    assert math.isnan(row.accuracy)
    assert math.isnan(row.f1)
    assert math.isnan(row.rouge_l)
    assert row.kl == pytest.approx(0.5 * np.log(3))
    assert msgspec.json.decode(msgspec.json.encode(row))["accuracy"] is None


def test_shares_count_tokens_and_layers_over_all_requests() -> None:
    other = report(prompt_tokens=50, prefix_tokens=40, reused_tokens=0, recomputed_tokens=5)
    reports = [report(), {**other, "layer_rows": 40}]

    assert recomputed_share(reports) == pytest.approx(20 / 80)
    assert layer_rows_share(reports, 4) == pytest.approx((200 + 40) / ((80 + 10) * 4))


def test_shares_of_nothing_are_not_there() -> None:
    nothing = [report(prefix_tokens=100, reused_tokens=0, recomputed_tokens=0, layer_rows=0)]
    assert recomputed_share(nothing) is None
    assert layer_rows_share(nothing, 4) is None


def test_a_row_holds_means_and_sums() -> None:
    items = [item("ref"), item("ref"), item("direct"), item()]
    full = [score(1.0), score(1.0), score(0.0), score(1.0)]
    scores = [score(1.0, 0.0), score(0.0, 2.0), score(1.0, 0.0), score(1.0, 2.0)]

    row = make_row(HKVD, items, scores, full, num_layers=4, seed=0)

    assert (row.policy, row.ratio, row.check_layer, row.build_prefix) == ("hkvd", 0.15, 2, "first")
    assert (row.n, row.accuracy, row.f1, row.rouge_l, row.top1, row.kl) == (4, *[0.75] * 4, 1.0)
    assert row.ci95[0] < 0.75 < row.ci95[1]
    assert row.by_kind == {"direct": 1.0, "ref": 0.5}
    assert row.tokens["recomputed"] == 60
    assert row.recomputed_share == pytest.approx(15 / 75)
    assert row.layer_rows_share == pytest.approx(200 / 320)
    assert row.fallbacks == 0


def test_the_difference_to_full_prefill_is_paired() -> None:
    items = [item() for _ in range(40)]
    half = [score(float(number % 2)) for number in range(40)]

    row = make_row(HKVD, items, half, half, num_layers=4, seed=0)

    assert row.ci95[1] - row.ci95[0] > 0.2
    assert row.accuracy_diff_ci95 == (0.0, 0.0)


def test_full_prefill_costs_all() -> None:
    disabled = [score(1.0, fallback="disabled", reused_tokens=0, recomputed_tokens=0)]
    row = make_row(FULL, [item()], disabled, disabled, num_layers=4, seed=0)
    assert (row.policy, row.ratio, row.check_layer, row.build_prefix) == ("full", 1.0, None, None)
    assert (row.recomputed_share, row.layer_rows_share, row.fallbacks) == (1.0, 1.0, 0)


def test_fallbacks_are_counted_by_reason_and_left_out_where_there_are_none() -> None:
    items = [item()] * 3
    full = [score(1.0)] * 3
    scores = [score(1.0), score(1.0, fallback="no_chunks"), score(1.0)]

    row = make_row(HKVD, items, scores, full, num_layers=4, seed=0)
    clean = make_row(HKVD, items, full, full, num_layers=4, seed=0)

    assert (row.fallbacks, row.fallback_reasons) == (1, {"no_chunks": 1})
    written = msgspec.to_builtins(clean)
    assert written["fallbacks"] == 0
    assert "fallback_reasons" not in written
    assert "by_kind" not in written

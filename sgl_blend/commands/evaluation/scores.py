"""From answers to one row of the table."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_blend.commands.common.bootstrap import Interval, mean_interval
from sgl_blend.commands.evaluation.answers import exact_match, rouge_l, token_f1
from sgl_blend.commands.evaluation.distributions import kl_divergence
from sgl_blend.commands.evaluation.items import Item
from sgl_blend.commands.evaluation.runner import Answer

TOKEN_KINDS = ("prompt", "prefix", "reused", "recomputed", "computed")
"""Token counts of a request's report; the last four add up to the first."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to answer; full prefill has no check layer and no build prefix."""

    policy: str
    ratio: float
    check_layer: int | None
    build_prefix: str | None


FULL = Variant("full", 1.0, None, None)
"""Full prefill, the reference."""


@dataclass(frozen=True, slots=True)
class Score:
    """How one item was answered; what is right is NaN if the answer was not judged.

    Attributes:
        right: 1 if the answer is right, else 0.
        f1: Token F1.
        rouge_l: F-measure of Rouge-L.
        kl: KL(full || this) of the first token, nats.
        agrees: 1 if the first token is the one after a full prefill, else 0.
        report: The request's report.
    """

    right: float
    f1: float
    rouge_l: float
    kl: float
    agrees: float
    report: dict[str, Any]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to answer all items.

    Intervals hold with 95 %. Shares are of the tokens after the exact prefix: recomputed_share of
    the reused tokens, layer_rows_share of all (token, layer) pairs a full prefill would compute.
    """

    policy: str
    ratio: float
    check_layer: int | None
    build_prefix: str | None
    n: int
    accuracy: float
    ci95: Interval
    accuracy_diff_ci95: Interval
    """Of the accuracy minus that of full prefill, item by item."""
    f1: float
    f1_ci95: Interval
    rouge_l: float
    kl: float
    kl_ci95: Interval
    top1: float
    recomputed_share: float | None
    layer_rows_share: float | None
    tokens: dict[str, int]
    """Sums over all requests, by what became of the tokens."""
    fallbacks: int
    """Requests that were prefilled in full instead."""
    fallback_reasons: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    by_kind: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """Accuracy by the items' kind."""


def score_answer(
    item: Item, answer: Answer, full: Answer, vocab_size: int, *, judge: bool = True
) -> Score:
    """Score one answer against full prefill and, if it is to be judged, against what is right."""
    return Score(
        right=exact_match(answer.text, item.answers) if judge else math.nan,
        f1=token_f1(answer.text, item.answers) if judge else math.nan,
        rouge_l=rouge_l(answer.text, item.answers) if judge else math.nan,
        kl=kl_divergence(full.first, answer.first, vocab_size),
        agrees=float(answer.first.chosen == full.first.chosen),
        report=answer.report,
    )


def make_row(
    variant: Variant,
    items: Sequence[Item],
    scores: Sequence[Score],
    full: Sequence[Score],
    *,
    num_layers: int,
    seed: int,
) -> Row:
    """Sum up how all items were answered.

    Args:
        variant: How.
        items: At least one.
        scores: Of the same items, in the same order.
        full: Of full prefill, likewise.
        num_layers: Layers of the model.
        seed: Of the bootstrap.
    """
    right = [score.right for score in scores]
    differences = [score.right - base.right for score, base in zip(scores, full, strict=True)]
    f1 = [score.f1 for score in scores]
    kl = [score.kl for score in scores]
    reports = [score.report for score in scores]
    reasons = Counter(report["fallback"] for report in reports) if variant != FULL else Counter()
    del reasons[None]
    return Row(
        policy=variant.policy,
        ratio=variant.ratio,
        check_layer=variant.check_layer,
        build_prefix=variant.build_prefix,
        n=len(scores),
        accuracy=_mean(right),
        ci95=mean_interval(right, seed),
        accuracy_diff_ci95=mean_interval(differences, seed),
        f1=_mean(f1),
        f1_ci95=mean_interval(f1, seed),
        rouge_l=_mean([score.rouge_l for score in scores]),
        kl=_mean(kl),
        kl_ci95=mean_interval(kl, seed),
        top1=_mean([score.agrees for score in scores]),
        recomputed_share=1.0 if variant == FULL else recomputed_share(reports),
        layer_rows_share=1.0 if variant == FULL else layer_rows_share(reports, num_layers),
        tokens={
            kind: sum(int(report[f"{kind}_tokens"]) for report in reports) for kind in TOKEN_KINDS
        },
        fallbacks=reasons.total(),
        fallback_reasons=dict(reasons) or msgspec.UNSET,
        by_kind=_accuracy_by_kind(items, right) or msgspec.UNSET,
    )


def recomputed_share(reports: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of the chunk tokens that was recomputed; None where none was reused."""
    recomputed = sum(int(report["recomputed_tokens"]) for report in reports)
    reused = sum(int(report["reused_tokens"]) for report in reports)
    return recomputed / (reused + recomputed) if reused + recomputed else None


def layer_rows_share(reports: Sequence[dict[str, Any]], num_layers: int) -> float | None:
    """Return the share of the (token, layer) pairs after the prefix that was computed.

    A full prefill computes all of them. None where there are none.
    """
    computed = sum(int(report["layer_rows"]) for report in reports)
    num_after = sum(
        int(report["prompt_tokens"]) - int(report["prefix_tokens"]) for report in reports
    )
    return computed / (num_after * num_layers) if num_after else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _accuracy_by_kind(items: Sequence[Item], right: Sequence[float]) -> dict[str, float]:
    by_kind: dict[str, list[float]] = {}
    for item, value in zip(items, right, strict=True):
        if item.kind is not None:
            by_kind.setdefault(item.kind, []).append(value)
    return {kind: _mean(values) for kind, values in sorted(by_kind.items())}

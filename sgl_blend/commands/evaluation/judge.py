"""What prompts can show about a setting: bounds with 95 %, on prompts it was not chosen by.

A setting passes if the upper end of its mean KL is at most ``max_kl`` and the lower end of its share
of agreeing first tokens at least ``min_top1``. The KL is bounded by the bootstrap's two-sided
interval, which is a little too narrow for skewed figures and cannot know of what it has not seen. The
agreement is bounded exactly, and covers that: a setting that goes wrong in one prompt of thirty fails
it with 95 %, however small the KL of the others.

Prompts can tell good settings from bad ones only if they refuse plain reuse, which recomputes nothing:
with 95 % its mean KL is above ``max_kl`` or its agreement below ``min_top1``. On prompts that plain
reuse may pass as well, passing means nothing.

A cheapest setting looks better on the prompts it was picked from than it is. So a first part of the
prompts only brings the settings into an order, the most faithful one first, and the second part tests
them in that order up to the first that fails. However many are tested, the chance that a bad one
passes stays at 5 %: for one to pass, the first bad one in the order has to (fixed-sequence testing;
Angelopoulos et al., "Learn then Test", 2021). Of those that pass the cheapest is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from sgl_blend.commands.common.bootstrap import Interval, share_bounds
from sgl_blend.commands.evaluation.scores import Row
from sgl_blend.errors import CommandError
from sgl_blend.policies import POLICIES
from sgl_blend.policies.spec import Policy
from sgl_blend.settings.config import BlendConfig

LEAST_TO_CONFIRM = 64
LEAST_TO_ORDER = 32
_ORDER_SHARE = 4
"""One prompt in so many brings settings into an order; the others confirm."""
_MANY = 10_000
"""No one is told to give more prompts than this."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a setting may lose.

    Attributes:
        max_kl: Mean KL from full prefill, in nats.
        min_top1: Share of prompts with the first token of full prefill, in (0, 1).
    """

    max_kl: float
    min_top1: float

    def check(self) -> None:
        """Refuse bounds that mean nothing.

        Raises:
            CommandError: One is out of range.
        """
        if not self.max_kl > 0:
            raise CommandError(f"max_kl must be above 0, got {self.max_kl}")
        if not 0 < self.min_top1 < 1:
            raise CommandError(f"min_top1 must be above 0 and below 1, got {self.min_top1}")

    @property
    def num_to_confirm(self) -> int:
        """Return how many prompts can confirm a setting at all: if every first token agrees."""
        return max(LEAST_TO_CONFIRM, self._prompts_for(1.0))

    @property
    def num_prompts(self) -> int:
        """Return how many prompts are needed at least, those that order included."""
        return self.num_to_confirm + LEAST_TO_ORDER

    def hold_for(self, row: Row) -> bool:
        """Tell whether a setting is shown to stay within."""
        return row.kl_ci95[1] <= self.max_kl and top1_bounds(row)[0] >= self.min_top1

    def seem_to_hold_for(self, row: Row) -> bool:
        """Tell whether the best guess stays within."""
        return row.kl <= self.max_kl and row.top1 >= self.min_top1

    def fail_for(self, row: Row) -> bool:
        """Tell whether a setting is shown not to stay within."""
        return row.kl_ci95[0] > self.max_kl or top1_bounds(row)[1] < self.min_top1

    def prompts_to_decide(self, row: Row) -> int | None:
        """Return how many prompts would show that a setting stays within, if it goes on as it did.

        None if no number would.
        """
        if not (row.kl < self.max_kl and row.top1 > self.min_top1):
            return None
        spread = (row.kl_ci95[1] - row.kl) / (self.max_kl - row.kl)
        for_kl = math.ceil(row.n * spread**2)  # an interval shrinks with the root of the count
        num_confirm = max(for_kl, self._prompts_for(row.top1), self.num_to_confirm)
        if num_confirm > _MANY:
            return None
        return max(num_confirm + LEAST_TO_ORDER, num_confirm * _ORDER_SHARE // (_ORDER_SHARE - 1))

    def _prompts_for(self, top1: float) -> int:
        """Return how many prompts show min_top1 if the share top1 of them agrees."""
        low, high = 0, 1
        while high <= _MANY and not self._is_shown(top1, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_shown(top1, middle) else (middle, high)
        return high

    def _is_shown(self, top1: float, total: int) -> bool:
        return share_bounds(math.floor(top1 * total), total)[0] >= self.min_top1


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the prompts say; exactly one of the three is set.

    Attributes:
        chosen: The setting to serve with, as the confirming prompts saw it.
        refusal: Why the model must not be blended.
        not_judged: Why nothing can be said.
    """

    chosen: Row | None = None
    refusal: str | None = None
    not_judged: str | None = None


def top1_bounds(row: Row) -> Interval:
    """Return the ends of a row's share of agreeing first tokens."""
    return share_bounds(round(row.top1 * row.n), row.n)


def split(num_prompts: int) -> int:
    """Return how many of the prompts, the first ones, bring settings into an order."""
    return max(LEAST_TO_ORDER, num_prompts // _ORDER_SHARE)


def is_no_weaker(row: Row, default: Row) -> bool:
    """Tell whether a setting is the server's default or one like it that computes more."""
    costs = row.layer_rows_share, default.layer_rows_share
    policy, known = POLICIES[row.policy], POLICIES[default.policy]
    return row == default or (
        (policy.sees, policy.score) == (known.sees, known.score)
        and _early_share(policy) >= _early_share(known)
        and (row.check_layer or 0) >= (default.check_layer or 0)
        and row.ratio >= default.ratio
        and None not in costs
        and (costs[0] or 0.0) >= (costs[1] or 0.0)
    )


def _early_share(policy: Policy) -> float:
    """Return the share of reused tokens that pass the full layers at least."""
    return 1.0 if policy.early_share is None else policy.early_share


def is_default(row: Row) -> bool:
    """Tell whether a row is of the server's default setting."""
    defaults = BlendConfig()
    return (row.policy, row.ratio, row.check_layer) == (
        defaults.blend_policy,
        defaults.blend_recompute_ratio,
        defaults.blend_check_layer,
    )


def cannot_tell(plain: Row, bounds: Bounds) -> str | None:
    """Return why prompts cannot tell good settings from bad ones, or None.

    Args:
        plain: Plain reuse on these prompts.
        bounds: What a setting may lose.
    """
    if bounds.fail_for(plain):
        return None
    low, high = plain.kl_ci95
    return (
        f"on these prompts chunks reused as they are come too near to full prefill (KL {plain.kl:.2g} "
        f"[{low:.2g}, {high:.2g}], same first token {plain.top1:.0%}) to tell good settings from bad"
    )


def choose(first: Sequence[Row], second: Sequence[Row], bounds: Bounds) -> Judgement:
    """Choose the cheapest setting that the second part of the prompts confirms.

    Args:
        first: Settings on the prompts that bring them into an order, at least one.
        second: The same settings, in the same order, on the prompts that confirm.
        bounds: What a setting may lose.
    """
    pairs = sorted(
        zip(first, second, strict=True),
        # Far below the bound, differences are noise; there the setting that computes more goes first.
        key=lambda pair: (
            -min(pair[0].top1, bounds.min_top1),
            max(pair[0].kl, bounds.max_kl / 10),
            -(pair[0].layer_rows_share or 0.0),
        ),
    )
    order = [row for _, row in pairs]
    passed = list(takewhile(bounds.hold_for, order))
    if passed:
        return Judgement(chosen=min(passed, key=lambda row: (row.layer_rows_share or 0.0, row.kl)))
    best = order[0]
    needed = bounds.prompts_to_decide(best) if bounds.seem_to_hold_for(best) else None
    told = (
        f"{describe(best)}: KL {best.kl:.2g} up to {best.kl_ci95[1]:.2g}, same first token "
        f"{best.top1:.1%} down to {top1_bounds(best)[0]:.1%}"
    )
    if needed is not None:
        return Judgement(
            not_judged=f"{best.n} prompts cannot confirm {told}; give about {needed} with --data"
        )
    return Judgement(
        refusal=f"no setting is shown to come within {bounds.max_kl:g} nats and "
        f"{bounds.min_top1:.0%} same first token of full prefill, the nearest is {told}; this model "
        "must not be blended"
    )


def describe(row: Row) -> str:
    """Name a setting."""
    return f"{row.policy} {row.ratio:g} at check layer {row.check_layer}"

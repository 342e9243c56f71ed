"""The compute budget of a prefill batch: charged by the rows that enter the first layer.

SGLang charges a batch by tokens, because each token is a row in every layer. A blended request drops
rows before the first layer, where an exact prefix or what is remembered allows it. These rows cost
next to nothing, and they take no memory in any layer. So a batch may take more tokens, inside one
request too, as long as no layer sees more rows than ``--chunked-prefill-size`` promises. Rows that are
dropped above the check layer count in full, since they pass the layers below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_blend.engine.admission import change_budget, close_batch, holds_cut, rows_left
from sgl_blend.engine.objects import PrefillAdder
from sgl_blend.fusion.plan import BlendPlan, StepPlan


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a request may take beyond the budget of its batch while SGLang admits it.

    Attributes:
        holds_all: Whether the budget holds the rest of the prompt in one step.
    """

    holds_all: bool
    _adder: PrefillAdder
    _granted: int

    @classmethod
    def grant(cls, adder: PrefillAdder, plan: BlendPlan, start: int, stop: int) -> Allowance:
        """Let a step from start take as many tokens, up to stop, as the budget has rows for."""
        left = 0 if holds_cut(adder) else rows_left(adder)
        reach = plan.reach(start, stop, left) if left else start
        granted = max(0, reach - start - left)
        change_budget(adder, granted)
        return cls(reach >= stop, adder, granted)

    def withdraw(self) -> None:
        """Take back what was granted, because the request was not admitted."""
        change_budget(self._adder, -self._granted)

    def settle(self, step: StepPlan | None, num_tokens: int, *, is_cut: bool) -> None:
        """Charge the rows of the step that was admitted in place of its tokens.

        Args:
            step: What the step reuses; None if nothing.
            num_tokens: Tokens of the step, as SGLang charged them.
            is_cut: Whether the request needs a further step.
        """
        entering = num_tokens if step is None else step.num_entering
        change_budget(self._adder, num_tokens - entering - self._granted)
        if is_cut:
            close_batch(self._adder)

"""The policy that knows the answer: how good could a choice of tokens be at best?"""

from sgl_blend.policies.deviation import v_deviation
from sgl_blend.policies.spec import Policy, Sees, by_score

POLICIES = {
    "oracle": Policy(
        "the largest deviation of V from a full prefill, over all layers above the check layer",
        by_score,
        Sees.PREFILL,
        v_deviation,
        evaluation_only=True,
    ),
}

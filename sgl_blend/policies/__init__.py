"""Selection policies: which reused tokens are recomputed, and in how many layers.

Every module of this package but ``spec`` names its policies in a dict ``POLICIES``; they are found by
themselves. ``exact-NAME`` is made for each: it selects as NAME does, but the rows it drops keep their
true KV, so the answer must be that of a full prefill. ``moved-hkvd`` moves that KV's keys away and back
before, so its answer shows what moving costs. These are for evaluations.
"""

import pkgutil
from dataclasses import replace
from importlib import import_module

from sgl_blend.policies.spec import Policy, budget_of, early_of, schedule_of

EXACT = "exact-"
MOVED = "moved-hkvd"


def _find_policies() -> dict[str, Policy]:
    found: dict[str, Policy] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        if module == "spec":
            continue
        policies = import_module(f"{__name__}.{module}").POLICIES
        twice = found.keys() & policies.keys()
        assert not twice, f"{sorted(twice)} are policies of two modules"
        found |= policies
    return found


POLICIES = _find_policies()
NAMED = tuple(POLICIES)
"""What users choose among; the exact ones and the moved one below are for tests of the engine."""
POLICIES.update(
    {
        EXACT + name: replace(policy, evaluation_only=True, true_kv=True)
        for name, policy in POLICIES.items()
        if not policy.evaluation_only and policy.fixed_ratio != 1.0
    }
)
POLICIES[MOVED] = replace(POLICIES["hkvd"], evaluation_only=True, true_kv=True, turned=True)


def recompute_budget(policy: str, ratio: float, num_reused: int) -> int:
    """Return how many of num_reused tokens the policy of this name recomputes."""
    return budget_of(POLICIES[policy], ratio, num_reused)


def early_rows(policy: str, ratio: float, num_remembered: int) -> int:
    """Return how many of the tokens with a memory pass the layers up to the check layer."""
    return early_of(POLICIES[policy], ratio, num_remembered)


def keep_schedule(policy: str, ratio: float, num_reused: int, num_layers: int) -> list[int]:
    """Return how many tokens the policy of this name computes in each layer above the check layer."""
    return schedule_of(POLICIES[policy], ratio, num_reused, num_layers)

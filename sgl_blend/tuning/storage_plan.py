"""Which tier to keep chunks in: the cheapest one whose loads hide behind what is recomputed anyway.

CacheBlend (arXiv 2405.16444 §5.1), for N reused tokens of a request and the ratio r* that answers need:

    T_load      = chunks x latency + KV bytes per token x N x loads at once / bandwidth
    T_recompute = r* x N / prefill speed

A tier with T_load <= T_recompute adds no delay. Among those the cheapest holds the library. The
formulas take a whole request, so they know no difference between layers: the layers up to the check
layer, which compute more rows, are spare time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for KV.

    Attributes:
        name: For people.
        bytes_per_s: One load that is alone.
        latency_s: Before the first byte of a chunk; chunks are loaded one after the other.
        usd_per_gb_month: Price of 1e9 bytes, or None if it is not known.
        capacity_bytes: Of one copy of the tier, or None if it is not limited.
        servers: How many servers share one copy of the tier; 1 if each has its own.
        loads_at_once: How many of those load at the same time, and share the bandwidth; None: all.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    usd_per_gb_month: float | None = None
    capacity_bytes: float | None = None
    servers: int = 1
    loads_at_once: float | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What the tier is for.

    Attributes:
        kv_bytes_per_token: Of all layers, keys and values.
        library_tokens: Tokens of all chunks that are to be kept.
        request_tokens: N, reused tokens of a typical request.
        request_chunks: Into how many chunks they fall.
        ratio: r*, share of them that is recomputed, in [0, 1].
        prefill_tokens_per_s: Speed of a full prefill.
        servers: Size of the fleet; each serves the same library.
    """

    kv_bytes_per_token: int
    library_tokens: int
    request_tokens: int
    request_chunks: int
    ratio: float
    prefill_tokens_per_s: float
    servers: int = 1

    @property
    def library_bytes(self) -> int:
        """Bytes of one copy of the library."""
        return self.library_tokens * self.kv_bytes_per_token

    @property
    def request_bytes(self) -> int:
        """Bytes that one request loads."""
        return self.request_tokens * self.kv_bytes_per_token

    @property
    def recompute_s(self) -> float:
        """T_recompute: seconds that a load may take without being noticed."""
        return self.ratio * self.request_tokens / self.prefill_tokens_per_s


class Verdict(StrEnum):
    """What speaks against a tier."""

    NO_DELAY = "adds no delay"
    TOO_SMALL = "too small"
    TOO_SLOW = "too slow"


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier, judged.

    Attributes:
        tier: Which one.
        copies: How many copies of the tier the fleet needs.
        stored_bytes: Of the library in all copies.
        usd_per_month: For the fleet, or None.
        load_s: T_load.
        needed_bytes_per_s: Bandwidth of the tier at which it would add no delay; None if its latency
            alone takes too long.
        verdict: What is wrong with it; too slow counts before too small.
    """

    tier: Tier
    copies: int
    stored_bytes: int
    usd_per_month: float | None
    load_s: float
    needed_bytes_per_s: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """All tiers, the fastest first.

    Attributes:
        tiers: Judged.
        chosen: The cheapest that adds no delay, or None. Where no price is known, the slowest that
            adds none, because slower places are the cheaper ones.
        nearest: The tier that comes nearest, if none is chosen.
    """

    tiers: tuple[TierPlan, ...]
    chosen: TierPlan | None
    nearest: TierPlan | None


def plan_storage(demand: Demand, tiers: Sequence[Tier]) -> StoragePlan:
    """Judge tiers and choose one.

    Args:
        demand: Positive throughout; the ratio may be 0, which hides nothing.
        tiers: At least one.
    """
    judged = sorted((_judge(demand, tier) for tier in tiers), key=lambda plan: plan.load_s)
    suitable = [plan for plan in judged if plan.verdict is Verdict.NO_DELAY]
    chosen = min(suitable, key=_price, default=None)
    nearest = None if chosen else min(judged, key=_distance)
    return StoragePlan(tuple(judged), chosen, nearest)


def _judge(demand: Demand, tier: Tier) -> TierPlan:
    sharing = min(tier.servers, demand.servers)
    at_once = sharing if tier.loads_at_once is None else min(tier.loads_at_once, sharing)
    copies = math.ceil(demand.servers / tier.servers)
    waiting_s = demand.request_chunks * tier.latency_s
    load_s = waiting_s + demand.request_bytes * at_once / tier.bytes_per_s
    spare_s = demand.recompute_s - waiting_s
    stored = copies * demand.library_bytes
    verdict = Verdict.NO_DELAY
    if load_s > demand.recompute_s:
        verdict = Verdict.TOO_SLOW
    elif tier.capacity_bytes is not None and demand.library_bytes > tier.capacity_bytes:
        verdict = Verdict.TOO_SMALL
    price = tier.usd_per_gb_month
    return TierPlan(
        tier=tier,
        copies=copies,
        stored_bytes=stored,
        usd_per_month=None if price is None else stored / 1e9 * price,
        load_s=load_s,
        needed_bytes_per_s=demand.request_bytes * at_once / spare_s if spare_s > 0 else None,
        verdict=verdict,
    )


def _price(plan: TierPlan) -> tuple[float, float]:
    """Order by price, then the slower first."""
    price = plan.usd_per_month
    return (math.inf if price is None else price), -plan.load_s


def _distance(plan: TierPlan) -> tuple[bool, float]:
    """Order what does not suit: what is only too small first, then by how long it loads."""
    if plan.verdict is Verdict.TOO_SMALL:
        assert plan.tier.capacity_bytes is not None
        return False, -plan.tier.capacity_bytes
    return True, plan.load_s

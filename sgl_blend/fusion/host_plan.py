"""What the host knows of a blended forward before it runs, and the one upload of it.

How many rows leave the batch, and where, follows from ratios and lengths, never from data. So every
count of the forward is known before its first layer, after each selection too. Whatever of it the
device must know goes there in one copy, and the forward takes views of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_blend.fusion.plan import ReusedSpan
from sgl_blend.kernels.segmented_topk import Segments
from sgl_blend.kernels.upload import Staged


@dataclass(frozen=True, slots=True)
class Group:
    """The candidates of one request: rows whose KV can be reused and that are still computed.

    The candidates of a batch are numbered through, request after request.

    Attributes:
        request: Number of the request in the batch.
        policy: Name of the policy that selects.
        first: Number of its first candidate.
        count: How many candidates it has.
        chunk_lengths: Rows of each chunk, in order; they add up to count.
        schedule: How many are computed in each layer above the check layer, never rising.
        num_early: How many are computed up to the check layer.
        drops_early: Whether the others are dropped before the first layer.
        question: Rows after the last chunk, numbered as they are in the batch now.
    """

    request: int
    policy: str
    first: int
    count: int
    chunk_lengths: list[int]
    schedule: list[int]
    num_early: int
    drops_early: bool
    question: range

    @property
    def slice(self) -> slice:
        """Its candidates among those of the batch."""
        return slice(self.first, self.first + self.count)

    @property
    def selects_late(self) -> bool:
        """Whether rows that were computed up to the check layer are dropped there or above."""
        return self.schedule[-1] < self.num_early


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of each request at some place of the forward, on the host and on the device.

    Attributes:
        rows: Rows of each request.
        seq_lens: The same, int32.
        starts: Where they begin in the batch, int32.
        attention: What the attention kernel wants to know of them; None if that is nothing.
    """

    rows: list[int]
    seq_lens: Staged
    starts: Staged
    attention: Staged | None


@dataclass(frozen=True, slots=True)
class Reduction:
    """Candidates leave the batch.

    Attributes:
        groups: All groups, as they are before.
        budgets: How many candidates of each stay. All of them do, unless it selects now.
        selecting: Which groups select now.
        segments: The counts of the selection, for every request of the batch.
        bounds: The same on the device, int32 [3, requests + 1].
        after: Rows that stay.
        is_last: Whether no later layer selects.
    """

    groups: tuple[Group, ...]
    budgets: tuple[int, ...]
    selecting: tuple[bool, ...]
    segments: Segments
    bounds: Staged
    after: RowCounts
    is_last: bool


@dataclass(frozen=True, slots=True)
class LastRows:
    """Rows whose logits are wanted, taken out in the last layer.

    Attributes:
        rows: int64, as numbered in the batch then.
        after: How many there are.
    """

    rows: Staged
    after: RowCounts


@dataclass(frozen=True, slots=True)
class ExactPrefixes:
    """Rows that are not computed because exact KV is copied for them, from the step's begin on.

    Attributes:
        spans: Where their KV lies.
        total: How many rows they are.
        body_rows: int64, all other rows.
        body: How many of these each request has.
        prefix: Tokens of each request that are in the pool when the body runs.
        prefix_lens: The same, int32 on the device.
    """

    spans: tuple[ReusedSpan, ...]
    total: int
    body_rows: Staged
    body: RowCounts
    prefix: list[int]
    prefix_lens: Staged


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A blended forward as the host knows it; tensors are on the device once it is sent.

    Candidates are all rows whose KV can be reused, request after request. Numbers of rows mean the
    batch without exact prefixes, but for moved_rows.

    Attributes:
        exact: Exact prefixes; None if no request has one.
        groups: The candidates of each request that has some.
        spans: Where the stored KV of the candidates lies, in order.
        moved_rows: int64, rows of the whole batch for which KV is copied: exact prefixes, then
            candidates.
        rows: int64 [candidates], their rows.
        positions: int64 [candidates], their positions.
        stored_positions: int64 [candidates], the positions their keys were rotated for.
        priorities: float32 [candidates], for policies that choose by no layer, else 0; None if there
            is no such policy.
        places: int64 [candidates], where their memories are, 0 without one; None if no policy trusts
            any.
        unknown: float32 [candidates], NaN where nothing is remembered of a token, else 0; None if
            that matters for none.
        decided: float32 [candidates], NaN for rows that go on whatever their priority is, else 0;
            None if there are none.
        rounded: float32 [candidates], 1 for rows whose stored KV came in few bits, else 0; None if
            there are none.
        early: What leaves before the first layer; None if nothing does.
        late: By layer what leaves there.
        last: What is left for the last layer; None if it is a layer like all others.
    """

    exact: ExactPrefixes | None
    groups: tuple[Group, ...]
    spans: tuple[ReusedSpan, ...]
    moved_rows: Staged
    rows: Staged
    positions: Staged
    stored_positions: Staged
    priorities: Staged | None
    places: Staged | None
    unknown: Staged | None
    decided: Staged | None
    rounded: Staged | None
    early: Reduction | None
    late: dict[int, Reduction]
    last: LastRows | None

    @property
    def num_exact(self) -> int:
        """Rows of exact prefixes."""
        return 0 if self.exact is None else self.exact.total


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch brings, per request.

    Attributes:
        lengths: Rows.
        prefix: Tokens that are in the pool before the forward.
        kv_lengths: Tokens that are in the pool after it.
        wanted: Last rows whose logits are wanted, at least one.
    """

    lengths: list[int]
    prefix: list[int]
    kv_lengths: list[int]
    wanted: list[int]

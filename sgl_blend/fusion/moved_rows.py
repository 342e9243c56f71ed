"""Which KV a blended forward copies: from where, to where, and in which layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sgl_blend.engine.forward import row_slots
from sgl_blend.engine.objects import ForwardBatch
from sgl_blend.fusion.attention import Candidates
from sgl_blend.fusion.host_plan import Group, HostPlan
from sgl_blend.fusion.layouts.base import Copy
from sgl_blend.fusion.rotation import Rotation
from sgl_blend.policies import POLICIES


@dataclass(frozen=True, slots=True)
class MovedRows:
    """Rows of a batch for which KV is copied: exact prefixes, then candidates.

    Attributes:
        source_slots: int64 [n], where the KV lies.
        dest_slots: int64 [n], where it goes.
        num_exact: How many are of exact prefixes.
    """

    source_slots: torch.Tensor
    dest_slots: torch.Tensor
    num_exact: int

    @classmethod
    def of(cls, batch: ForwardBatch, plan: HostPlan) -> MovedRows:
        """Find them; the batch is still whole."""
        exact = () if plan.exact is None else plan.exact.spans
        rows = plan.moved_rows.tensor
        sources = [span.slots for span in (*exact, *plan.spans)]
        # A batch may drop nothing at all, at ratio 1. A single span is copied too: its owner may
        # let go of it while the forward is still queued.
        return cls(
            torch.cat(sources or [rows]), row_slots(batch).index_select(0, rows), plan.num_exact
        )

    def of_exact(self, layers: range, rotation: Rotation) -> list[Copy]:
        """Return the copies that stand for exact prefixes, which stay at their positions."""
        if not self.num_exact:
            return []
        cos, sin = rotation.none(self.num_exact)
        part = slice(self.num_exact)
        return [Copy(layers, self.source_slots[part], self.dest_slots[part], cos, sin)]

    def of_groups(
        self, groups: Iterable[Group], layers: range, candidates: Candidates | None
    ) -> list[Copy]:
        """Return the copies of all candidates of some groups, in some layers.

        Neighbours are copied together.
        """
        if candidates is None:
            return []
        runs: list[slice] = []
        for group in groups:
            if POLICIES[group.policy].true_kv:
                continue
            if runs and runs[-1].stop == group.first:
                runs[-1] = slice(runs[-1].start, group.slice.stop)
            else:
                runs.append(group.slice)
        dest_slots = self.dest_slots[-len(candidates.rows) :]
        return [
            Copy(
                layers,
                candidates.source_slots[run],
                dest_slots[run],
                candidates.cos[run],
                candidates.sin[run],
            )
            for run in runs
        ]

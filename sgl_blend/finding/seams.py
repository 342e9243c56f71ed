"""Where documents begin in text that nobody has seen: behind what other documents stood behind.

Clients render documents in one way. So what comes again often begins behind the same few tokens, such
as the end of a line with a name. A seam is two tokens. It is counted how often a run began behind each
seam, and how often the seam stood in runs at all. A seam is known where it stood before many runs, and
seldom before anything else.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_blend.finding.spans import Span
from sgl_blend.finding.tenants import Tenants

Pairs = NDArray[np.int64]

_FEWEST_STARTS = 4
_LEAST_SHARE = 25
"""At least one in so many runs begins behind a known seam."""
_LEAST_PRECISION = 20
"""And behind at least one in so many places where it stands."""
_MOST_SEAMS = 256
"""Seams of a tenant; the one that was used last stays."""
_MOST_STARTS = 2_048
"""Runs of a tenant after which all its counts are halved, so that late ones count more."""
_TOKENS = 2
_BITS = 32
_NONE = -1


def pairs_of(tokens: NDArray[np.integer[Any]]) -> Pairs:
    """Return what stands in front of each token of a prompt.

    Args:
        tokens: Integers [n], ids below 2^31.

    Returns:
        int64 [n], the two tokens before; -1 for the first two.
    """
    pairs = np.full(len(tokens), _NONE, np.int64)
    before = tokens[:-_TOKENS].astype(np.int64) << _BITS
    pairs[_TOKENS:] = before | tokens[1 : len(before) + 1].astype(np.int64)
    return pairs


@dataclass(slots=True)
class _Tenant:
    """What is known of one tenant.

    Attributes:
        starts: Runs that began behind each seam. The seam that was used last stands at the end.
        places: How often each of these seams stood in runs.
        num_starts: Runs.
    """

    starts: OrderedDict[int, int] = field(default_factory=OrderedDict)
    places: dict[int, int] = field(default_factory=dict)
    num_starts: int = 0

    def known(self) -> Pairs:
        least = max(_FEWEST_STARTS, self.num_starts / _LEAST_SHARE)
        return np.array(
            sorted(
                seam
                for seam, count in self.starts.items()
                if count >= least and _LEAST_PRECISION * count >= self.places[seam]
            ),
            np.int64,
        )

    def began(self, seam: int) -> None:
        self.num_starts += 1
        if seam == _NONE:
            return
        self.starts[seam] = self.starts.get(seam, 0) + 1
        self.starts.move_to_end(seam)
        self.places.setdefault(seam, 0)
        if len(self.starts) > _MOST_SEAMS:
            oldest, _ = self.starts.popitem(last=False)
            del self.places[oldest]

    def halve(self) -> None:
        for seam in list(self.starts):
            self.starts[seam] //= 2
            self.places[seam] //= 2
            if not self.starts[seam]:
                del self.starts[seam], self.places[seam]
        self.num_starts //= 2


class Seams:
    """Seams of all tenants; owned by the scheduler thread.

    Args:
        most_tenants: See Tenants.
    """

    def __init__(self, most_tenants: int = 256) -> None:
        self._tenants = Tenants(_Tenant, most_tenants)

    def count(self, tenant: str, pairs: Pairs, runs: Iterable[Span]) -> None:
        """Count what stands before runs, and how often it stands in them.

        Args:
            tenant: Whose prompt it is.
            pairs: Of the prompt, as pairs_of() gives them.
            runs: From where a chunk of the run would begin.
        """
        known = self._tenants.of(tenant, len(pairs))
        inside = [pairs[run.start : run.stop] for run in runs]
        for run in inside:
            known.began(int(run[0]))
        if inside:
            seams = np.array(sorted(known.starts), np.int64)
            every = np.concatenate(inside)
            counts = np.bincount(_places_of(every, seams)[1], minlength=len(seams))
            for seam, count in zip(seams.tolist(), counts.tolist(), strict=True):
                known.places[seam] += count
        if known.num_starts >= _MOST_STARTS:
            known.halve()

    def find(self, tenant: str, pairs: Pairs) -> NDArray[np.intp]:
        """Return where documents are likely to begin in a prompt: intp, ascending.

        Args:
            tenant: Whose prompt it is.
            pairs: Of the prompt, as pairs_of() gives them.
        """
        known = self._tenants.get(tenant)
        return _places_of(pairs, np.empty(0, np.int64) if known is None else known.known())[0]

    def forget(self, tenant: str) -> None:
        """Forget the seams of a tenant."""
        self._tenants.forget(tenant)

    def clear(self) -> None:
        """Forget everything."""
        self._tenants.clear()


def _places_of(pairs: Pairs, seams: Pairs) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where pairs are one of these seams, which are sorted, and which one stands there."""
    if not len(seams):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    number = np.minimum(np.searchsorted(seams, pairs), len(seams) - 1)
    places = np.flatnonzero(seams[number] == pairs)
    return places, number[places]

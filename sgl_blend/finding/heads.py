"""Where the fixed beginning of a tenant's prompts ends: the build prefix of prompts without markup.

Prompts of one application begin alike and part where the first document or question stands. The
place where most recent prompts part is named a head. Once named it stays: another build prefix would
make other chunks of the same text.

Where two prompts part right behind the header of a message, the head ends before the header. Else an
agent that forgets its first messages would have a head for each role that comes first.
"""

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_blend.finding.borders import HEADER, Border, Borders, Strengths
from sgl_blend.finding.tenants import Tenants

Tokens = NDArray[np.int32]

_RECENT = 32
"""Beginnings that are remembered for a tenant."""
_SHARE = 4
"""A head is named where one in four of them parts."""
_FEWEST = 2
_LEAST_TOKENS = 4
_NO_TOKEN = -1


class _Tenant:
    """What is known of one tenant.

    Attributes:
        recent: int32 [_RECENT, limit], beginnings of prompts, filled up with no token.
        sizes: int64 [_RECENT], their tokens.
        num_seen: Prompts so far. The next one takes the row of the oldest.
        heads: Bytes of the tokens of each head; what was used last stands at the end.
    """

    def __init__(self, limit: int) -> None:
        self.recent = np.full((_RECENT, limit), _NO_TOKEN, np.int32)
        self.sizes = np.zeros(_RECENT, np.int64)
        self.num_seen = 0
        self.heads: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_recent(self) -> int:
        return min(self.num_seen, _RECENT)

    def remember(self, beginning: Tokens) -> None:
        row = self.num_seen % _RECENT
        self.recent[row] = _NO_TOKEN
        self.recent[row, : len(beginning)] = beginning
        self.sizes[row] = len(beginning)
        self.num_seen += 1

    def longest_head(self, beginning: Tokens) -> int:
        """Return the tokens of the longest head that a prompt begins with, and note its use."""
        begins = beginning.tobytes()
        best = max(filter(begins.startswith, self.heads), key=len, default=b"")
        if best:
            self.heads.move_to_end(best)
        return len(best) // beginning.itemsize

    def partings(self, beginning: Tokens) -> NDArray[np.intp]:
        """Return how many tokens a prompt shares with each recent one that goes on otherwise."""
        count, size = self.num_recent, len(beginning)
        parted = self.recent[:count, :size] != beginning
        shared = parted.argmax(axis=1)
        # One that ends first, or that does not part at all, says nothing.
        tells = parted.any(axis=1) & (shared < self.sizes[:count])
        places: NDArray[np.intp] = shared[tells]
        return places


class Heads:
    """Heads of all tenants; owned by the scheduler thread.

    Args:
        borders: Of the tokenizer. A head ends behind a line or something stronger.
        limit: Tokens of the longest head.
        most_heads: Of a tenant; the one that was not used for longest goes first.
        most_tenants: See Tenants. One takes 128 bytes for each token of the limit, and its heads.
    """

    def __init__(
        self, borders: Borders, *, limit: int = 1_024, most_heads: int = 64, most_tenants: int = 256
    ) -> None:
        self._borders = borders
        self._limit = limit
        self._most_heads = most_heads
        self._tenants = Tenants(lambda: _Tenant(limit), most_tenants)
        self._num_heads_forgotten = 0

    @property
    def num_forgotten(self) -> int:
        """Tenants and heads that had to make room."""
        return self._tenants.num_pushed_out + self._num_heads_forgotten

    def of(self, tenant: str, tokens: NDArray[np.integer[Any]]) -> int:
        """Return how many tokens of a prompt are its head, and learn from the prompt.

        Args:
            tenant: Whose prompt it is.
            tokens: Integers [n], ids of the prompt.

        Returns:
            0 where no head is known.
        """
        if len(tokens) < _LEAST_TOKENS:
            return 0
        beginning = np.ascontiguousarray(tokens[: self._limit], np.int32)
        known = self._tenants.of(tenant, len(tokens))
        best = known.longest_head(beginning)
        named = self._commonest(known, beginning)
        known.remember(beginning)
        if named <= best:
            return best
        self._name(known, beginning[:named])
        return named

    def name(self, tenant: str, head: NDArray[np.integer[Any]]) -> None:
        """Take what stands before a client's first mark for a head.

        Args:
            tenant: Whose prompt it is.
            head: Integers [n]. What is shorter or longer than heads are is left out.
        """
        if _LEAST_TOKENS <= len(head) <= self._limit:
            self._name(self._tenants.of(tenant, len(head)), np.ascontiguousarray(head, np.int32))

    def _name(self, known: _Tenant, head: Tokens) -> None:
        known.heads[head.tobytes()] = None
        known.heads.move_to_end(head.tobytes())
        if len(known.heads) > self._most_heads:
            known.heads.popitem(last=False)
            self._num_heads_forgotten += 1

    def forget(self, tenant: str) -> None:
        """Forget what was learned of a tenant."""
        self._tenants.forget(tenant)

    def clear(self) -> None:
        """Forget everything."""
        self._tenants.clear()

    def _commonest(self, known: _Tenant, beginning: Tokens) -> int:
        """Return where enough recent prompts part from this one, 0 if they do nowhere."""
        partings = known.partings(beginning)
        partings = partings[partings >= _LEAST_TOKENS]
        num_recent = min(known.num_recent + 1, _RECENT)  # this prompt too
        enough = max(_FEWEST, num_recent // _SHARE)
        if len(partings) < enough:
            return 0
        strengths = self._borders.before(beginning)
        ends = np.flatnonzero(strengths >= Border.LINE)
        snapped = _before_headers(
            ends[np.searchsorted(ends, partings, side="right") - 1], strengths
        )
        counts = Counter(snapped[snapped >= _LEAST_TOKENS].tolist())
        if not counts:
            return 0
        place, count = max(counts.items(), key=lambda item: (item[1], -item[0]))
        return int(place) if count >= enough else 0


def _before_headers(ends: NDArray[np.intp], strengths: Strengths) -> NDArray[np.intp]:
    """Move ends that stand in the header of a message, or right behind it, to where it begins."""
    special = np.flatnonzero(strengths[1:] == Border.SPECIAL) + 1  # 0 is the prompt's beginning
    if not len(special):
        return ends
    begins = np.flatnonzero(np.diff(special, prepend=-HEADER) > HEADER)
    header = special[begins][np.searchsorted(begins, np.arange(len(special)), side="right") - 1]
    last = np.searchsorted(special, ends, side="right") - 1
    in_header = (last >= 0) & (ends - special[last] <= HEADER)
    return np.where(in_header, header[last], ends)

"""Where complete chunks were found at last, so that the tree is not searched for them again.

A chunk that many requests share is where the last of them found it, unless it was evicted since. To
ask for a node by its number takes a fraction of a search for its path.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_blend.engine.tree import TreeMatch

Group = tuple[str, str | None, bytes]
"""Namespace, request class and build prefix."""

_TOKEN_BYTES = 8


class Places:
    """Remembers matches as a branch of the tree made them; owned by the scheduler thread.

    Args:
        most_tokens: Of all chunks that were added, beyond which everything is forgotten. The KV pool's
            capacity is a good number: what is remembered then takes 8 bytes for a token of KV.
        slots_may_change: Whether a node may come back in other slots. Then matches are handed out as
            copies, because who reads the slots of a match leaves them in it.
    """

    def __init__(self, most_tokens: int, *, slots_may_change: bool) -> None:
        self._most = most_tokens
        self._copies = slots_may_change
        self._groups: dict[Group, dict[bytes, TreeMatch]] = {}
        self._num_tokens = 0

    def find(self, group: Group, chunks: Sequence[bytes]) -> list[TreeMatch | None]:
        """Return where each chunk was at last; nobody says that it still is."""
        known = self._groups.get(group)
        if known is None:
            return [None] * len(chunks)
        found = list(map(known.get, chunks))
        return list(map(_copy, found)) if self._copies else found

    def add(self, group: Group, chunks: Sequence[bytes], matches: Sequence[TreeMatch]) -> None:
        """Remember where complete chunks are; of none of the matches anybody has read the slots."""
        if self._num_tokens > self._most:
            self.clear()
        self._num_tokens += sum(map(len, chunks)) // _TOKEN_BYTES
        own = map(_copy, matches) if self._copies else matches
        self._groups.setdefault(group, {}).update(zip(chunks, own, strict=True))  # type: ignore[arg-type]

    def clear(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._num_tokens = 0


def _copy(match: TreeMatch | None) -> TreeMatch | None:
    if match is None:
        return None
    return TreeMatch(match.node, match.stop, match.start, match.known, match.read)

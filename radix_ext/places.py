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
        most_tokens: Of all chunks together, beyond which everything is forgotten. The KV pool's
            capacity is a good number: what is remembered then takes 8 bytes for a token of KV.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._groups: dict[Group, dict[bytes, TreeMatch]] = {}
        self._num_tokens = 0

    def find(self, group: Group, chunks: Sequence[bytes]) -> list[TreeMatch | None]:
        """Return where each chunk was at last; nobody says that it still is."""
        known = self._groups.get(group)
        if known is None:
            return [None] * len(chunks)
        found = map(known.get, chunks)
        # Copies: who reads the slots of a match leaves them in it.
        return [
            None if at is None else TreeMatch(at.node, at.stop, at.start, at.known, at.read)
            for at in found
        ]

    def add(self, group: Group, tokens: bytes, match: TreeMatch) -> None:
        """Remember where a complete chunk is; the match is one whose slots nobody has read."""
        if self._num_tokens > self._most:
            self._groups.clear()
            self._num_tokens = 0
        known = self._groups.setdefault(group, {})
        if tokens not in known:
            self._num_tokens += len(tokens) // _TOKEN_BYTES
        known[tokens] = TreeMatch(match.node, match.stop, match.start, match.known, match.read)

"""Uses of chunks that the tree is told of late: before it next evicts, which is soon enough.

A match counts as a use in SGLang's tree, and finding chunks without its match does not. When the tree
evicts, it asks what was used least recently; until then nobody does. So uses are kept in their order,
a request that is looked up every round counts once, and while nothing is evicted they cost nothing.
"""

from collections import OrderedDict

from sgl_blend.radix_ext.chunk_store import ChunkHit, ChunkStore

_CHUNK_WEIGHT = 256
_LIMIT = 4096 * _CHUNK_WEIGHT
"""Bounds what one eviction has to tell, and the tokens that are held for it (8 MB). Beyond it the
oldest uses are forgotten: their chunks look as old as they were before."""


class LateUses:
    """What was found since the last eviction; owned by the scheduler thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._uses: OrderedDict[str, tuple[tuple[ChunkHit, ...], int]] = OrderedDict()
        self._weight = 0

    def add(self, rid: str, hits: tuple[ChunkHit, ...], num_tokens: int) -> None:
        """Note that a request uses chunks now, and no longer what it used before.

        Args:
            rid: Its id.
            hits: The chunks.
            num_tokens: Tokens of its prompt.
        """
        self._drop(rid)
        if not hits:
            return
        weight = num_tokens + _CHUNK_WEIGHT * len(hits)
        self._uses[rid] = hits, weight
        self._weight += weight
        while self._weight > _LIMIT and len(self._uses) > 1:
            self._drop(next(iter(self._uses)))

    def tell_all(self) -> None:
        """Tell the tree, least recent use first."""
        for hits, _ in self._uses.values():
            for hit in hits:
                self._store.touch(hit.key)
        self.clear()

    def clear(self) -> None:
        """Forget all, because the tree did."""
        self._uses.clear()
        self._weight = 0

    def _drop(self, rid: str) -> None:
        self._weight -= self._uses.pop(rid, ((), 0))[1]

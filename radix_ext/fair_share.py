"""Fair shares: a tenant that floods the cache does not push out chunks another still uses.

The tree evicts what was used least recently, whoever it belongs to. It offers no other say, but a match
counts as a use. So before it evicts, protected chunks are matched again when they come near the old
end, and a flood pays with its own. Protected are each active tenant's most recently used chunks: up to
its equal part of the pool, and of all tenants together up to three quarters of what could be evicted,
where those with the most give way first. While one tenant is alone nothing is done.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore


@dataclass(slots=True)
class _Tenant:
    """Chunks of one namespace that are protected, least recently used first.

    Attributes:
        chunks: Per chunk its tokens and how much had been evicted when it was last used.
        tokens: Their tokens together.
        last_use: How much had been admitted at the tenant's last request.
    """

    chunks: OrderedDict[ChunkKey, tuple[int, int]] = field(default_factory=OrderedDict)
    tokens: int = 0
    last_use: int = 0

    def drop(self, key: ChunkKey) -> None:
        known = self.chunks.pop(key, None)
        if known is not None:
            self.tokens -= known[0]


class FairShare:
    """Knows which chunks each tenant uses and keeps its share of them in the cache.

    Owned by the scheduler thread. Both clocks count tokens, so that all tensor-parallel ranks read them
    alike. A tenant is active until the others have been admitted twice what the cache holds.

    Args:
        store: Where chunks are found.
        capacity: Tokens that the KV pool holds.
    """

    def __init__(self, store: ChunkStore, capacity: int) -> None:
        self._store = store
        self._capacity = capacity
        self._tenants: dict[str, _Tenant] = {}
        self._evicted = 0
        self._admitted = 0
        self._older = capacity
        self._look_at = 0
        self._older_then = capacity

    @property
    def num_chunks(self) -> int:
        """Chunks that metadata is held of; their tokens together never exceed the pool."""
        return sum(len(tenant.chunks) for tenant in self._tenants.values())

    def use(self, key: ChunkKey) -> None:
        """Note that a chunk was built or hit."""
        self._older = min(self._older, self._store.evictable_tokens)
        tenant = self._tenants.setdefault(key.salt, _Tenant())
        tenant.last_use = self._admitted
        tenant.drop(key)
        tenant.chunks[key] = (key.length, self._evicted)
        tenant.tokens += key.length
        self._trim(tenant, self._capacity)

    def admit(self, num_tokens: int) -> None:
        """Advance the clock of activity by a request's prefill."""
        self._admitted += num_tokens

    def before_evict(self, num_tokens: int) -> None:
        """Make protected chunks look recently used.

        Args:
            num_tokens: What the tree is about to evict.
        """
        evictable = self._store.evictable_tokens
        self._evicted += num_tokens
        # How much is surely older than what is used now: little after a moment in which running
        # requests held nearly everything, and more again as eviction goes on.
        self._older = min(self._older + num_tokens, evictable)
        if self._evicted < self._look_at and 2 * self._older >= self._older_then:
            return  # decoding evicts a few tokens at a time
        self._forget_idle()
        if len(self._tenants) < 2:
            return
        level = _water_level([t.tokens for t in self._tenants.values()], evictable * 3 // 4)
        for tenant in self._tenants.values():
            self._trim(tenant, level)
        protected = sum(tenant.tokens for tenant in self._tenants.values())
        horizon = max(0, self._older - protected) // 2
        self._look_at, self._older_then = self._evicted + horizon // 4, self._older
        # What is matched last is evicted last: the smallest tenants are.
        for tenant in sorted(self._tenants.values(), key=lambda t: t.tokens, reverse=True):
            self._refresh(tenant, horizon)

    def clear(self) -> None:
        """Forget all chunks, because the cache was flushed."""
        self._tenants.clear()

    def _refresh(self, tenant: _Tenant, horizon: int) -> None:
        while tenant.chunks:
            key, (tokens, used_at) = next(iter(tenant.chunks.items()))
            if self._evicted - used_at < horizon:
                return
            if not self._store.is_complete(key):
                tenant.drop(key)
                continue
            tenant.chunks[key] = (tokens, self._evicted)
            tenant.chunks.move_to_end(key)
            if next(iter(tenant.chunks.values()))[1] == self._evicted:
                return  # all of them are refreshed

    def _trim(self, tenant: _Tenant, level: int) -> None:
        share = min(level, self._capacity // max(1, len(self._tenants)))
        while tenant.tokens > share and tenant.chunks:
            tenant.drop(next(iter(tenant.chunks)))

    def _forget_idle(self) -> None:
        idle = [
            salt
            for salt, tenant in self._tenants.items()
            if self._admitted - tenant.last_use > 2 * self._capacity
        ]
        for salt in idle:
            del self._tenants[salt]


def _water_level(amounts: list[int], total: int) -> int:
    """Return the least level to which amounts must be cut for their sum to be at most total."""
    left, rest = total, sorted(amounts)
    for index, amount in enumerate(rest):
        part = left // (len(rest) - index)
        if amount > part:
            return part
        left -= amount
    return max(rest, default=0)

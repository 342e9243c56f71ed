"""Fair shares: a tenant that floods the cache does not push out chunks another still uses.

The tree evicts what was used least recently, whoever it belongs to. It offers no other say, but a match
counts as a use. So before it evicts, protected chunks are matched again when they come near the old
end, and a flood pays with its own. Protected are the most recently used chunks of each share: up to an
equal part of the pool, and of all shares together up to three quarters of what could be evicted, where
those with the most give way first. A single tenant's chunks are kept beside what it asks but once.

SGLang knows a tenant by its salt alone, and a client may send as many salts as it likes. So a salt
earns a share of its own by reuse: 32 at most have one, those whose chunks were hit for the most tokens
lately. All others together have one share, in which those with the most give way first too. A thousand
fresh salts hold one share, whoever has earned one keeps at least a 33rd, and to take it away another
salt must be hit for more.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore

_MAX_SHARES = 32
"""Salts with a share of their own."""
_MAX_OTHERS = 256
"""Salts in the common share; the one that came last longest ago is forgotten first."""


@dataclass(slots=True)
class _Tenant:
    """Chunks of one namespace that are protected, least recently used first.

    Attributes:
        chunks: Tokens of each chunk.
        told: How much had been evicted when the tree was last told of each chunk, by a use or by us;
            longest ago first.
        tokens: Their tokens together, and those of the build prefixes they are stored after.
        prefixes: Build prefixes, each held once: the bytes and how many chunks are after it.
        last_use: How much had been admitted at the tenant's last request.
        reused: Tokens for which its chunks were hit; halved each time the pool was admitted once.
        epoch: How often the pool had been admitted when it was halved last.
    """

    chunks: OrderedDict[ChunkKey, int] = field(default_factory=OrderedDict)
    told: OrderedDict[ChunkKey, int] = field(default_factory=OrderedDict)
    tokens: int = 0
    prefixes: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    last_use: int = 0
    reused: int = 0
    epoch: int = 0

    def put(self, key: ChunkKey, evicted: int) -> None:
        """Make a chunk the most recently used one."""
        if key in self.chunks:
            self.chunks.move_to_end(key)
            self.tell(key, evicted)
            return
        prefix, count = self.prefixes.get(key.prefix, (key.prefix, 0))
        self.prefixes[prefix] = prefix, count + 1
        if prefix is not key.prefix:
            key = ChunkKey(key.salt, key.extra_key, prefix, key.tokens)
        self.chunks[key] = key.length
        self.tell(key, evicted)
        self.tokens += key.length + (0 if count else key.prefix_length)

    def tell(self, key: ChunkKey, evicted: int) -> None:
        """Note that the tree is told of a chunk; it is used no more recently by that."""
        self.told[key] = evicted
        self.told.move_to_end(key)

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk, and its build prefix with the last chunk after it."""
        length = self.chunks.pop(key, None)
        if length is None:
            return
        del self.told[key]
        self.tokens -= length
        prefix, count = self.prefixes[key.prefix]
        if count > 1:
            self.prefixes[prefix] = prefix, count - 1
        else:
            del self.prefixes[prefix]
            self.tokens -= key.prefix_length

    def trim(self, level: int) -> None:
        """Forget least recently used chunks until no more than level tokens are left."""
        while self.tokens > level and self.chunks:
            self.drop(next(iter(self.chunks)))

    def decay(self, epoch: int) -> int:
        """Return the tokens reused lately."""
        self.reused >>= min(64, epoch - self.epoch)
        self.epoch = epoch
        return self.reused


class FairShare:
    """Knows which chunks each tenant uses and keeps its share of them in the cache.

    Owned by the scheduler thread. Both clocks count tokens, so that all tensor-parallel ranks read them
    alike. A tenant is active until the others have been admitted twice what the cache holds.

    Args:
        store: Where chunks are found.
        capacity: Tokens that the KV pool holds.
        on_probation: Tells how many tokens the tree evicts before any chunk, whoever used them last.
    """

    def __init__(
        self, store: ChunkStore, capacity: int, on_probation: Callable[[], int] = lambda: 0
    ) -> None:
        self._store = store
        self._on_probation = on_probation
        self._capacity = capacity
        self._owners: dict[str, _Tenant] = {}
        self._others: OrderedDict[str, _Tenant] = OrderedDict()
        self._others_tokens = 0
        self._evicted = 0
        self._admitted = 0
        self._older = capacity
        self._look_at = 0
        self._older_then = capacity

    @property
    def num_chunks(self) -> int:
        """Chunks that metadata is held of. A share that has shrunk is cut down when it is used next."""
        return sum(len(tenant.chunks) for tenant in self._tenants())

    @property
    def num_tenants(self) -> int:
        """Tenants that metadata is held of."""
        return len(self._owners) + len(self._others)

    def built(self, key: ChunkKey) -> None:
        """Note that a chunk was built."""
        self._use(key, 0)

    def hit(self, key: ChunkKey, num_tokens: int) -> None:
        """Note that a request reuses a chunk.

        Args:
            key: The chunk.
            num_tokens: Tokens reused; 0 if the chunk was built for this very request.
        """
        self._use(key, num_tokens)

    def admit(self, num_tokens: int) -> None:
        """Advance the clock of activity by a request's prefill."""
        self._admitted += num_tokens

    def before_evict(self, num_tokens: int) -> None:
        """Make protected chunks look recently used.

        Args:
            num_tokens: What the tree is about to evict.
        """
        num_tokens -= self._on_probation()
        if num_tokens <= 0:
            return
        evictable = self._evictable
        self._evicted += num_tokens
        # How much is surely older than what is used now: little after a moment in which running
        # requests held nearly everything, and more again as eviction goes on.
        self._older = min(self._older + num_tokens, evictable)
        if self._evicted < self._look_at and 2 * self._older >= self._older_then:
            return  # decoding evicts a few tokens at a time
        self._forget_idle()
        self._trim(evictable * 3 // 4)
        protected = sum(tenant.tokens for tenant in self._tenants())
        horizon = max(0, self._older - protected) // 2
        self._look_at, self._older_then = self._evicted + horizon // 4, self._older
        # What is matched last is evicted last: the smallest tenants are, after them those who have
        # earned a share.
        for group in (self._others, self._owners):
            for tenant in sorted(group.values(), key=lambda t: t.tokens, reverse=True):
                self._refresh(tenant, horizon)

    def clear(self) -> None:
        """Forget all chunks, because the cache was flushed."""
        self._owners.clear()
        self._others.clear()
        self._others_tokens = 0

    def _tenants(self) -> list[_Tenant]:
        return [*self._others.values(), *self._owners.values()]

    def _use(self, key: ChunkKey, reused: int) -> None:
        self._older = min(self._older, self._evictable)
        tenant = self._tenant_of(key.salt, reused)
        before = tenant.tokens
        tenant.put(key, self._evicted)
        tenant.trim(self._share)
        if key.salt in self._owners:
            return
        self._others_tokens += tenant.tokens - before
        if self._others_tokens > self._share + self._share // 8:  # seldom: it looks at all of them
            self._trim_others(self._share)

    def _tenant_of(self, salt: str, reused: int) -> _Tenant:
        """Return a tenant, which moves to a share of its own if it has earned one."""
        epoch = self._admitted // self._capacity
        tenant = self._owners.get(salt)
        if tenant is None:
            tenant = self._others.setdefault(salt, _Tenant(epoch=epoch))
            self._others.move_to_end(salt)
        tenant.last_use = self._admitted
        tenant.reused = tenant.decay(epoch) + reused
        if reused and salt not in self._owners:
            self._promote(salt, tenant, epoch)
        if len(self._others) > _MAX_OTHERS:
            self._others_tokens -= self._others.popitem(last=False)[1].tokens
        return tenant

    def _promote(self, salt: str, tenant: _Tenant, epoch: int) -> None:
        if len(self._owners) == _MAX_SHARES:
            least = min(self._owners, key=lambda owner: self._owners[owner].decay(epoch))
            if self._owners[least].reused >= tenant.reused:
                return
            self._demote(least)
        self._owners[salt] = self._others.pop(salt)
        self._others_tokens -= tenant.tokens

    def _demote(self, salt: str) -> None:
        tenant = self._others[salt] = self._owners.pop(salt)
        self._others_tokens += tenant.tokens

    @property
    def _evictable(self) -> int:
        """Tokens that could be evicted, without those on probation."""
        return max(0, self._store.evictable_tokens - self._on_probation())

    @property
    def _share(self) -> int:
        return self._capacity // max(1, len(self._owners) + bool(self._others))

    def _trim(self, total: int) -> None:
        """Cut the shares down until they hold no more than total together."""
        amounts = [tenant.tokens for tenant in self._owners.values()]
        level = min(self._share, _water_level([*amounts, self._others_tokens], total))
        for tenant in self._owners.values():
            tenant.trim(level)
        self._trim_others(level)

    def _trim_others(self, total: int) -> None:
        level = _water_level([tenant.tokens for tenant in self._others.values()], total)
        for tenant in self._others.values():
            tenant.trim(level)
        self._others_tokens = sum(tenant.tokens for tenant in self._others.values())

    def _refresh(self, tenant: _Tenant, horizon: int) -> None:
        while tenant.told:
            key, told_at = next(iter(tenant.told.items()))
            if self._evicted - told_at < horizon:
                return
            if not self._store.is_complete(key):
                tenant.drop(key)
                continue
            tenant.tell(key, self._evicted)
            if next(iter(tenant.told.values())) == self._evicted:
                return  # all of them are refreshed

    def _forget_idle(self) -> None:
        """Forget who has not come for long; who was not hit lately loses the share of its own."""
        epoch = self._admitted // self._capacity
        for group in (self._owners, self._others):
            for salt, tenant in list(group.items()):
                if self._admitted - tenant.last_use > 2 * self._capacity:
                    del group[salt]
        for salt in [salt for salt, owner in self._owners.items() if not owner.decay(epoch)]:
            self._demote(salt)
        self._others_tokens = sum(tenant.tokens for tenant in self._others.values())


def _water_level(amounts: list[int], total: int) -> int:
    """Return the least level to which amounts must be cut for their sum to be at most total."""
    left, rest = total, sorted(amounts)
    for index, amount in enumerate(rest):
        part = left // (len(rest) - index)
        if amount > part:
            return part
        left -= amount
    return max(rest, default=0)

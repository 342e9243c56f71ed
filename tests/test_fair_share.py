"""Who has a share of the cache, and what is held of whom; the tree's side is in test_isolation.py."""

from array import array

from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.radix_ext.fair_share import FairShare

CAPACITY = 33_000
CHUNK = 100
OWN = 7
"""Chunks in a 33rd of three quarters of the pool."""


class Stored:
    """A store that holds everything and notes what is made to look recently used."""

    def __init__(self) -> None:
        self.refreshed: list[str] = []
        self.evictable_tokens = CAPACITY

    def is_complete(self, key: ChunkKey) -> bool:
        self.refreshed.append(key.salt)
        return True


def chunk(salt: str, number: int, prefix: int = 0) -> ChunkKey:
    head = array("q", range(1, 1 + prefix)).tobytes()
    return ChunkKey(salt, None, head, array("q", [number] * CHUNK).tobytes())


def protected(shares: FairShare, store: Stored) -> dict[str, int]:
    """Return how many chunks of each salt are kept when the whole pool is about to be evicted."""
    store.refreshed.clear()
    shares.before_evict(CAPACITY)
    return {salt: store.refreshed.count(salt) for salt in store.refreshed}


def make() -> tuple[FairShare, Stored]:
    store = Stored()
    return FairShare(store, CAPACITY), store  # type: ignore[arg-type]


def establish(shares: FairShare, salt: str, hits: int = 1, chunks: int = OWN) -> None:
    for number in range(chunks):
        shares.built(chunk(salt, number))
        for _ in range(hits):
            shares.hit(chunk(salt, number), CHUNK)


def test_a_thousand_fresh_salts_take_one_share() -> None:
    shares, store = make()
    establish(shares, "tenant")
    for number in range(1000):
        shares.built(chunk(f"flood-{number}", number))
    kept = protected(shares, store)
    assert kept["tenant"] == OWN
    others = sum(count for salt, count in kept.items() if salt != "tenant")
    assert others * CHUNK <= CAPACITY // 2
    assert shares.num_tenants <= 1 + 256
    assert next(reversed(store.refreshed)) == "tenant", "who has earned a share is matched last"


def test_at_most_thirty_two_salts_have_a_share_of_their_own() -> None:
    shares, store = make()
    for number in range(200):  # each fills as much as it may
        establish(shares, f"many-{number}", chunks=40)
    for _ in range(2):  # what it lost before it had earned a share comes back with the next hit
        establish(shares, "tenant", hits=8)
    kept = protected(shares, store)
    assert kept["tenant"] == OWN
    own = [salt for salt, count in kept.items() if count == OWN]
    assert len(own) == 32
    assert sum(kept.values()) <= 33 * OWN


def test_a_share_is_taken_only_by_more_reuse() -> None:
    for hits, keeps in ((1, True), (3, False)):
        shares, store = make()
        establish(shares, "tenant", hits=2)
        for number in range(40):
            establish(shares, f"many-{number}", hits=hits)
        kept = protected(shares, store).get("tenant", 0)
        assert (kept == OWN) == keeps, (hits, kept)


def test_reuse_of_long_ago_does_not_keep_a_share() -> None:
    shares, store = make()
    for number in range(32):
        establish(shares, f"old-{number}", hits=4)
    for _ in range(4):  # they go on sending requests, and reuse nothing any more
        shares.admit(CAPACITY)
        for number in range(32):
            shares.built(chunk(f"old-{number}", 0))
    establish(shares, "new")
    assert protected(shares, store)["new"] == OWN


def test_reuse_of_long_ago_takes_no_share_from_reuse_of_today() -> None:
    shares, store = make()
    for number in range(32):
        establish(shares, f"steady-{number}", hits=4)
    for number in range(40):
        establish(shares, f"old-{number}", hits=2)  # less, so none of them gets a share
    shares.admit(3 * CAPACITY)
    for _ in range(2):
        for number in range(32):
            establish(shares, f"steady-{number}", chunks=1)
    for number in range(40):
        establish(shares, f"old-{number}", chunks=1)
    kept = protected(shares, store)
    assert [kept.get(f"steady-{number}") for number in range(32)] == [OWN] * 32


def test_chunks_built_for_the_request_itself_earn_nothing() -> None:
    shares, store = make()
    establish(shares, "tenant")
    for number in range(300):
        key = chunk(f"flood-{number}", number)
        shares.built(key)
        shares.hit(key, 0)
    kept = protected(shares, store)
    assert kept["tenant"] == OWN
    assert shares.num_tenants <= 1 + 256


def test_a_build_prefix_is_held_once_and_counts() -> None:
    shares, _ = make()
    for number in range(50):
        shares.built(chunk("tenant", number, prefix=1000))  # equal bytes, another object each
    held = [key for tenant in shares._tenants() for key in tenant.chunks]
    assert len({id(key.prefix) for key in held}) == 1
    assert sum(tenant.tokens for tenant in shares._tenants()) == 50 * CHUNK + 1000
    for number in range(400):
        shares.built(chunk(f"other-{number}", number, prefix=1000))
    held_tokens = sum(tenant.tokens for tenant in shares._tenants())
    assert held_tokens <= CAPACITY * 9 // 8


def test_to_be_protected_is_no_use() -> None:
    shares, store = make()
    fits = CAPACITY // CHUNK
    for number in range(fits):  # of which three quarters may be protected
        shares.built(chunk("tenant", number))
        shares.before_evict(CHUNK)
    (tenant,) = shares._tenants()
    assert len(store.refreshed) > fits // 8, "nothing had to be protected"
    kept = [key.tokens for key in tenant.chunks]
    first = fits - len(kept)
    assert kept == [chunk("tenant", number).tokens for number in range(first, fits)]


def test_equal_histories_decide_alike() -> None:
    """Every tensor-parallel rank keeps its own shares: no clock but the tokens admitted."""
    seen = []
    for _ in range(2):
        shares, store = make()
        for number in range(500):
            key = chunk(f"salt-{number * 7 % 61}", number % 5)
            shares.built(key)
            shares.hit(key, CHUNK * (number % 3))
            shares.admit(CAPACITY // 50)
            if number % 50 == 0:
                shares.before_evict(CAPACITY)
        seen.append(list(store.refreshed))
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 32

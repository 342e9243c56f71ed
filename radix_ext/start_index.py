"""How stored chunks begin: which offsets of a prompt may begin one, out of a million.

An entry is the fingerprint of a chunk's first 16 tokens, which its namespace and build prefix are
mixed into, and the number of tokens that the chunk is said to have. A wrong entry costs a search in
the tree, never a wrong answer.

The tree tells nobody what it evicts. So an entry is young when it was used since the last turn, else
old. Once the pool's capacity was evicted since the last turn, the old ones go and the young become
old: in a pool that evicts what was used least recently, a chunk of which neither turn saw a use is
gone. Only evicted tokens move that clock.

A fingerprint has two buckets of 8 places, and stands in the emptier one. In front of the buckets one
bit says for most fingerprints of a prompt that they are not there.
"""

import numpy as np
from numpy.typing import NDArray

Fingerprints = NDArray[np.uint64]
Lengths = NDArray[np.uint32]
Indices = NDArray[np.intp]

_WAYS = 8
"""Places of a bucket: its fingerprints fill one cache line."""
_FEWEST_BUCKETS = 16
_BITS_PER_PLACE = 32
_BITS_PER_WORD = 64
_YOUNG = np.uint32(1 << 31)
"""Set in the length of a young entry."""
_LEARNED = np.uint32(1 << 30)
"""Set in the length of an entry whose chunk was made of text that came again."""
_LENGTH = np.uint32(_LEARNED - 1)
_OTHER = np.uint64(0xD6E8FEB86659FD93)
"""Turns the bits that choose the first bucket into those that choose the second."""


class StartIndex:
    """Fingerprints of chunk starts; owned by the scheduler thread.

    A fingerprint is uniform in 64 bits and not 0.

    Args:
        capacity: Tokens of the pool.
        most_starts: Entries beyond which the ones that were not used for longest are forgotten.

    Attributes:
        num_forgotten: Entries that had to make room, since the index was made.
    """

    def __init__(self, capacity: int, most_starts: int = 1 << 20) -> None:
        self._capacity = capacity
        self._most = most_starts
        self.num_forgotten = 0
        self.clear()

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return self._places.nbytes + self._lengths.nbytes + self._bits.nbytes

    def clear(self) -> None:
        """Forget everything: after a flush, and with new weights."""
        self._size = self._num_young = self._evicted = 0
        self._set_tables(np.zeros((_FEWEST_BUCKETS, _WAYS), np.uint64))
        self._lengths = np.zeros(self._places.shape, np.uint32)

    def register(
        self, fingerprints: Fingerprints, lengths: Lengths, *, learned: bool = False
    ) -> None:
        """Add starts, or change the length of known ones; they are young then.

        Args:
            fingerprints: uint64 [m].
            lengths: uint32 [m], tokens of each chunk, below 2^30. The last one counts if a
                fingerprint comes twice.
            learned: Whether the chunks were made of text that came again.
        """
        backwards, first = np.unique(fingerprints[::-1], return_index=True)
        new, lengths = backwards, lengths[::-1][first].astype(np.uint32)
        if learned:
            lengths |= _LEARNED
        at = self._find(new)
        known = at >= 0
        self._refresh(at[known])
        self._lengths.reshape(-1)[at[known]] = lengths[known] | _YOUNG
        new, lengths = new[~known], lengths[~known]
        while len(new):
            room = max(1, min(len(new), self._most // 2))
            self._add(new[:room], lengths[:room])
            new, lengths = new[room:], lengths[room:]

    def use(self, fingerprints: Fingerprints) -> None:
        """Make starts young again; harmless for those that are not known.

        Whatever makes the tree look on a chunk as used must be told here, and a lock that ends too.

        Args:
            fingerprints: uint64 [m].
        """
        at = self._find(fingerprints)
        self._refresh(np.unique(at[at >= 0]))

    def discard(self, fingerprints: Fingerprints) -> None:
        """Drop starts that were found to be stale; uint64 [m]."""
        at = self._find(fingerprints)
        at = np.unique(at[at >= 0])
        self._size -= len(at)
        self._num_young -= int(np.count_nonzero(self._lengths.reshape(-1)[at] & _YOUNG))
        self._places.reshape(-1)[at] = 0  # its bit stays until the next turn

    def probe(self, fingerprints: Fingerprints) -> tuple[Indices, Lengths]:
        """Find out which fingerprints are known. This is no use.

        Args:
            fingerprints: uint64 [m], of all offsets of a prompt, say.

        Returns:
            Their indices, intp [k], ascending, and the claimed lengths in tokens, uint32 [k].
        """
        words = self._bits.take((fingerprints >> self._word_shift).view(np.int64))
        words >>= fingerprints & np.uint64(_BITS_PER_WORD - 1)
        words &= np.uint64(1)
        maybe = np.flatnonzero(words)
        at = self._find(fingerprints[maybe])
        known = at >= 0
        return maybe[known], self._lengths.reshape(-1)[at[known]] & _LENGTH

    def are_learned(self, fingerprints: Fingerprints) -> NDArray[np.bool_]:
        """Tell which begin a chunk that was learned; uint64 [m] to bool [m]. This is no use."""
        at = self._find(fingerprints)
        learned: NDArray[np.bool_] = self._lengths.reshape(-1)[at] & _LEARNED != 0
        return learned & (at >= 0)

    def evicted(self, num_tokens: int) -> None:
        """Move the clock: the pool has evicted tokens, of whatever."""
        self._evicted += num_tokens
        if self._evicted >= self._capacity:
            self._drop_old()
            self._turn()

    def _drop_old(self) -> None:
        self._places[self._lengths < _YOUNG] = 0
        self._size = self._num_young
        self._set_tables(self._places)

    def _turn(self) -> None:
        """Let the young become old."""
        self._lengths &= ~_YOUNG
        self._num_young = self._evicted = 0

    def _buckets(self, fingerprints: Fingerprints) -> tuple[Indices, Indices]:
        """Return the two buckets of each, intp [m]."""
        second = (fingerprints * _OTHER) >> self._bucket_shift
        return (fingerprints >> self._bucket_shift).view(np.int64), second.view(np.int64)

    def _find(self, fingerprints: Fingerprints) -> Indices:
        """Return the place of each, -1 where it has none."""
        wanted = fingerprints[:, None]
        at = np.full(len(fingerprints), -1, np.intp)
        for buckets in self._buckets(fingerprints):
            same = self._places[buckets] == wanted
            row, way = np.nonzero(same)
            at[row] = buckets[row] * _WAYS + way
        return at

    def _refresh(self, at: Indices) -> None:
        lengths = self._lengths.reshape(-1)
        self._num_young += int(np.count_nonzero(lengths[at] < _YOUNG))
        lengths[at] |= _YOUNG

    def _add(self, new: Fingerprints, lengths: Lengths) -> None:
        """Give places to fingerprints that have none, each of which comes once."""
        while 2 * (self._size + len(new)) > self._places.size and self._may_grow():
            self._grow()
        self._make_room(self._size + len(new) - self._most)
        while len(new):
            at = self._free_places(new)
            at, first = np.unique(at, return_index=True)
            replaced = self._places.reshape(-1)[at] != 0
            self.num_forgotten += int(np.count_nonzero(replaced))
            self._size += int(np.count_nonzero(~replaced))
            was_young = replaced & (self._lengths.reshape(-1)[at] >= _YOUNG)
            self._num_young += len(at) - int(np.count_nonzero(was_young))
            self._places.reshape(-1)[at] = new[first]
            self._lengths.reshape(-1)[at] = lengths[first] | _YOUNG
            self._set_bits(new[first])
            rest = np.ones(len(new), bool)
            rest[first] = False
            new, lengths = new[rest], lengths[rest]

    def _free_places(self, new: Fingerprints) -> Indices:
        """Choose a place for each: a free one in the emptier bucket, else that of an old entry."""
        first, second = self._buckets(new)
        in_first, in_second = self._places[first] != 0, self._places[second] != 0
        to_second = in_second.sum(axis=1) < in_first.sum(axis=1)
        buckets = np.where(to_second, second, first)
        # Free places have rank 0, old entries 1, young ones 2.
        taken = self._places[buckets] != 0
        rank = taken.astype(np.uint8) + (taken & (self._lengths[buckets] >= _YOUNG))
        places: Indices = buckets * _WAYS + rank.argmin(axis=1)
        return places

    def _make_room(self, num_starts: int) -> None:
        """Forget old entries; if there are none, the young ones become old first."""
        if num_starts <= 0:
            return
        if self._size - self._num_young < num_starts:
            self._turn()
        old = np.flatnonzero((self._places != 0) & (self._lengths < _YOUNG))
        # More than is needed, so that it is not done again for each start.
        old = old[: max(num_starts, self._most // 16)]
        self._places.reshape(-1)[old] = 0
        self._size -= len(old)
        self.num_forgotten += len(old)

    def _may_grow(self) -> bool:
        return self._places.size < 2 * self._most

    def _grow(self) -> None:
        """Double the buckets: each becomes two, and its entries keep their way."""
        old, lengths = self._places, self._lengths
        self._set_tables(np.zeros((2 * len(old), _WAYS), np.uint64))
        self._lengths = np.zeros(self._places.shape, np.uint32)
        row, way = np.nonzero(old)
        entries = old[row, way]
        first, second = self._buckets(entries)
        new_row = np.where(first // 2 == row, first, second)
        self._places[new_row, way] = entries
        self._lengths[new_row, way] = lengths[row, way]
        self._set_tables(self._places)

    def _set_tables(self, places: NDArray[np.uint64]) -> None:
        """Take new buckets, and make the bits for what is in them."""
        self._places = places
        num_words = places.size * _BITS_PER_PLACE // _BITS_PER_WORD
        self._bucket_shift = np.uint64(64 - (len(places) - 1).bit_length())
        self._word_shift = np.uint64(64 - (num_words - 1).bit_length())
        self._bits = np.zeros(num_words, np.uint64)
        self._set_bits(places[places != 0])

    def _set_bits(self, fingerprints: Fingerprints) -> None:
        words = (fingerprints >> self._word_shift).view(np.int64)
        bits = np.uint64(1) << (fingerprints & np.uint64(_BITS_PER_WORD - 1))
        np.bitwise_or.at(self._bits, words, bits)

"""64-bit fingerprints of 16 tokens at every offset of a prompt, and a sample of them.

Equal windows have equal fingerprints, wherever they stand. A window of 2k tokens is a mix of its two
halves of k tokens, so four doublings give all windows of 16. Each doubling has a secret multiplier
and ends with a shift. Who does not know the seed can therefore not make two windows collide but by
chance, which is 2^-64 for a pair. And a collision costs a search in vain, never wrong KV: who uses a
fingerprint compares tokens.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fingerprints = NDArray[np.uint64]

WINDOW = 16
"""Tokens of a fingerprint."""
RADIUS = 8
"""A sampled fingerprint is smaller than the eight before it and the eight behind it: 1 in 17."""

_LARGEST = np.uint64(2**64 - 1)
_SHIFT = np.uint64(32)
_DOUBLINGS = (1, 2, 4, 8)
_ODD = 1


class WindowHash:
    """Makes fingerprints with one secret seed; it holds constants only, so threads may share it.

    Args:
        seed: 64 bits that no client knows. Ranks that must agree use the same.
    """

    def __init__(self, seed: int) -> None:
        self._key = (seed & (2**64 - 1)).to_bytes(8, "little")
        names = ("token", "offset", "finish", *(f"double {size}" for size in _DOUBLINGS))
        secret = {name: self.salt(name.encode()) for name in names}
        self._offset = np.uint64(secret["offset"])
        self._factor = np.uint64(secret["token"] | _ODD)
        self._finish = np.uint64(secret["finish"] | _ODD)
        self._doublings = [
            (size, np.uint64(secret[f"double {size}"] | _ODD)) for size in _DOUBLINGS
        ]

    def salt(self, *parts: bytes) -> int:
        """Return 64 bits for what keeps fingerprints apart: a namespace, a build prefix, a tenant.

        Args:
            *parts: Any bytes. Where one ends and the next begins counts too.
        """
        digest = hashlib.blake2b(key=self._key, digest_size=8)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return int.from_bytes(digest.digest(), "little")

    def windows(self, tokens: NDArray[np.integer[Any]]) -> Fingerprints:
        """Hash all windows of a prompt, without a salt.

        Args:
            tokens: Integers [n], ids of tokens, not negative.

        Returns:
            uint64 [max(0, n - 15)], one for each offset at which 16 tokens begin. A new array.
        """
        if len(tokens) < WINDOW:
            return np.empty(0, np.uint64)
        mixed = tokens.astype(np.uint64)
        mixed += self._offset
        mixed *= self._factor
        mixed ^= mixed >> _SHIFT
        for size, factor in self._doublings:
            left = mixed[:-size] * factor
            left += mixed[size:]
            left ^= left >> _SHIFT
            mixed = left
        return mixed

    def salted(self, windows: Fingerprints, salt: int) -> Fingerprints:
        """Mix a salt into windows; one call of windows() serves several salts.

        Args:
            windows: uint64 [m], of windows().
            salt: Of salt().

        Returns:
            uint64 [m], a new array: uniform in all bits, and never 0, which tables use for nothing.
        """
        mixed = windows ^ np.uint64(salt)
        mixed *= self._finish
        mixed ^= mixed >> _SHIFT
        mixed *= self._factor
        mixed ^= mixed >> _SHIFT
        np.maximum(mixed, np.uint64(1), out=mixed)
        return mixed


def sample_offsets(fingerprints: Fingerprints) -> NDArray[np.intp]:
    """Choose offsets by content alone, about 1 in 17: those of strict local minima.

    The same text gives the same offsets in any prompt, except within 8 windows of its ends. Text
    whose period is at most 8 tokens has none.

    Args:
        fingerprints: uint64 [m], of all offsets of a prompt in order.

    Returns:
        intp, ascending. Beyond an end of the prompt nothing is smaller.
    """
    count = len(fingerprints)
    if not count:
        return np.empty(0, np.intp)
    padded = np.full(count + 2 * RADIUS, _LARGEST)
    padded[RADIUS:-RADIUS] = fingerprints
    least = padded
    for size in (1, 2, 4):  # minima of 2, of 4, of 8 neighbours
        least = np.minimum(least[:-size], least[size:])
    before, behind = least[:count], least[RADIUS + 1 : RADIUS + 1 + count]
    return np.flatnonzero((fingerprints < before) & (fingerprints < behind))

"""Names of stored pages, and the operator's key.

Everything that gives a page's bytes another meaning is digested into its name. So servers that may
not share KV cannot even ask for each other's objects. The order of pages in memory is not part of it:
all objects have one order (container.py).
"""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from sgl_blend.errors import ConfigError
from sgl_blend.storage.codec.coded_pages import FORMAT_VERSION as CODED_VERSION
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.storage.container import FORMAT_VERSION, LEVEL, PageFormat, PageLabel

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoreKey:
    """What an operator's key is turned into: one key for names, one for pages.

    Attributes:
        names: 32 bytes that key the digests of names.
        pages: 32 bytes that encrypt pages.
    """

    names: bytes
    pages: bytes

    @classmethod
    def of(cls, secret: bytes) -> StoreKey:
        """Derive both keys from 32 secret bytes."""
        assert len(secret) == KEY_BYTES, len(secret)
        return cls(
            hmac.digest(secret, b"sgb1 names", "sha256"),
            hmac.digest(secret, b"sgb1 pages", "sha256"),
        )


def read_key_file(path: str) -> StoreKey:
    """Read the key of --blend-store-key-file: 32 bytes, or 64 hexadecimal characters.

    A file that others may read or write is refused, not warned about: who has the key reads the KV of
    all tenants and can forge it, and a warning at start is read by nobody.

    Raises:
        ConfigError: The file cannot be read, is open to others than its owner, or holds no key.
    """
    flag = "--blend-store-key-file"
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):  # it is read again when storage is attached
                raise ConfigError(f"{flag} {path} is no regular file")
            content = file.read(4 * KEY_BYTES)
    except (OSError, ValueError) as err:  # a name with a zero byte is no name
        raise ConfigError(f"{flag} {path}: {getattr(err, 'strerror', None) or err}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{flag} {path} is open to others than its owner; run chmod 600 on it")
    if len(content) == KEY_BYTES:
        return StoreKey.of(content)
    try:
        secret = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(
            f"{flag} {path} must hold 32 bytes or 64 hexadecimal characters; "
            f"make one with: head -c 32 /dev/urandom > {path}"
        )
    return StoreKey.of(secret)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # or a pipe waits for somebody who writes to it


@dataclass(frozen=True, slots=True)
class Rank:
    """Whose KV a page is: one rank of a server split over several."""

    index: int
    size: int


class WeightsInUse:
    """Which weights KV is computed with now; written by the scheduler, read by SGLang's threads.

    Attributes:
        digests: Of the weights and of how keys are rotated; None while nobody knows them.
        levels: At which chunks are stored; None: nothing is lost.
    """

    def __init__(self) -> None:
        self.digests: tuple[str, str] | None = None
        self.levels: StoredLevels | None = None

    def renew(
        self, weights: str | None, rotary: str = "", levels: StoredLevels | None = None
    ) -> None:
        """Name pages of other weights from now on; None: of weights that nobody knows.

        To be called when no KV of the old weights can be written any more: after SGLang has flushed
        its tiers. While the digest is not known, nothing is written and nothing found.

        Args:
            weights: Digest of the loaded weights.
            rotary: Digest of how keys are rotated.
            levels: At which chunks are stored. Levels of a profile of other weights are left out.
        """
        self.levels = levels if levels is not None and levels.are_of(weights or "") else None
        self.digests = None if weights is None else (weights, rotary)


class ObjectNames:
    """Names the pages of one rank by SGLang's page hashes.

    SGLang's hash of a page stands for every token up to its end, and for the tenant and our namespaces
    (from 0.5.21 on). The rest is known here.

    Args:
        form: What a page is made of.
        rank: Of this process.
        weights: With which KV is computed.
        key: Keys of the operator; None leaves names to be computed by anybody who knows the tokens.
    """

    def __init__(
        self, form: PageFormat, rank: Rank, weights: WeightsInUse, key: StoreKey | None = None
    ) -> None:
        self._form = form
        self._rank = rank
        self._weights = weights
        self._key = key

    @property
    def levels(self) -> StoredLevels | None:
        """At which chunks are stored; None: nothing is lost."""
        return self._weights.levels

    def label(self, page_hash: str, level: str = LEVEL) -> PageLabel | None:
        """Return what the object of a page says about itself, its name first.

        Args:
            page_hash: SGLang's.
            level: At which the page is coded.

        Returns:
            None while the weights are not known, or if no profile of theirs has the level.
        """
        digests = self._weights.digests  # once: another thread may renew them
        if digests is None:
            return None
        weights, rotary = digests
        form = self._form
        parts = (
            FORMAT_VERSION,
            weights,
            form.dtype,
            form.layers,
            form.heads,
            form.dim,
            form.tokens,
            self._rank.index,
            self._rank.size,
            rotary,
            page_hash,
        )
        if level == LEVEL:
            return PageLabel(self._name(FORMAT_VERSION, level, parts), form, weights, rotary)
        levels = self._weights.levels
        if levels is None or not levels.are_of(weights):
            return None
        profile = levels.profile
        name = self._name(CODED_VERSION, level, (*parts, level, profile))
        return PageLabel(name, form, weights, rotary, level, profile)

    def _name(self, version: int, level: str, parts: tuple[object, ...]) -> str:
        text, key = msgspec.msgpack.encode(parts), self._key
        made = sha256(text).digest() if key is None else hmac.digest(key.names, text, "sha256")
        return f"sgb{version}-{level}-{made[:16].hex()}"

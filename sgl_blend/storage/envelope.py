"""Around every stored page: who wrote it, how long it is, and whether its bytes are those written.

    prelude   16 B  "SGB1", version u16, flags u16, length of the object u64 (little endian)
    body            of that version
    trailer   16 B  xxh3-128 of everything before

With a key the body is encrypted by AES-256-GCM. Its nonce of 12 bytes comes before the body, and its
tag takes the trailer's place. The prelude and the object's name are authenticated with it. Nonces are
random, so a key is good for about 2**32 pages (NIST SP 800-38D).

Prelude and trailer stay as they are in every version. So an intact object of another version is told
from a damaged one.
"""

from __future__ import annotations

import os
import struct
from enum import StrEnum
from typing import TypeAlias

from xxhash import xxh3_128_digest

_MAGIC = b"SGB1"
_PRELUDE = struct.Struct("<4sHHQ")
_ENCRYPTED = 1
_NONCE_BYTES = 12
_TRAILER_BYTES = 16
AROUND_BYTES = _PRELUDE.size + _NONCE_BYTES + _TRAILER_BYTES
"""Bytes of an object that are not its body, at most."""

Bytes: TypeAlias = bytes | bytearray | memoryview


class Fault(StrEnum):
    """Why an object is not the page that was asked for."""

    CORRUPT = "corrupt"
    """Its bytes are not those that were written, or the key is another."""
    VERSION = "version"
    """It is intact and of another version of the container than its name says."""
    MISMATCH = "mismatch"
    """It is intact and holds something else than its name says."""
    POSITION = "position"
    """It is intact, at a position that no prompt of this server reaches; another server may need it."""


def seal(parts: list[bytes], version: int, name: str, key: bytes | None) -> bytearray:
    """Make an object.

    Args:
        parts: Of its body.
        version: Of the body.
        name: Of the object, which is authenticated with it.
        key: 32 bytes that encrypt the body; None leaves it readable.
    """
    body_bytes = sum(map(len, parts))
    length = _PRELUDE.size + body_bytes + _TRAILER_BYTES + (_NONCE_BYTES if key else 0)
    prelude = _PRELUDE.pack(_MAGIC, version, _ENCRYPTED if key else 0, length)
    if key is None:
        sealed = bytearray().join([prelude, *parts])
        sealed += xxh3_128_digest(sealed)
        return sealed
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(_NONCE_BYTES)
    sealed = bytearray(prelude + nonce)
    sealed += AESGCM(key).encrypt(nonce, b"".join(parts), prelude + name.encode())
    return sealed


def unseal(data: memoryview, name: str, key: bytes | None) -> tuple[int, memoryview] | Fault:
    """Return the version and the body of an object, or why there is none.

    Args:
        data: The object, whatever its bytes are.
        name: As for seal.
        key: As for seal. With a key, an object that is not encrypted is corrupt.
    """
    if len(data) < _PRELUDE.size + _TRAILER_BYTES:
        return Fault.CORRUPT
    magic, version, flags, length = _PRELUDE.unpack_from(data)
    if magic != _MAGIC or length != len(data) or flags != (_ENCRYPTED if key else 0):
        return Fault.CORRUPT
    if key is None:
        body: memoryview | None = data[_PRELUDE.size : -_TRAILER_BYTES]
        if xxh3_128_digest(data[:-_TRAILER_BYTES]) != data[-_TRAILER_BYTES:]:
            return Fault.CORRUPT
    else:
        body = _decrypt(data, name, key)
    return Fault.CORRUPT if body is None else (version, body)


def _decrypt(data: memoryview, name: str, key: bytes) -> memoryview | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    start = _PRELUDE.size + _NONCE_BYTES
    if len(data) < start + _TRAILER_BYTES:
        return None
    prelude, nonce = bytes(data[: _PRELUDE.size]), bytes(data[_PRELUDE.size : start])
    try:
        return memoryview(AESGCM(key).decrypt(nonce, data[start:], prelude + name.encode()))
    except InvalidTag:
        return None

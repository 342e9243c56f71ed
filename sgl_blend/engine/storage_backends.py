"""SGLang's storage backends as plain stores of objects of any size.

All calls may hang or raise; they run in threads of storage/breaker.py.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, local
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

logger = logging.getLogger(__name__)

ReadObject = memoryview | None
_OLD_S = 3600.0
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.tmp")
_PROBE_S = 1.0


class StoreDownError(RuntimeError):
    """A store does not answer, or answers with an error."""


class ObjectStore(Protocol):
    """A store of objects by name."""

    def count(self, names: Sequence[str]) -> int:
        """Return how many of the names, from the first on, are stored."""

    def read(self, name: str) -> ReadObject:
        """Return an object; None if it is not stored.

        Its bytes are the caller's. One that is longer than any object of ours is cut.
        """

    def write(self, name: str, data: bytearray) -> bool:
        """Store an object unless it is stored; return whether it is."""

    def remove(self, name: str) -> None:
        """Remove an object; it need not be stored."""

    def clear(self) -> None:
        """Remove all objects."""

    def stats(self) -> Any:
        """Return what SGLang publishes about the backend."""

    def close(self) -> None:
        """Let the backend go."""


class FileStore:
    """SGLang's HiCacheFile: a file for each object, and its own limits of size.

    Args:
        inner: The backend, maybe in SGLang's injector of failures.
        most: Bytes of the longest object.
    """

    def __init__(self, inner: Any, most: int) -> None:
        self._inner = inner
        self._files = getattr(inner, "_backend", inner)
        self._most = most
        remove_unfinished(Path(self._files.file_path))

    def count(self, names: Sequence[str]) -> int:
        """Return how many of the names, from the first on, have a file."""
        return next((i for i, name in enumerate(names) if not self._inner.exists(name)), len(names))

    def read(self, name: str) -> ReadObject:
        """Return what a file holds."""
        try:
            found = os.stat(self._path(name))
        except FileNotFoundError:
            self._forget(name)
            return None
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would take this thread for ever
            return memoryview(b"")  # no object of ours
        target = torch.empty(min(found.st_size, self._most + 1), dtype=torch.uint8)
        if self._inner.get(name, target) is None:
            return None
        return target.numpy().data

    def write(self, name: str, data: bytearray) -> bool:
        """Write a file, if SGLang's evictor makes room for it and the disk takes all of it."""
        if not self._inner.set(name, torch.frombuffer(data, dtype=torch.uint8)):
            return False
        try:
            size = os.stat(self._path(name)).st_size
        except FileNotFoundError:  # it had to make room at once
            return False
        # numpy, which SGLang writes with, does not tell that a full disk took not the last 4 KiB.
        is_cut = size < len(data)
        if is_cut:
            self.remove(name)
        return not is_cut

    def remove(self, name: str) -> None:
        """Remove a file; move aside a folder that stands in its place."""
        path = Path(self._path(name))
        try:
            path.unlink(missing_ok=True)
        except IsADirectoryError:
            path.rename(f"{path}.{time.time_ns()}.aside")
        self._forget(name)

    def clear(self) -> None:
        """Remove all files of the folder, as SGLang does."""
        if self._inner.clear() is False:
            raise StoreDownError(f"{self._files.file_path} could not be cleared")

    def stats(self) -> Any:
        """Return what SGLang publishes about the backend."""
        return self._inner.get_stats()

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, name: str) -> str:
        return os.path.join(self._files.file_path, f"{self._files._get_suffixed_key(name)}.bin")

    def _forget(self, name: str) -> None:
        key = self._files._get_suffixed_key(name)
        self._files._evictor.abort(key)  # which takes its size off the total
        if self._files.metadata_cache is not None:
            self._files.metadata_cache.remove(key)


def remove_unfinished(folder: Path) -> int:
    """Remove files that a writer left behind when it was killed; return how many.

    Those younger than an hour may still be written.
    """
    removed = 0
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age_s > _OLD_S and _UNFINISHED.fullmatch(entry.name):
                    Path(entry.path).unlink()
                    removed += 1
    if removed:
        logger.info("sgl-blend: removed %d unfinished files from %s", removed, folder)
    return removed


_MISSING, _LEASED, _TOO_LONG, _FULL, _THERE = -704, -706, -600, -200, -705
"""Mooncake's error codes; others mean that the store does not answer."""


class MooncakeStore:
    """SGLang's MooncakeStore; objects go through memory that is registered once for each thread.

    Its fixed slots for raw pages are not used, and the host pool is not registered.

    Args:
        inner: The backend.
        most: Bytes of the longest object.
    """

    def __init__(self, inner: Any, most: int) -> None:
        self._inner = getattr(inner, "_backend", inner)
        self._store = self._inner.store
        self._most = most
        self._mine = local()

    def count(self, names: Sequence[str]) -> int:
        """Return how many of the names, from the first on, are stored."""
        for index, found in enumerate(self._store.batch_is_exist(self._keys(names))):
            if found != 1:
                _check("exists", min(found, 0), 0)
                return index
        return len(names)

    def read(self, name: str) -> ReadObject:
        """Return an object, copied out of this thread's memory, into which the next one is read."""
        staging = self._staging()
        (found,) = self._store.batch_get_into(
            self._keys([name]), [staging.data_ptr()], [staging.numel()]
        )
        if found == _MISSING:
            return None
        if found == _TOO_LONG:
            return memoryview(b"")  # no object of ours
        _check("get", min(found, 0), 0)
        return memoryview(staging.numpy()[:found].tobytes())

    def write(self, name: str, data: bytearray) -> bool:
        """Store an object, if there is room for it."""
        staging = self._staging()
        staging[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        (done,) = self._store.batch_put_from(self._keys([name]), [staging.data_ptr()], [len(data)])
        if done == _FULL:
            return False
        _check("put", done, 0, _THERE)
        return True

    def remove(self, name: str) -> None:
        """Remove an object, also one that was read a moment ago and so is leased."""
        (key,) = self._keys([name])
        _check("remove", self._store.remove(key, True), 0, _MISSING)

    def clear(self) -> None:
        """Remove all objects, as SGLang does."""
        self._inner.clear()

    def stats(self) -> Any:
        """Return what SGLang publishes about the backend."""
        return self._inner.get_stats()

    def close(self) -> None:
        """Let the backend go."""
        self._inner.close()

    def _keys(self, names: Sequence[str]) -> list[str]:
        return list(self._inner._tag_keys(list(names)))  # the operator's extra_backend_tag

    def _staging(self) -> torch.Tensor:
        staging: torch.Tensor | None = getattr(self._mine, "staging", None)
        if staging is None:
            staging = torch.empty(self._most, dtype=torch.uint8)
            self._inner.register_buffer(staging)
            self._mine.staging = staging
        return staging


def _check(call: str, code: int, *good: int) -> None:
    if code not in good:
        raise StoreDownError(f"Mooncake's {call} failed with code {code}")


def probe_mooncake(storage_config: Any) -> None:
    """Raise unless a Mooncake master and its metadata server answer.

    Mooncake's setup tries for 90 seconds and lets no other Python thread run meanwhile.

    Raises:
        StoreDownError: One does not answer.
    """
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeBaseStore

    config = MooncakeBaseStore()._load_config(storage_config)
    url = str(config.metadata_server)
    host, _, port = str(config.master_server_address or "").rpartition(":")
    try:
        if host and port.isdigit() and "://" not in host:
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        if urlsplit(url).scheme == "http":
            request = urllib.request.Request(f"{url}?key=sgl-blend")
            with suppress(urllib.error.HTTPError):  # there is no such key
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    request, timeout=_PROBE_S
                ).close()
    except OSError as err:
        raise StoreDownError(f"Mooncake at {host}:{port} or {url} does not answer: {err}") from None


class LateStore:
    """A store that may not be there yet; it is made by the first call that succeeds.

    Args:
        make: Makes it. It may raise.

    Attributes:
        refused: What was raised last; None once the store is made.
    """

    def __init__(self, make: Callable[[], ObjectStore]) -> None:
        self._make = make
        self._lock = Lock()
        self._store: ObjectStore | None = None
        self.refused: BaseException | None = None

    @property
    def made(self) -> ObjectStore | None:
        """The store, if it is made."""
        return self._store

    def get(self) -> ObjectStore:
        """Return the store.

        Raises:
            StoreDownError: Another thread is making it.
        """
        if (made := self.made) is not None:
            return made
        if not self._lock.acquire(blocking=False):
            raise StoreDownError("the KV store is still being set up")
        try:
            made = self.made  # by another thread, a moment ago
            if made is None:
                made = self._make()
            self._store, self.refused = made, None
        except BaseException as err:
            self.refused = err
            raise
        finally:
            self._lock.release()
        return made

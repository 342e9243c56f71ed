"""Chunks in files behind host memory: what tests of a storage backend share."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sgl_blend.engine.tiers import storage_keys_hold_namespaces

PAGE = 16
"""Tokens of a page; the fewest with storage."""

NEEDS_NAMESPACES = pytest.mark.skipif(
    not storage_keys_hold_namespaces(), reason="refused on SGLang 0.5.17"
)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder that all engines of a module store in; tests differ by tenant."""
    folder = tmp_path_factory.mktemp("store")
    with patch.dict(os.environ, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}):
        yield folder


def settings(**more: Any) -> dict[str, Any]:
    """Return settings of an engine with a small pool, a host tier and files."""
    return {
        "blend_policy": "hkvd",  # goes by no memory, which a new process does not have
        "max_total_tokens": 1024,
        "page_size": PAGE,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "blend_min_chunk_tokens": 32,
        **more,
    }


@contextmanager
def slow_reads(seconds: float) -> Iterator[None]:
    """Let each page take so long to be read."""
    stock = HiCacheFile.get

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return stock(*args, **more)

    with patch.object(HiCacheFile, "get", slow):
        yield


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    stock = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, stock)

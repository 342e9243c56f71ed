"""Every way in which SGLang makes a storage backend leads through the hook that checks it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from host_pools import PAGES, STORED, hashes, load, make_host_pool, save, storage_config
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sgl_blend import plugin
from sgl_blend.engine.checked_pages import CheckedPages
from sgl_blend.engine.hook_points import hook_points
from sgl_blend.engine.storage import storage_of, stored_weights
from sgl_blend.errors import ConfigError, UnsupportedError
from sgl_blend.settings.config import BlendConfig

pytestmark = STORED  # pytest.mark.engine


def _create(pool: Any, backend: str = "file", **settings: Any) -> Any:
    """Make a backend as SGLang does, with our hook around its factory."""
    args = SimpleNamespace()
    BlendConfig.from_settings(settings).attach(args)
    stock = StorageBackendFactory.__dict__["create_backend"].__func__
    with patch.object(plugin, "current_settings", return_value=args):
        return plugin._around_create_backend(
            stock, StorageBackendFactory, backend, storage_config(), pool
        )


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Any:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "store")):
        yield


def test_the_factory_is_hooked() -> None:
    ((target, kind),) = hook_points()["storage backend"]
    assert target == f"{StorageBackendFactory.__module__}.StorageBackendFactory.create_backend"
    assert kind == "around"


def test_without_blending_the_backend_is_sglangs_own() -> None:
    assert type(_create(make_host_pool())) is HiCacheFile


def test_with_blending_it_is_checked_and_told_the_weights(tmp_path: Path) -> None:
    pool = make_host_pool()
    storage = _create(pool, enable_blend=True)
    tree: Any = SimpleNamespace(
        cache_controller=SimpleNamespace(storage_backend=storage, storage_host_pool=pool)
    )
    assert storage_of(tree) is storage
    assert isinstance(storage, CheckedPages)
    assert not save(storage, pool, hashes())  # whose weights nobody has told
    stored_weights(tree).renew("w" * 32, "rotary")
    assert save(storage, pool, hashes())
    later = _create(pool, enable_blend=True)  # attached by an operator
    assert load(later, pool, hashes()) == PAGES
    assert len(list((tmp_path / "store").iterdir())) == PAGES


def test_a_raw_backend_is_no_checked_storage() -> None:
    tree: Any = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=object()))
    assert storage_of(tree) is None
    bare: Any = SimpleNamespace()
    assert storage_of(bare) is None


def test_the_key_file_encrypts(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    pool = make_host_pool()
    storage = _create(pool, enable_blend=True, blend_store_key_file=str(key))
    tree: Any = SimpleNamespace(cache_controller=SimpleNamespace(storage_host_pool=pool))
    stored_weights(tree).renew("w" * 32, "rotary")
    assert save(storage, pool, hashes())
    assert load(storage, pool, hashes()) == PAGES
    for path in (tmp_path / "store").iterdir():
        assert b"lossless" not in path.read_bytes()
    assert load(_create(pool, enable_blend=True), pool, hashes()) == 0

    key.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        _create(pool, enable_blend=True, blend_store_key_file=str(key))


def test_an_unchecked_backend_runs_only_when_asked_for() -> None:
    pool = make_host_pool()
    with pytest.raises(UnsupportedError, match="--hicache-storage-backend sim is not checked"):
        _create(pool, "sim", enable_blend=True)
    with patch.object(StorageBackendFactory, "_create_builtin_backend", return_value="raw"):
        assert _create(pool, "sim", enable_blend=True, blend_store_unchecked=True) == "raw"


def test_a_missing_package_is_named() -> None:
    with (
        pytest.raises(UnsupportedError, match=r"pip install 'sgl-blend\[storage\]'"),
        plugin._packages_of_storage(),
    ):
        raise ImportError("No module named 'zstandard'")

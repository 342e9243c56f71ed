"""Registration fails closed: a hook that SGLang did not apply stops the server, by name."""

import dataclasses
import os
from typing import Any

import pytest

from sgl_blend.errors import UnsupportedError

EXPECTED = os.environ.get("EXPECT_SGLANG")


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """SGLang's record of applied hooks, as if all of ours were applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_blend.plugin import hook_targets

    applied = set(hook_targets())
    monkeypatch.setattr(HookRegistry, "_patched", applied)
    return applied


def test_all_hooks_in_place_are_accepted(patched: set[str]) -> None:
    from sgl_blend.plugin import check_hooks

    check_hooks(allow_untested=False)


def test_every_missing_hook_is_named(patched: set[str]) -> None:
    from sgl_blend.plugin import check_hooks, hook_targets

    for target in hook_targets():
        patched.remove(target)
        with pytest.raises(UnsupportedError, match=target.rsplit(".", 1)[-1]):
            check_hooks(allow_untested=False)
        patched.add(target)


@pytest.mark.engine
@pytest.mark.skipif(EXPECTED is None, reason="set by tools/test_versions.py")
def test_the_sglang_that_was_asked_for_is_under_test() -> None:
    import sglang

    assert sglang.__version__ == EXPECTED


def test_an_untested_version_starts_only_if_that_is_wanted(
    patched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_blend import sglang_adapter
    from sgl_blend.plugin import check_hooks

    unknown = dataclasses.replace(sglang_adapter.features(), version="0.6.0")
    monkeypatch.setattr(sglang_adapter, "features", lambda: unknown)

    with pytest.raises(UnsupportedError, match=r"0\.6\.0 was not tested.*--blend-allow-untested"):
        check_hooks(allow_untested=False)
    assert check_hooks(allow_untested=True) is unknown


@pytest.mark.engine
def test_every_hook_target_exists_in_this_sglang() -> None:
    import pkgutil

    from sgl_blend.plugin import hook_targets

    for target in hook_targets():
        assert callable(pkgutil.resolve_name(target)), target


def test_the_engine_refuses_to_blend_without_its_hooks(patched: set[str]) -> None:
    from sgl_blend.plugin import make_server_args

    made: list[dict[str, Any]] = []
    server_args = make_server_args(lambda **kwargs: made.append(kwargs))
    patched.remove("sglang.srt.managers.scheduler.Scheduler.__init__")

    with pytest.raises(UnsupportedError, match="did not apply the hook"):
        server_args(model_path="m", enable_blend=True)

    assert made == []

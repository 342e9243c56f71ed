"""Registration fails closed: a hook that SGLang did not apply stops the server, by name."""

from typing import Any

import pytest

from sgl_blend.errors import UnsupportedError


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

    check_hooks()


def test_every_missing_hook_is_named(patched: set[str]) -> None:
    from sgl_blend.plugin import check_hooks, hook_targets

    for target in hook_targets():
        patched.remove(target)
        with pytest.raises(UnsupportedError, match=target.rsplit(".", 1)[-1]):
            check_hooks()
        patched.add(target)


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

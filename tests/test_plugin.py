"""Registration fails closed: a hook that SGLang did not apply stops the server, by name."""

import dataclasses
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, distribution
from typing import Any

import pytest
import torch

from sgl_blend.errors import ConfigError, UnsupportedError

EXPECTED = os.environ.get("EXPECT_SGLANG")


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """SGLang's record of applied hooks, as if all of ours were applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_blend.engine.hook_points import hook_targets

    applied = set(hook_targets())
    monkeypatch.setattr(HookRegistry, "_patched", applied)
    return applied


def test_all_hooks_in_place_are_accepted(patched: set[str]) -> None:
    from sgl_blend.engine.hook_points import check_hooks

    check_hooks(allow_untested=False)


def test_every_missing_hook_is_named(patched: set[str]) -> None:
    from sgl_blend.engine.hook_points import check_hooks, hook_targets

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
    from sgl_blend.engine import versions
    from sgl_blend.engine.hook_points import check_hooks

    unknown = dataclasses.replace(versions.features(), version="0.6.0")
    monkeypatch.setattr(versions, "features", lambda: unknown)

    with pytest.raises(UnsupportedError, match=r"0\.6\.0 was not tested.*--blend-allow-untested"):
        check_hooks(allow_untested=False)
    assert check_hooks(allow_untested=True) is unknown


@pytest.mark.engine
def test_every_hook_target_exists_in_this_sglang() -> None:
    import pkgutil

    from sgl_blend.engine.hook_points import hook_targets

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


def test_the_engine_takes_a_setting_by_its_former_name() -> None:
    from sgl_blend.plugin import make_server_args

    server_args = make_server_args(lambda **kwargs: None)
    with pytest.raises(ConfigError, match=r"^blend_preset has no effect without enable_blend$"):
        server_args(model_path="m", blend_profile="p.json")


# --- the CPU platform ---


def test_the_wheel_brings_no_platform() -> None:
    groups = {entry.group for entry in distribution("sgl-blend").entry_points}
    assert groups == {"console_scripts", "sglang.srt.plugins"}


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the platform is for the CPU")
def test_the_cpu_platform_steps_back_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = pytest.importorskip("sglang_torch_cpu")
    assert platform.activate() == "sglang_torch_cpu.TorchCpuPlatform"

    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert platform.activate() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        assert platform.activate() is None
    with monkeypatch.context() as patch:
        other = EntryPoint("other", "another.platform:activate", "sglang.srt.platforms")
        patch.setattr(platform, "entry_points", lambda group: [other])
        assert platform.activate() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the platform is for the CPU")
def test_vector_functions_are_first_called_on_one_thread() -> None:
    # Forked from this process, a child would have called them; so a fresh one counts torch's calls.
    code = (
        "import torch, sglang_torch_cpu\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Calls(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, call, types, args=(), kwargs=None):\n"
        "        print(call, args[0].numel() if isinstance(args[0], torch.Tensor) else 0)\n"
        "        return call(*args, **(kwargs or {}))\n"
        "with Calls():\n"
        "    sglang_torch_cpu.activate()\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in ("cos", "sin", "exp"):
        assert told.count(f"aten.{name}.default 1") == 2, told

"""Hooks of forked engines reach every name that SGLang's own way of applying them reaches."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import hook_names
import pytest
from forked import run_forked
from sglang.srt.plugins import hook_registry


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    """Three loaded modules: where a function is from, and two that have imported it."""
    loaded = [ModuleType(f"preloaded_{name}") for name in ("source", "user", "later")]

    def hooked() -> str:
        return "original"

    for module in loaded[:2]:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.hooked = hooked  # type: ignore[attr-defined]
    hook_names.note_names()
    loaded[2].hooked = hooked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loaded[2].__name__, loaded[2])
    yield loaded
    hook_names._places.clear()
    hook_names._noted.clear()
    hook_names._known.clear()


def hook(source: ModuleType, propagate: Callable[[object, object, object], int]) -> int:
    def wrapped() -> str:
        return "wrapped"

    original, source.hooked = source.hooked, wrapped  # type: ignore[attr-defined]
    return propagate(original, wrapped, source)


@pytest.mark.parametrize("propagate", [hook_names._propagate, hook_names.propagate])
def test_a_hook_reaches_every_module_that_imported_the_function(
    modules: list[ModuleType], propagate: Callable[[object, object, object], int]
) -> None:
    source, user, _ = modules
    vars(user)["another_name"] = vars(user)["hooked"]  # added to a module that was noted
    assert hook(source, propagate) == 3
    names = [(module, "hooked") for module in modules] + [(user, "another_name")]
    assert [vars(module)[name]() for module, name in names] == ["wrapped"] * 4


def test_a_name_that_was_bound_anew_since_is_left_alone(modules: list[ModuleType]) -> None:
    source, user, _ = modules
    vars(user)["hooked"] = str
    assert hook(source, hook_names.propagate) == 1
    assert vars(user)["hooked"] is str


def _print_registry() -> None:
    sys.stdout.write(hook_registry._propagate_patch.__module__)


def test_forked_engines_use_it() -> None:
    assert run_forked(_print_registry) == (0, "hook_names")

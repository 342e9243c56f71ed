"""Let engines in forked processes apply their hooks without a look at every name of every module.

After each hook SGLang looks through all loaded modules for names bound to the hooked function.
That takes about 0.1 s a hook, and an engine applies two dozen hooks in each of its processes. Here
it is noted once where every callable is bound. A hook then looks there, and through the modules that
were loaded or got names since.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.plugins import hook_registry

_places: dict[int, list[tuple[Any, str]]] = {}
_noted: list[tuple[Any, dict[str, Any], int]] = []
"""Modules, their names, and how many these were."""
_known: set[str] = set()
_propagate = hook_registry._propagate_patch


def note_names() -> None:
    """Note where each callable is bound now, and how many names each module has."""
    _places.clear()
    _noted.clear()
    _known.clear()
    for called, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", {})
        _noted.append((module, names, len(names)))
        _known.add(called)
        for name, value in list(names.items()):
            if callable(value):
                _places.setdefault(id(value), []).append((module, name))


def propagate(original: object, wrapped: object, source_module: object) -> int:
    """Bind every name of a loaded module that is bound to a function to what replaces it.

    Args:
        original: The function that was hooked.
        wrapped: What replaces it.
        source_module: Where SGLang has replaced it already.

    Returns:
        How many names were bound anew, as SGLang's own function.
    """
    places = [place for place in _places.get(id(original), ()) if place[0] is not source_module]
    others = [module for module, names, size in _noted if len(names) != size]
    others += [module for called, module in sys.modules.items() if called not in _known]
    for module in others:
        if module is not source_module:
            names = list(getattr(module, "__dict__", {}).items())
            places += [(module, name) for name, value in names if value is original]
    count = 0
    for module, name in places:
        if vars(module).get(name) is original:
            setattr(module, name, wrapped)
            count += 1
    return count


def install() -> None:
    """Let SGLang's registry of hooks use the notes from here on."""
    note_names()
    hook_registry._propagate_patch = propagate

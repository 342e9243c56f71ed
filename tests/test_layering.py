"""Data flows one way: a module imports only from its own layer or below, and never in a ring."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"kernels"},
    {"errors", "fallback"},
    {"report", "storage"},
    {"metrics"},
    {"engine"},
    {"policies"},
    {"settings"},
    {"protocol", "fusion"},
    {"tuning", "radix_ext", "finding"},
    {"scheduler"},
    {"compose_fusion", "compose_finding"},
    {"compose"},
    {"plugin"},
    {"client", "sgl_blend"},
    {"commands"},
    {"__main__"},
)
"""Folders and modules of the package, from the ground up; those of one floor may not need each other.

``sgl_blend`` is the package itself, which names what client programs import.
"""
COMMANDS_MAY_NEED = {"errors", "fallback", "engine", "policies", "settings", "protocol", "commands"}
"""Commands start the real engine and ask it. They touch nothing that serves."""
MEASURED = {
    "sgl_blend.commands.bench.kernel_speed": "kernels",
    "sgl_blend.commands.bench.phase_times": "fusion",  # the names of its phases
    "sgl_blend.commands.evaluation.verify": "fusion",  # the bound of a rotation's error
    "sgl_blend.commands.planning.plan_storage_command": "tuning",  # pure formulas, as the next two
    "sgl_blend.commands.planning.plan_inputs": "tuning",
    "sgl_blend.commands.planning.tier_trial": "tuning",
    "sgl_blend.commands.codec.codec_command": "storage",  # profiles, which a server reads
    "sgl_blend.commands.codec.profile": "storage",
}


def _find_modules() -> dict[str, Path]:
    found = {}
    for top in ("sgl_blend", "radix_ext", "scheduler", "kernels"):
        folder = ROOT / top
        prefix = ("sgl_blend",) if top == "sgl_blend" else ("sgl_blend", top)
        for path in sorted(folder.rglob("*.py")):  # which follows no links
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((*prefix, *parts))] = path
    return found


MODULES = _find_modules()


def _names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def _imports(path: Path) -> set[str]:
    found = _names(path) & MODULES.keys()
    # `from sgl_blend.x import y` names the package and the module y: the module is what is needed.
    return {
        name
        for name in found
        if not (MODULES[name].stem == "__init__" and any(f.startswith(f"{name}.") for f in found))
    }


def _owner(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _floor(module: str) -> int:
    return next(index for index, owners in enumerate(LAYERS) if _owner(module) in owners)


def test_every_owner_has_a_floor_and_every_floor_an_owner() -> None:
    assert {_owner(module) for module in MODULES} == set().union(*LAYERS)


def test_imports_point_down() -> None:
    upward = [
        f"{module} -> {target}"
        for module, path in MODULES.items()
        for target in _imports(path)
        if _owner(target) != _owner(module) and _floor(target) >= _floor(module)
    ]
    # The package names what clients import, in a block that only type checkers read.
    assert [line for line in upward if not line.startswith("sgl_blend -> ")] == []


def test_no_import_cycles() -> None:
    graph = {module: _imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError and names the ring


def test_commands_reach_the_server_through_the_engine_alone() -> None:
    inward = [
        f"{module} -> {target}"
        for module, path in MODULES.items()
        if _owner(module) == "commands"
        for target in _imports(path)
        if _owner(target) not in COMMANDS_MAY_NEED and MEASURED.get(module) != _owner(target)
    ]
    assert not inward, inward


def test_kernels_know_nothing_of_sglang() -> None:
    for module, path in MODULES.items():
        if module.startswith("sgl_blend.kernels"):
            assert "sglang" not in path.read_text(), module

"""Data flows one way: a module imports only from its own layer or below, and never in a ring."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = (
    *("kernels", "core", "radix_ext", "scheduler", "plugin"),
    *("evaluation", "bench", "cli", "__main__"),
)
COMMANDS = ("evaluation", "bench", "cli", "__main__")
"""What nothing that serves may need."""


def _find_modules() -> dict[str, Path]:
    found = {}
    packages = ("sgl_blend", "sgl_blend/evaluation", "sgl_blend/bench", "sgl_blend/policies")
    for top in (*packages, "radix_ext", "scheduler", "kernels"):
        prefix = "sgl_blend" if top == "sgl_blend" else f"sgl_blend.{Path(top).name}"
        for path in sorted((ROOT / top).glob("*.py")):
            found[prefix if path.stem == "__init__" else f"{prefix}.{path.stem}"] = path
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
    # `from sgl_blend import x` names the package and the module x: the module is what is needed.
    return found - {"sgl_blend"} if len(found) > 1 else found


def _layer(module: str) -> int:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "core"
    return LAYERS.index(name if name in LAYERS else "core")


def test_every_layer_has_modules() -> None:
    assert {_layer(module) for module in MODULES} == set(range(len(LAYERS)))


def test_imports_point_down() -> None:
    upward = [
        f"{module} -> {target}"
        for module, path in MODULES.items()
        for target in _imports(path)
        if _layer(target) > _layer(module)
    ]
    assert not upward, upward


def test_no_import_cycles() -> None:
    graph = {module: _imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError and names the ring


def test_commands_reach_the_server_through_the_engine_alone() -> None:
    allowed = {LAYERS.index(name) for name in ("core", *COMMANDS)}
    # What times the kernels calls the kernels.
    measured = ("sgl_blend.bench.kernel_speed", LAYERS.index("kernels"))
    inward = [
        f"{module} -> {target}"
        for module, path in MODULES.items()
        if LAYERS[_layer(module)] in COMMANDS
        for target in _imports(path)
        if _layer(target) not in allowed and (module, _layer(target)) != measured
    ]
    assert not inward, inward


def test_kernels_know_nothing_of_sglang() -> None:
    for module, path in MODULES.items():
        if module.startswith("sgl_blend.kernels"):
            assert "sglang" not in path.read_text(), module

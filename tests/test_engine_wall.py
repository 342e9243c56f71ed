"""One folder knows how SGLang spells things; to everything else SGLang's objects are handles."""

import ast
from collections.abc import Iterator

import torch
from test_layering import MODULES, ROOT

ENGINE = "sgl_blend.engine"
OBJECTS = ast.parse((ROOT / "sgl_blend" / "engine" / "objects.py").read_text())
CLASSES = {node.name: node for node in OBJECTS.body if isinstance(node, ast.ClassDef)}

# JSON before it is checked, a tokenizer of transformers, matplotlib's axes, a class of torch's events,
# and values of no type.
UNTYPED = {
    "bench/kernel_speed.py": {"make_event"},
    "bench/plot.py": {"axes", "panel"},
    "evaluation/converters.py": {"chunks", "context", "ctxs", "dataset"},
    "evaluation/plot.py": {"axes"},
    "evaluation/prompts.py": {"tokenizer"},
    "protocol/gate.py": {"params", "preferred"},
    "protocol/request.py": {"custom_params", "find", "offsets", "value"},
    "protocol/separator.py": {"tokenizer"},
    "settings/config.py": {"value"},
    "sgl_blend/__init__.py": set(),
}


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


ATTRIBUTES = {name: _attributes(node) for name, node in CLASSES.items()}


def _modules(*, outside: bool) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules on one side of the wall; kernels know nothing of it."""
    for module, path in MODULES.items():
        if module.startswith("sgl_blend.kernels"):
            continue
        if module.startswith(ENGINE) != outside:
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def _own_names() -> set[str]:
    """Return every attribute and method that a class of ours or a tensor has."""
    found = set(dir(torch.Tensor))
    trees = [tree for outside in (True, False) for _, tree in _modules(outside=outside)]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and node.name not in CLASSES:
            found |= _attributes(node)
            found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield name and annotation of each parameter, without *args and **kwargs."""
    spec = function.args
    for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
        if arg.annotation is not None:
            yield arg.arg, ast.unparse(arg.annotation)


def find_untyped(where: str, tree: ast.Module) -> list[str]:
    """Return the parameters and fields whose type is Any."""
    allowed = next((names for file, names in UNTYPED.items() if where.endswith(file)), set())
    found = [
        f"{where}: {function.name}({name})"
        for function in _functions(tree)
        for name, annotation in _parameters(function)
        if annotation in ("Any", "Any | None") and name not in allowed
    ]
    return found + [
        f"{where}: {ast.unparse(node.target)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.annotation) in ("Any", "Any | None")
        and ast.unparse(node.target) not in allowed
    ]


def find_spelled(where: str, tree: ast.Module, own: set[str]) -> list[str]:
    """Return where an attribute of SGLang's is named."""
    sglangs = set().union(*ATTRIBUTES.values()) - own
    found = [
        f"{where}:{node.lineno}: .{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in sglangs
        and not ast.unparse(node.value).startswith(("torch.", "sys"))
    ]
    for function in _functions(tree):
        handles = {
            name: kind.removesuffix(" | None")
            for name, kind in _parameters(function)
            if kind.removesuffix(" | None") in CLASSES
        }
        found += [
            f"{where}:{node.lineno}: {node.value.id}.{node.attr}"
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in handles
        ]
    return found


def test_no_object_of_sglang_is_without_a_type() -> None:
    assert [
        line for where, tree in _modules(outside=True) for line in find_untyped(where, tree)
    ] == []


def test_no_attribute_of_sglang_is_named() -> None:
    own = _own_names()
    assert [
        line for where, tree in _modules(outside=True) for line in find_spelled(where, tree, own)
    ] == []


def test_only_the_engine_imports_sglang() -> None:
    found = [
        f"{where}: {ast.unparse(node)}"
        for where, tree in _modules(outside=True)
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang")
        or (
            isinstance(node, ast.Import)
            and any(alias.name.split(".")[0] == "sglang" for alias in node.names)
        )
    ]
    assert found == []


def test_every_attribute_that_a_handle_has_is_used_in_the_engine() -> None:
    used = {
        node.attr
        for _, tree in _modules(outside=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    unused = {name: sorted(names - used) for name, names in ATTRIBUTES.items() if names - used}
    assert unused == {}


def test_the_wall_sees_a_breach() -> None:
    breach = ast.parse(
        "def f(req: Req, batch: Any) -> None:\n    req.rid\n    batch.out_cache_loc\n"
    )
    assert find_untyped("x.py", breach) == ["x.py: f(batch)"]
    assert find_spelled("x.py", breach, own={"rid"}) == [
        "x.py:3: .out_cache_loc",
        "x.py:2: req.rid",
    ]

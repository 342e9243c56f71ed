import importlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sgl_blend
from sgl_blend import errors


def test_the_public_names_are_these() -> None:
    assert sgl_blend.__all__ == [
        "BlendConfig",
        "BlendError",
        "ConfigError",
        "RequestError",
        "UnsupportedError",
        "chunk",
        "configure",
        "plain",
    ]


@pytest.mark.parametrize("name", sgl_blend.__all__)
def test_a_public_name_is_importable_and_documented(name: str) -> None:
    assert getattr(importlib.import_module("sgl_blend"), name).__doc__


@pytest.mark.parametrize(
    "error",
    [errors.ConfigError, errors.UnsupportedError, errors.RequestError, errors.CommandError],
)
def test_every_error_is_a_blend_error(error: type[Exception]) -> None:
    assert error.__bases__ == (errors.BlendError,)


def test_a_blend_error_is_what_sglang_answers_with_400() -> None:
    assert errors.BlendError.__bases__ == (ValueError,)


def test_there_are_no_other_errors() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {
        "BlendError",
        "ConfigError",
        "UnsupportedError",
        "RequestError",
        "CommandError",
    }


# --- with msgspec alone ---

HELP = (
    "",
    "eval",
    "verify",
    "bench",
    "bench ttft",
    "bench throughput",
    "bench kernels",
    "bench profile",
    "plan-storage",
    "codec",
    "codec profile",
)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a Python that finds this package, msgspec and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    for module in (msgspec, sgl_blend):
        assert module.__file__ is not None
        package = Path(module.__file__).parent
        (folder / package.name).symlink_to(package)
    path = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    return [sys.executable, "-I", "-S", "-c", path]


def _run(python: list[str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python[:-1], python[-1] + code], capture_output=True, text=True, check=False
    )


def test_the_bare_python_is_bare(bare_python: list[str]) -> None:
    for name in ("torch", "sglang", "numpy", "httpx"):
        assert "ModuleNotFoundError" in _run(bare_python, f"import {name}").stderr


def test_a_client_needs_msgspec_alone(bare_python: list[str]) -> None:
    code = (
        "import sgl_blend\n"
        "sgl_blend.configure(separator='<sep>')\n"
        "print(sgl_blend.chunk('text'))\n"
        "print(sorted(set(sgl_blend.__all__) - set(dir(sgl_blend))))\n"
        "print([getattr(sgl_blend, name).__name__ for name in sgl_blend.__all__])\n"
    )
    done = _run(bare_python, code)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["<sep>text<sep>", "[]", str(sgl_blend.__all__)]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sgl_blend' has no attribute 'chunks'"):
        _ = sgl_blend.chunks


@pytest.mark.parametrize("command", HELP)
def test_help_needs_msgspec_alone(bare_python: list[str], command: str) -> None:
    code = (
        "import runpy\n"
        f"sys.argv = ['sgl-blend', *{command.split()}, '--help']\n"
        "runpy.run_module('sgl_blend', run_name='__main__')\n"
    )
    done = _run(bare_python, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: sgl-blend {command}".rstrip())


def test_a_command_names_what_it_needs(bare_python: list[str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    arguments = ["eval", "--model-path", str(tmp_path), "--data", str(data)]
    code = (
        "import runpy\n"
        f"sys.argv = ['sgl-blend', *{arguments!r}]\n"
        "runpy.run_module('sgl_blend', run_name='__main__')\n"
    )
    done = _run(bare_python, code)
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr

"""The repository layout, held by tests because one stray file would break it silently."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIBLINGS = ("radix_ext", "scheduler", "kernels")


@pytest.mark.parametrize("name", SIBLINGS)
def test_sibling_is_a_link_inside_the_package(name: str) -> None:
    assert (ROOT / "sgl_blend" / name).readlink() == Path("..") / name


@pytest.mark.parametrize("name", SIBLINGS)
def test_sibling_has_no_init(name: str) -> None:
    # With one, `import kernels` in this directory would find ours instead of Hugging Face's, and
    # transformers would turn its hub kernels off, or fail to import.
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists()


def test_every_directory_with_code_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    own_folder = {path: package for package, path in setuptools["package-dir"].items()}
    with_code = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("sgl_blend", *SIBLINGS)
        for path in (ROOT / top).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    packages = {own_folder.get(folder, folder.replace("/", ".")) for folder in with_code}
    assert packages == set(setuptools["packages"])


def test_top_level_names_stay_free() -> None:
    code = (
        "import importlib.util as u\n"
        f"for name in {SIBLINGS!r}:\n"
        "    spec = u.find_spec(name)\n"
        "    print(name, spec.origin if spec and spec.origin else '-')\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    ours = [name for name, origin in found.items() if Path(origin).parent == ROOT / name]
    assert not ours, out


def test_the_tests_run_against_this_checkout() -> None:
    import sgl_blend

    assert Path(sgl_blend.__file__).resolve().parent == ROOT / "sgl_blend"


FOLDERS = ("sgl_blend", *SIBLINGS, "tests", "benchmarks", "examples", "tools")
MAX_LINES, MAX_STATEMENTS = 400, 40


def _sources(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    ]


def test_no_file_is_long() -> None:
    lines = {path: path.read_text().count("\n") for path in _sources(*FOLDERS)}
    assert lines
    assert not {str(path): n for path, n in lines.items() if n > MAX_LINES}


def test_no_function_is_long() -> None:
    # ruff counts the statements; here, that nobody tells it not to.
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "PLR0915" in rules["select"]
    assert rules["pylint"]["max-statements"] == MAX_STATEMENTS
    ignored = [rules["ignore"], *rules["per-file-ignores"].values()]
    assert not any("PLR0915".startswith(code) for codes in ignored for code in codes)
    excused = [path for path in _sources(*FOLDERS) if "noqa: " + "PLR0915" in path.read_text()]
    assert not excused


def test_programs_find_each_other_without_help() -> None:
    # They run as modules from the repository root: python -m benchmarks.soak.
    programs = _sources("sgl_blend", *SIBLINGS, "benchmarks", "examples", "tools")
    assert not [path for path in programs if "sys." + "path" in path.read_text()]

"""Verify the committed model, then see a build of the package refuse it whose keys turn backwards.

    make verify-demo

The sabotaged build is a copy of the package in which one sign of the rotation is flipped. Exit status
0 if the model passes in the real build and is refused in the other.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from held_out import write_held_out

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SABOTAGE = (
    "sin = new_sin * old_cos - new_cos * old_sin",
    "sin = new_cos * old_sin - new_sin * old_cos",
)
SEED = 7


def verify(items: Path, python_path: Path, *flags: str) -> int:
    """Run ``sgl-blend verify`` of the package in python_path and return its exit status."""
    command = [sys.executable, "-m", "sgl_blend", "verify", "--model-path", str(FOLDER / "model")]
    env = ["env", f"PYTHONPATH={python_path}"]
    return subprocess.run(
        [*env, *command, "--data", str(items), *flags], cwd=python_path
    ).returncode


def sabotage(folder: Path) -> None:
    """Put a copy of the package into a folder, with one sign of the rotation flipped."""
    shutil.copytree(
        ROOT / "sgl_blend", folder / "sgl_blend", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = folder / "sgl_blend" / "kernels" / "delta_rope.py"
    text = path.read_text()
    if text.count(SABOTAGE[0]) != 1:
        raise RuntimeError(f"{path.name} has no line to sabotage")
    path.write_text(text.replace(*SABOTAGE))


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = folder / "held_out.jsonl"
        write_held_out(items, SEED, 32)
        print("this build:", flush=True)
        passed = verify(items, ROOT, "--profile", str(folder / "profile.json"))
        print("\na build whose keys turn backwards:", flush=True)
        sabotage(folder)
        refused = verify(items, folder)
    good = passed == 0 and refused == 1
    print(f"\nthis build: exit {passed}, the sabotaged one: exit {refused}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

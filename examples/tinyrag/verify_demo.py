"""Verify the committed model, then see a build of the package refuse it whose keys turn backwards.

    make verify-demo

The sabotaged build is a copy of the package in which one sign of the rotation is flipped. Both builds
then answer which of two statements is the latest, all chunks reused: what the refusal prevents. Exit
status 0 if the model passes in the real build and is refused in the other.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.tinyrag.held_out import write_items
from examples.tinyrag.world import LATEST_GAP, make_held_out, make_latest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SABOTAGE = (
    "sin = new_sin * old_cos - new_cos * old_sin",
    "sin = new_cos * old_sin - new_sin * old_cos",
)
SEED = 7
COUNT = 256
"""Prompts of each run; all but a quarter confirm, which two disagreements do not hinder."""
FEW = ("--ratios", "0.1,0.15,0.3", "--policies", "hkvd", "--check-layers", "2")
"""Settings, for time."""


def run(command: str, items: Path, python_path: Path, *flags: str) -> int:
    """Run a command of the package in python_path and return its exit status."""
    program = [sys.executable, "-m", "sgl_blend", command, "--model-path", str(FOLDER / "model")]
    line = ["env", f"PYTHONPATH={python_path}", *program, "--data", str(items), *flags]
    return subprocess.run(line, cwd=python_path).returncode


def accuracy_of_reuse(items: Path, python_path: Path) -> float:
    """Return how many items the package in python_path answers with every chunk reused as it is."""
    out = items.with_suffix(".json")
    flags = ["--policies", "none", "--max-new-tokens", "1", "--json", str(out)]
    if run("eval", items, python_path, *flags) != 0:
        raise RuntimeError("sgl-blend eval failed")
    accuracy: float = json.loads(out.read_text())["rows"][-1]["accuracy"]
    return accuracy


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
        items, latest = folder / "held_out.jsonl", folder / "latest.jsonl"
        write_items(items, make_held_out(SEED, COUNT))
        write_items(latest, make_latest(SEED, 50, (LATEST_GAP, 10**6)))
        sabotage(folder)
        print("this build:", flush=True)
        passed = run("verify", items, ROOT, *FEW, "--profile", str(folder / "profile.json"))
        right = accuracy_of_reuse(latest, ROOT)
        print("\na build whose keys turn backwards:", flush=True)
        refused = run("verify", items, folder, *FEW)
        wrong = accuracy_of_reuse(latest, folder)
    print(
        f"\nwhich statement is the latest: {right:.2f} right here, {wrong:.2f} in the other build"
    )
    print(f"this build: exit {passed}, the sabotaged one: exit {refused}")
    return 0 if passed == 0 and refused == 1 and wrong < right else 1


if __name__ == "__main__":
    sys.exit(main())

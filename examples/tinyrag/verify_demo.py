"""Verify the committed model, then see a build of the package refuse it whose keys turn backwards.

    make verify-demo
    make verify-demo VERIFY_ARGS="--count 160"    # fewer prompts

The sabotaged build is a copy of the package in which one sign of the rotation is flipped. Both builds
then answer which of two statements is the latest, all chunks reused: what the refusal prevents. Exit
status 0 if the model passes in the real build and is refused in the other.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Found:
    """What a build of the package says of the model.

    Attributes:
        status: Exit status of ``verify``.
        accuracy: Share of items that it answers rightly with every chunk reused as it is.
        printed: What its commands printed.
    """

    status: int
    accuracy: float
    printed: str


def run(command: str, items: Path, python_path: Path, *flags: str) -> tuple[int, str]:
    """Run a command of the package in python_path; return its exit status and what it printed."""
    program = [sys.executable, "-m", "sgl_blend", command, "--model-path", str(FOLDER / "model")]
    line = ["env", f"PYTHONPATH={python_path}", *program, "--data", str(items), *flags]
    done = subprocess.run(line, cwd=python_path, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def ask(python_path: Path, items: Path, latest: Path, out: Path) -> Found:
    """Let the package in python_path verify the model, and answer with every chunk reused."""
    status, verdict = run("verify", items, python_path, *FEW, "--profile", f"{out}.profile")
    flags = ["--policies", "none", "--max-new-tokens", "1", "--json", str(out)]
    failed, table = run("eval", latest, python_path, *flags)
    if failed != 0:
        raise RuntimeError("sgl-blend eval failed")
    accuracy = float(json.loads(out.read_text())["rows"][-1]["accuracy"])
    return Found(status, accuracy, verdict + table)


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=COUNT, help="prompts of each run (%(default)s)"
    )
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items, latest = folder / "held_out.jsonl", folder / "latest.jsonl"
        write_items(items, make_held_out(SEED, count))
        write_items(latest, make_latest(SEED, 50, (LATEST_GAP, 10**6)))
        sabotage(folder)
        print("Two builds verify the model, beside each other.", flush=True)
        with ThreadPoolExecutor(2) as pool:  # each of them uses one core
            here, there = pool.map(
                lambda path: ask(path, items, latest, folder / f"{path.name}.json"), (ROOT, folder)
            )
    print(f"this build:\n{here.printed}\na build whose keys turn backwards:\n{there.printed}")
    print(
        f"which statement is the latest: {here.accuracy:.2f} right here, {there.accuracy:.2f} in the "
        "other build"
    )
    print(f"this build: exit {here.status}, the sabotaged one: exit {there.status}")
    right = here.status == 0 and there.status == 1 and there.accuracy < here.accuracy
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

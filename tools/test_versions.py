"""Run the engine tests against each supported version of SGLang, in one environment.

The versions need the same run-time dependencies, and the CPU build of torch serves all of them. So
the environment keeps the one of requirements/cpu.lock; each other version is unpacked, without
dependencies, into a folder that goes before it on the path.

    make test-versions                             # all of them
    .venv/bin/python tools/test_versions.py 0.5.17 -- tests/test_laws.py -k l1
"""

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from sgl_blend.engine.versions import TESTED_VERSIONS

ROOT = Path(__file__).parents[1]
MARK = "pytest.mark.engine"
UNPACKED = ROOT / "build" / "sglang"


def unpack(wanted: str) -> Path:
    """Return the folder that holds a version of SGLang; fetch it if it is not there yet."""
    folder = UNPACKED / wanted
    if not (folder / f"sglang-{wanted}.dist-info").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*install, str(folder), f"sglang=={wanted}"], check=True)
    return folder


def with_version(wanted: str) -> list[str]:
    """Return the beginning of a command line that runs tests against a version of SGLang."""
    environment = ["env", f"EXPECT_SGLANG={wanted}"]
    if wanted != version("sglang"):
        environment.append(f"PYTHONPATH={unpack(wanted)}")
    return environment


def run_tests(wanted: str, pytest_args: Sequence[str]) -> tuple[int, int]:
    """Run the engine tests with one version.

    Returns:
        How many passed, and how many failed or could not run.
    """
    report = ROOT / "build" / f"test-sglang-{wanted}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    environment = with_version(wanted)
    # Other tests import what only the version of the lock file has.
    files = [str(path) for path in sorted(ROOT.glob("tests/test_*.py")) if MARK in path.read_text()]
    named = any(word.startswith("tests/") for word in pytest_args)
    chosen = ["-m", "engine and not slow", f"--junitxml={report}", *pytest_args]
    chosen += [] if named else files
    done = subprocess.run([*environment, sys.executable, "-m", "pytest", *chosen], cwd=ROOT)
    if not report.is_file():
        return 0, 1
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return total - skipped - failed, failed or int(done.returncode != 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the engine tests against versions of SGLang.")
    parser.add_argument("versions", nargs="*", help="versions; all supported ones by default")
    words = sys.argv[1:] if argv is None else list(argv)
    own, rest = (words, []) if "--" not in words else _split(words)
    versions = parser.parse_args(own).versions or list(TESTED_VERSIONS)
    results = {}
    for wanted in versions:
        print(f"=== SGLang {wanted}", flush=True)
        results[wanted] = run_tests(wanted, rest)
    for wanted, (passed, failed) in results.items():
        print(f"SGLang {wanted}: {passed} passed, {failed} failed")
    passed = sum(result[0] for result in results.values())
    failed = sum(result[1] for result in results.values())
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments and, after "--", those of pytest."""
    place = words.index("--")
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    raise SystemExit(main())

"""Run what docs/compatibility.md claims, on each supported version of SGLang, and keep what passed.

    .venv/bin/python -m tools.compatibility            # all versions
    .venv/bin/python -m tools.compatibility 0.5.17     # one; what was found on the others stays
    .venv/bin/python -m tools.compatibility --missing  # models and features that were not shown yet

Two runs of pytest for each version: laws L1 to L5 on a tiny model of every class that is served, and
the files of tests that are named for the features that are served. What passed is kept in
benchmarks/results/compatibility.json; `python -m tools.docs_pages` makes the tables of it. Exit
status 1 if a test failed.
"""

import argparse
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.engine.compatibility import NOT_TESTED
from sgl_blend.engine.served import SERVED, Feature
from sgl_blend.engine.versions import TESTED_VERSIONS
from tools.test_versions import with_version

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "compatibility.json"
NOT_SHOWN = "not shown"
LAWS = ("L1", "L2", "L3", "L4", "L5")
LAW_FILES = ("tests/test_laws.py", "tests/test_laws_stored.py", "tests/test_lifecycle.py")
LAW_TEST = re.compile(r"test_(l[1-5])_\w*\[(.*)\]")
"""A test of a law, and what it is called with."""


def files_of(feature: Feature) -> list[str]:
    """Return the files of tests that show a feature."""
    return re.findall(r"tests/\w+\.py", feature.test)


def run(wanted: str, name: str, pytest_args: Sequence[str]) -> list[ET.Element]:
    """Run tests against a version of SGLang; return what became of each."""
    report = ROOT / "build" / f"compatibility-{name}-{wanted}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    options = ["-q", "-n", "2", "--dist", "worksteal"]
    command = [*with_version(wanted), sys.executable, "-m", "pytest", *options]
    subprocess.run([*command, f"--junitxml={report}", *pytest_args], cwd=ROOT)
    return list(ET.parse(report).getroot().iter("testcase"))


def outcome(case: ET.Element) -> str:
    """Say whether a test passed, failed or was skipped."""
    marks = {child.tag for child in case}
    if marks & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in marks else "passed"


def laws_by_class(cases: Iterable[ET.Element], kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """Return which laws hold for each class of models: all of its tests passed, and there is one.

    Args:
        cases: Tests of laws.
        kinds: Class by kind of model.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for case in cases:
        match = LAW_TEST.fullmatch(case.attrib["name"])
        kind = None if match is None else _kind_in(match[2], kinds)
        if match is not None and kind is not None:
            found.setdefault((kinds[kind], match[1].upper()), set()).add(outcome(case))
    classes = sorted(set(kinds.values()))
    return {name: [law for law in LAWS if found.get((name, law)) == {"passed"}] for name in classes}


def _kind_in(arguments: str, kinds: Iterable[str]) -> str | None:
    """Return the kind of model among the arguments of a test; a dtype of KV may follow it."""
    found = (
        kind
        for kind in kinds
        if re.search(rf"(?:^|-){re.escape(kind)}(?:\+\w+)?(?:-|$)", arguments)
    )
    return max(found, key=len, default=None)


def counts_by_file(cases: Iterable[ET.Element]) -> dict[str, dict[str, int]]:
    """Return how many tests of each file passed, failed or were skipped."""
    found: dict[str, dict[str, int]] = {}
    for case in cases:
        file = case.attrib["classname"].replace(".", "/") + ".py"
        counts = found.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})
        counts[outcome(case)] += 1
    return dict(sorted(found.items()))


def served_kinds() -> dict[str, str]:
    """Return SGLang's class of each kind of test model that the laws run on."""
    program = """import json, law_prompts, tiny_models
kinds = (kind.partition("+")[0] for kind in law_prompts.SERVED_KINDS)
print(json.dumps({kind: tiny_models.class_of(kind) for kind in kinds}))"""
    command = ["env", f"PYTHONPATH={ROOT / 'tests'}", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def examine(wanted: str, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Run the tests of models and features against one version of SGLang.

    Args:
        wanted: The version.
        known: What was found before, of which the rest is run; None to run everything.
    """
    kinds = served_kinds()
    files = sorted({file for feature in SERVED for file in files_of(feature)})
    chosen = f"({' or '.join(_law_words())})"
    if known is not None:
        kinds = {kind: name for kind, name in kinds.items() if not _all_hold(known["laws"], name)}
        files = [file for file in files if known["features"].get(file, {"failed": 1})["failed"]]
        chosen += f" and ({' or '.join(kinds)})"
    laws = run(wanted, "laws", ["-m", "engine", *LAW_FILES, "-k", chosen]) if kinds else []
    features = run(wanted, "features", ["-m", "engine and not slow", *files]) if files else []
    found: dict[str, Any] = {
        "laws": laws_by_class(laws, kinds),
        "features": counts_by_file(features),
        "failed": sorted(_failures([*laws, *features])),
    }
    if known is None:
        origin = origin_of_script()
        origin["versions"]["sglang"] = wanted  # this process has the one of the lock file
        return {**origin, **found}
    merged = {name: {**known[name], **found[name]} for name in ("laws", "features")}
    before = set(known["failed"]) - {_name_of(case) for case in (*laws, *features)}
    return {**known, **merged, "failed": sorted({*before, *found["failed"]})}


def _all_hold(laws: Mapping[str, Sequence[str]], model_class: str) -> bool:
    return list(laws.get(model_class, ())) == list(LAWS)


def _law_words() -> Iterator[str]:
    for law in LAWS:
        yield f"test_{law.lower()}_"


def _failures(cases: Iterable[ET.Element]) -> Iterator[str]:
    for case in cases:
        if outcome(case) == "failed":
            yield _name_of(case)


def _name_of(case: ET.Element) -> str:
    return f"{case.attrib['classname']}::{case.attrib['name']}"


def kept() -> dict[str, Any]:
    """Return what was found last, by version."""
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


def laws_of(model_class: str, wanted: str) -> str:
    """Return the laws that hold for a class on a version, for a table."""
    if wanted in NOT_TESTED.get(model_class, ()):
        return "refused"
    held = kept()[wanted]["laws"].get(model_class, [])
    return f"{LAWS[0]} to {LAWS[-1]}" if held == list(LAWS) else ", ".join(held) or NOT_SHOWN


def passed_of(feature: Feature, wanted: str) -> str:
    """Return how many tests of a feature passed on a version, for a table."""
    if wanted in feature.refused_on:
        return "refused"
    counts = [kept()[wanted]["features"].get(file) for file in files_of(feature)]
    if not counts:
        return ""
    if any(one is None or one["failed"] or not one["passed"] for one in counts):
        return NOT_SHOWN
    return f"{sum(one['passed'] for one in counts)} passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", help="all supported ones by default")
    parser.add_argument("--missing", action="store_true", help="only what was not shown yet")
    args = parser.parse_args()
    wanted = args.versions or list(TESTED_VERSIONS)
    found = kept() if KEPT.is_file() else {}
    failed = []
    for name in wanted:
        print(f"=== SGLang {name}", flush=True)
        found[name] = examine(name, found[name] if args.missing else None)
        failed += [f"{name}: {test}" for test in found[name]["failed"]]
        KEPT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(*failed, f"{len(failed)} failed", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

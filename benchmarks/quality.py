"""Every policy on the test model: the tables and the plot of docs/quality.md.

    make quality       # writes benchmarks/results/quality-seed1.json, docs/quality.md, docs/quality.png

The prompts come from a development seed: defaults are chosen from these tables, so what is claimed of
the defaults is measured on others (`make eval`). Needs OMP_NUM_THREADS=1 to be fast, see the Makefile.

    .venv/bin/python -m benchmarks.quality --model build/tinyrag/seed2/model --name "seed 2" --seed 6
        --json benchmarks/results/quality-seed2.json --docs docs/quality.md
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tinyrag.evaluate import run_eval
from examples.tinyrag.world import make_held_out, make_latest

ROOT = Path(__file__).parents[1]
DEVELOPMENT_SEED = 5
POLICIES = (
    "hkvd", "hkvd-k", "gradual", "hybrid", "query-aware", "edge", "first-k", "random", "oracle",
)  # fmt: skip
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3)
PREFIXES = ("first", "bos", "none", "sinks")
GAPS = ((30, 60), (60, 100), (100, 150), (150, 400))

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One call of ``sgl-blend eval`` and its table: policies or prefixes down, ratios across.

    Attributes:
        title: Heading of the table.
        label: The key of a row that names the table's lines.
        policies: For ``--policies``.
        ratios: For ``--ratios``.
        check_layer: For ``--check-layers``.
        build_prefixes: For ``--build-prefixes``.
        by_gap: Ask for the latest of two statements only, and tell results apart by the words
            between the two.
    """

    title: str
    label: str
    policies: Sequence[str]
    ratios: Sequence[float]
    check_layer: int
    build_prefixes: Sequence[str] = ("first",)
    by_gap: bool = False

    def items(self, seed: int, count: int) -> list[dict[str, object]]:
        """Return the prompts."""
        if not self.by_gap:
            return make_held_out(seed, count)
        share = count // len(GAPS)
        return [item for gaps in GAPS for item in make_latest(seed, share, gaps)]

    def flags(self) -> list[str]:
        """Return it as arguments of the command."""
        return [
            *("--policies", ",".join(self.policies)),
            *("--ratios", ",".join(map(str, self.ratios))),
            *("--check-layers", str(self.check_layer)),
            *("--build-prefixes", ",".join(self.build_prefixes)),
        ]


RUNS = {
    "check1": Run("Check layer 1", "policy", ("none", *POLICIES), RATIOS, 1),
    "check2": Run("Check layer 2", "policy", ("none", *POLICIES), RATIOS, 2),
    "check3": Run("Check layer 3", "policy", ("none", "hkvd", "gradual"), RATIOS, 3),
    "prefixes": Run(
        "Build prefixes, hkvd, check layer 2", "build_prefix", ("hkvd",), RATIOS, 2, PREFIXES
    ),
    "gaps": Run(
        "The latest of two statements, by the words between them, check layer 2",
        "policy",
        ("none", "hkvd", "oracle"),
        (0.15, 0.5),
        2,
        by_gap=True,
    ),
}


def table(run: Run, rows: Sequence[Row]) -> str:
    """Return a Markdown table of accuracy and, in brackets, KL."""
    full, *blended = rows
    by_cell = {(row[run.label], row["ratio"]): row for row in blended}
    costs = [_cost(blended, ratio) for ratio in run.ratios]
    lines = [
        f"| {run.label.replace('_', ' ')} | " + " | ".join(f"{r:g}" for r in run.ratios) + " |",
        "|---|" + "---|" * len(run.ratios),
    ]
    for name in run.policies if run.label == "policy" else run.build_prefixes:
        cells = [_cell(by_cell.get((name, ratio))) for ratio in run.ratios]
        if (none := by_cell.get((name, 0.0))) is not None:
            cells = [f"{_cell(none)} at ratio 0"] + [""] * (len(run.ratios) - 1)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("| *cost* | " + " | ".join(f"*{cost:.0%}*" for cost in costs) + " |")
    title = f"**{run.title}** ({full['n']} prompts; full prefill {full['accuracy']:.3f})"
    return "\n".join([title, "", *lines])


def gap_table(run: Run, rows: Sequence[Row]) -> str:
    """Return a Markdown table of accuracy by the gap between two statements."""
    kinds = sorted(rows[0]["by_kind"], key=lambda kind: int(kind.split()[1]))
    names = [kind.removeprefix("latest, ").removesuffix(" words apart") for kind in kinds]
    lines = ["| policy | ratio | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(kinds)]
    for row in rows:
        cells = " | ".join(f"{row['by_kind'][kind]:.2f}" for kind in kinds)
        lines.append(f"| {row['policy']} | {row['ratio']:g} | {cells} |")
    return "\n".join([f"**{run.title}** ({rows[0]['n']} prompts)", "", *lines])


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row['accuracy']:.3f} ({row['kl']:.2g})"


def _cost(rows: Sequence[Row], ratio: float) -> float:
    """Return the largest cost at a ratio; policies differ by rounding alone."""
    costs: list[float] = [row["layer_rows_share"] for row in rows if row["ratio"] == ratio]
    return max(costs)


def insert(document: Path, name: str, text: str) -> None:
    """Put text between the two marks that name it in a document."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = document.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{document.name} has no place for {name!r}: {begin} … {end}")
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure every policy on the test model.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "tinyrag" / "model")
    parser.add_argument("--name", default="seed 1", help="of the model, in docs/quality.md")
    parser.add_argument("--seed", type=int, default=DEVELOPMENT_SEED, help="of the prompts")
    parser.add_argument("--count", type=int, default=200, help="prompts")
    parser.add_argument(
        "--runs", default=",".join(RUNS), help=f"comma-separated: {', '.join(RUNS)}"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/quality-seed1.json")
    parser.add_argument("--plot", type=Path, help="draw the run check2")
    parser.add_argument("--docs", type=Path, help="document to put the tables into")
    args = parser.parse_args()
    reports = {}
    for key in args.runs.split(","):
        run = RUNS[key]
        flags = [*run.flags(), "--max-new-tokens", "2"]
        if args.plot and key == "check2":
            flags += ["--plot", os.path.relpath(args.plot, ROOT)]
        reports[key] = run_eval(args.model, run.items(args.seed, args.count), *flags)
    args.json.write_text(json.dumps(reports, indent=1) + "\n")
    text = "\n\n".join(
        (gap_table if RUNS[key].by_gap else table)(RUNS[key], report["rows"])
        for key, report in reports.items()
    )
    print(text)
    if args.docs:
        insert(args.docs, f"tables of {args.name}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

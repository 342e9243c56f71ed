"""The report: JSON, table, warnings and plot."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from sgl_blend.commands.common.records import Machine, to_json
from sgl_blend.commands.evaluation.plot import draw, group_lines
from sgl_blend.commands.evaluation.report import Report, make_report, make_table, warnings
from sgl_blend.commands.evaluation.scores import Row

FIXED_NAMES = {
    *("policy", "ratio", "check_layer", "build_prefix", "n", "accuracy", "ci95", "f1", "rouge_l"),
    *("kl", "top1", "recomputed_share", "layer_rows_share"),
}
"""Programs outside the project read these."""


def row(policy: str = "hkvd", ratio: float = 0.15, **changed: Any) -> Row:
    values: dict[str, Any] = {
        "policy": policy,
        "ratio": ratio,
        "check_layer": 1,
        "build_prefix": "first",
        "n": 8,
        "accuracy": 0.5,
        "ci95": (0.25, 0.75),
        "accuracy_diff_ci95": (-0.5, 0.0),
        "f1": 0.5,
        "f1_ci95": (0.25, 0.75),
        "rouge_l": 0.5,
        "kl": 0.01,
        "kl_ci95": (0.0, 0.02),
        "top1": 0.875,
        "recomputed_share": ratio,
        "layer_rows_share": 0.25 + ratio / 2,
        "tokens": {},
        "fallbacks": 0,
    }
    return Row(**{**values, **changed})


def full_row() -> Row:
    return row("full", 1.0, check_layer=None, build_prefix=None, kl=0.0, layer_rows_share=1.0)


def report(*rows: Row) -> Report:
    return make_report("models/tiny", [full_row(), *rows])


def printed(found: Report) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(make_table(found))
    return out.getvalue()


def test_the_json_holds_the_fixed_names_and_nulls_for_full_prefill() -> None:
    written = json.loads(to_json(report(row())))

    full, blended = written["rows"]
    assert written["model"] == "models/tiny"
    assert blended.keys() >= FIXED_NAMES
    assert (full["policy"], full["check_layer"], full["build_prefix"]) == ("full", None, None)
    assert blended["ci95"] == [0.25, 0.75]


def test_the_json_says_where_it_comes_from() -> None:
    written = json.loads(to_json(report()))
    assert {"python", "sglang", "torch", "sgl-blend"} <= written["versions"].keys()
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["processor"]
    assert written["date"].endswith("+00:00")


def test_a_machine_is_named_in_one_line() -> None:
    assert str(Machine(processor="X 1", gpu=None, cores=2)) == "X 1, 2 cores"
    assert str(Machine(processor="X 1", gpu="H200", cores=16)) == "H200, X 1, 16 cores"


def test_the_json_is_read_back_as_it_was() -> None:
    before = report(row(by_kind={"ref": 1.0}), row("none", 0.0, recomputed_share=None))
    assert msgspec.json.decode(to_json(before), type=Report) == before


def test_the_table_shows_every_row_with_its_interval() -> None:
    text = printed(report(row("gradual", 0.1), row("none", 0.0, recomputed_share=None)))
    lines = [line.split() for line in text.splitlines() if "first" in line]
    assert [line[:4] for line in lines] == [
        ["gradual", "0.1", "1", "first"],
        ["none", "0", "1", "first"],
    ]
    assert "[0.250, 0.750]" in text
    assert lines[0][-2:] == ["10.0%", "30.0%"]


def test_a_row_with_fallbacks_is_warned_of() -> None:
    fallen = row(fallbacks=2, fallback_reasons={"no_chunks": 2})
    (warning,) = warnings(report(row(), fallen))
    assert warning == ("hkvd at 0.15: 2 of 8 requests were not blended (no chunk in the prompt)")


def test_a_line_of_the_plot_is_a_policy_with_the_cheapest_point_first() -> None:
    rows = [row("hkvd", 0.3), row("random", 0.1), row("hkvd", 0.1)]
    lines = group_lines(rows)
    assert {label: [point.ratio for point in line] for label, line in lines.items()} == {
        "hkvd": [0.1, 0.3],
        "random": [0.1],
    }


def test_lines_are_told_apart_by_whatever_differs() -> None:
    assert set(group_lines([row(), row(check_layer=2)])) == {
        "hkvd, check layer 1",
        "hkvd, check layer 2",
    }
    assert set(group_lines([row(), row(build_prefix="bos")])) == {
        "hkvd, after first",
        "hkvd, after bos",
    }


def test_the_plot_is_written_also_where_kl_is_nothing(tmp_path: Path) -> None:
    rows = [row("hkvd", ratio) for ratio in (0.1, 0.2)]
    draw(report(*rows, row("all", 1.0, kl=0.0)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

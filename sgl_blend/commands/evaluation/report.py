"""What came out: JSON for programs, a table for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from sgl_blend.commands.common.records import (
    Machine,
    describe_machine,
    find_versions,
    without_folders,
)
from sgl_blend.commands.evaluation.scores import Row
from sgl_blend.fallback import message_of

if TYPE_CHECKING:
    from rich.table import Table


PACKAGES = ("sgl-blend", "sglang", "torch", "transformers", "rouge-score")
"""Whose versions decide the figures."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file the items came from."""

    file: str
    sha256: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, and how they came about; command and data are null without the command line."""

    model: str
    rows: list[Row]
    command: str | None
    date: str
    versions: dict[str, str]
    machine: Machine
    data: DataFile | None


def make_report(model_path: str, rows: list[Row]) -> Report:
    """Put rows together with what they were measured on."""
    return Report(
        model=without_folders(model_path),
        rows=rows,
        command=None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=find_versions(PACKAGES),
        machine=describe_machine(),
        data=None,
    )


def make_table(report: Report) -> Table:
    """Lay the rows out, full prefill first."""
    from rich import box
    from rich.table import Table

    num_items = report.rows[0].n
    table = Table(
        title=f"{report.model}: {num_items} items; [] 95 % bootstrap interval; "
        "cost: share of a full prefill's (token, layer) pairs",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("policy", "ratio", "check layer", "build prefix"):
        table.add_column(name, no_wrap=True)
    for name in ("accuracy", "F1", "Rouge-L", "KL", "top-1", "recomputed", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(report.rows):
        table.add_row(*_cells(row), end_section=number == 0)
    return table


def _cells(row: Row) -> list[str]:
    low, high = row.ci95
    return [
        row.policy,
        f"{row.ratio:g}",
        "" if row.check_layer is None else str(row.check_layer),
        row.build_prefix or "",
        f"{row.accuracy:.3f} \\[{low:.3f}, {high:.3f}]",
        f"{row.f1:.3f}",
        f"{row.rouge_l:.3f}",
        f"{row.kl:.2g}",
        f"{row.top1:.3f}",
        _share(row.recomputed_share),
        _share(row.layer_rows_share),
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def warnings(report: Report) -> list[str]:
    """Return one sentence for every row in which requests were not blended."""
    return [
        f"{row.policy} at {row.ratio:g}: {row.fallbacks} of {row.n} requests were not blended "
        f"({', '.join(sorted(message_of(reason) for reason in row.fallback_reasons))})"
        for row in report.rows
        if row.fallback_reasons
    ]

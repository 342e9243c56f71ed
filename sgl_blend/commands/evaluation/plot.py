"""Quality against cost, one line per policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_blend.commands.evaluation.report import Report
from sgl_blend.commands.evaluation.scores import Row

LEAST_KL = 1e-7
"""Smaller divergences are drawn here: below is the noise of float32."""


def draw(report: Report, path: Path) -> None:
    """Write accuracy and KL against the share of a full prefill's work as a picture.

    Args:
        report: Its first row is full prefill, drawn as a horizontal line.
        path: File to write; the ending decides the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    quality, divergence = figure.subplots(1, 2)
    full, *_ = report.rows
    for number, (label, rows) in enumerate(group_lines(report.rows[1:]).items()):
        style = {
            "label": label,
            "color": f"C{number % 10}",
            "linestyle": "-" if number < 10 else ":",
            "marker": "o",
            "markersize": 4,
        }
        cost = [_cost(row) for row in rows]
        quality.plot(cost, [row.accuracy for row in rows], **style)
        divergence.plot(cost, [max(row.kl, LEAST_KL) for row in rows], **style)
    quality.axhline(full.accuracy, color="black", linestyle="--", label="full prefill")
    _label(quality, "accuracy")
    _label(divergence, "KL(full || blended) of the first token, nats")
    divergence.set_yscale("log")
    quality.legend(fontsize="small")
    figure.suptitle(f"{Path(report.model).name}, {full.n} prompts")
    figure.savefig(path, dpi=150)


def group_lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows into lines by policy, and by what else differs among them, cheapest first."""
    several_layers = len({row.check_layer for row in rows}) > 1
    several_prefixes = len({row.build_prefix for row in rows}) > 1
    lines: dict[str, list[Row]] = {}
    for row in rows:
        label = row.policy
        if several_layers:
            label += f", check layer {row.check_layer}"
        if several_prefixes:
            label += f", after {row.build_prefix}"
        lines.setdefault(label, []).append(row)
    return {label: sorted(line, key=_cost) for label, line in lines.items()}


def _cost(row: Row) -> float:
    return 1.0 if row.layer_rows_share is None else row.layer_rows_share


def _label(axes: Any, quantity: str) -> None:
    axes.set_xlabel("cost: share of a full prefill's (token, layer) pairs")
    axes.set_ylabel(quantity)
    axes.grid(visible=True, alpha=0.3)

"""The figures as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_blend.commands.bench.pair import NAMES
from sgl_blend.commands.bench.report import KernelsReport, ThroughputReport, TtftReport
from sgl_blend.commands.bench.ttft import TtftRow


def draw_ttft(report: TtftReport, path: Path) -> None:
    """Draw speed-up and its ceiling against prompt length, a panel per chunk length and batch.

    Args:
        report: Its rows with figures are drawn.
        path: File to write; the ending decides the format.
    """
    rows = [row for row in report.rows if row.figures is not None]
    panels = sorted({_panel_of(row) for row in rows})
    figure, axes = _make_panels(max(1, len(panels)))
    for (chunk_tokens, batch), panel in zip(panels, axes, strict=False):
        chosen = [row for row in rows if _panel_of(row) == (chunk_tokens, batch)]
        _draw_panel(panel, chosen)
        panel.set_title(f"chunks of about {chunk_tokens}, batch {batch}", fontsize="medium")
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.suptitle(f"{report.circumstances.model}: TTFT of stock over blended; dashed: ceiling")
    figure.savefig(path, dpi=150)


def _panel_of(row: TtftRow) -> tuple[int, int]:
    return row.nominal_chunk_tokens, row.batch


def _draw_panel(panel: Any, rows: Sequence[TtftRow]) -> None:
    variants = sorted({(row.policy, row.ratio) for row in rows})
    several = len({policy for policy, _ in variants}) > 1
    for number, (policy, ratio) in enumerate(variants):
        line = [
            (row.prompt_tokens, row.figures)
            for row in sorted(rows, key=lambda row: row.prompt_tokens)
            if (row.policy, row.ratio) == (policy, ratio) and row.figures is not None
        ]
        lengths = [length for length, _ in line]
        below = [found.speedup - found.speedup_ci95[0] for _, found in line]
        above = [found.speedup_ci95[1] - found.speedup for _, found in line]
        panel.errorbar(
            lengths,
            [found.speedup for _, found in line],
            yerr=[below, above],
            color=f"C{number}",
            marker="o",
            markersize=4,
            label=f"{policy}, ratio {ratio:g}" if several else f"ratio {ratio:g}",
        )
        ceilings = [found.ceiling for _, found in line]
        panel.plot(lengths, ceilings, color=f"C{number}", linestyle="--", marker="_")
    panel.axhline(1.0, color="black", linewidth=0.8)
    _label(panel, "prompt tokens", "speed-up")
    panel.legend(fontsize="small")


def draw_throughput(report: ThroughputReport, path: Path) -> None:
    """Draw TTFT and completed requests against offered ones.

    Args:
        report: What was found.
        path: File to write; the ending decides the format.
    """
    outcome = report.outcome
    figure, (ttft, completed) = _make_panels(2)
    for number, name in enumerate(NAMES):
        points = [(p.rate, load) for p in outcome.points if (load := p.load(name)) is not None]
        rates = [rate for rate, _ in points]
        style: dict[str, Any] = {"color": f"C{number}", "marker": "o", "markersize": 4}
        ttft.plot(rates, [load.ttft_p50_s for _, load in points], label=f"{name}, p50", **style)
        ttft.plot(
            rates,
            [load.ttft_p90_s for _, load in points],
            label=f"{name}, p90",
            linestyle=":",
            **style,
        )
        completed.plot(rates, [load.completed_rate for _, load in points], label=name, **style)
    ttft.axhline(outcome.bound_s, color="black", linestyle="--", label="bound")
    ttft.set_yscale("log")
    _label(ttft, "offered requests/s", "TTFT, s")
    _label(completed, "offered requests/s", "completed requests/s")
    ttft.legend(fontsize="small")
    completed.legend(fontsize="small")
    figure.suptitle(report.circumstances.model)
    figure.savefig(path, dpi=150)


def draw_kernels(report: KernelsReport, path: Path) -> None:
    """Draw each kernel's share of the roofline, a bar per shape.

    Args:
        report: Its rows are drawn.
        path: File to write; the ending decides the format.
    """
    figure, (axes,) = _make_panels(1)
    found = report.speeds.rows
    kernels = list(dict.fromkeys(row.kernel for row in found))
    shapes = list(dict.fromkeys(row.shape for row in found))
    height = 0.8 / len(shapes)
    for number, shape in enumerate(shapes):
        rows = [row for row in found if row.shape == shape]
        places = [kernels.index(row.kernel) + number * height for row in rows]
        bars = axes.barh(places, [row.share for row in rows], height, label=shape)
        axes.bar_label(bars, [f"{row.ms:.3g} ms" for row in rows], padding=2, fontsize="small")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(kernels))], kernels)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    _label(axes, "share of the roofline", "")
    axes.legend(fontsize="small")
    figure.suptitle(found[0].device)
    figure.savefig(path, dpi=150)


def _make_panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, 3)
    lines = -(-count // columns)
    figure = Figure(figsize=(5 * columns, 4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def _label(axes: Any, across: str, upward: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    axes.grid(visible=True, alpha=0.3)

"""Draw how often deadlines were missed, by the level that chunks came at."""

from pathlib import Path
from typing import Any

INK, MUTED, ACCENT = "#1f2430", "#8a8f9c", "#c8553d"


def draw(found: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        found: What benchmarks.streaming measured.
        path: Of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = found["cases"]
    names = list(dict.fromkeys(name.split(",")[0] for name in cases))
    rows = list(found["mean"])
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        mine = {label: case for label, case in cases.items() if label.startswith(f"{name},")}
        slos = [1000 * case["allowance_s"] for case in mine.values()]
        begun: dict[float, list[str]] = {}
        for row in rows:
            shares = [100 * case["rows"][row]["violations"] for case in mine.values()]
            is_adaptive = row == "adaptive"
            axis.plot(
                slos,
                shares,
                marker="o",
                color=ACCENT if is_adaptive else MUTED,
                lw=2 if is_adaptive else 1,
                zorder=2 if is_adaptive else 1,
            )
            begun.setdefault(shares[0], []).append(row)
        for share, together in begun.items():  # rows that begin alike share a label
            place = (slos[0], share)
            axis.annotate(
                ", ".join(together),
                place,
                xytext=(5, 4),
                textcoords="offset points",
                color=INK,
                fontsize=7,
            )
        axis.set_title(name, loc="left")
        axis.set(xlabel="deadline beyond the least, ms", ylim=(-3, 103))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("first tokens after the deadline, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)

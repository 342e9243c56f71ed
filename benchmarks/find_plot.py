"""Draw what is found without marks beside what is found with every document marked."""

from pathlib import Path
from typing import Any

MARKED, LEARNED, MUTED = "#2f6fb0", "#c8553d", "#8a8f9c"


def draw(streams: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        streams: The part of that name of what benchmarks.find measured.
        path: Of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(streams["rag"])
    for place, name in enumerate(names):
        row = streams["rag"][name]
        left.plot(
            [row["exact"], row["exact"] + row["repeated"]], [place, place], color="#e4e6eb", lw=9
        )
        left.plot(
            row["exact"] + streams["marked"][name]["hit"], place, "|", ms=16, mew=2, color=MARKED
        )
        left.plot(row["exact"] + row["hit"], place, "o", ms=6, color=LEARNED)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set(xlim=(0, 1), xlabel="share of a prompt's tokens")
    left.set_title("documents by Zipf's law, new orders", loc="left", fontsize=10)
    handles = [
        left.plot([], [], color="#e4e6eb", lw=9)[0],
        left.plot([], [], "|", ms=12, mew=2, color=MARKED)[0],
        left.plot([], [], "o", color=LEARNED)[0],
    ]
    words = ["came before", "marked", "learned"]
    left.legend(
        handles,
        words,
        frameon=False,
        ncols=3,
        loc="upper left",
        bbox_to_anchor=(-0.4, -0.12),
        fontsize=8,
    )
    others = {name: row for name, row in streams["others"].items() if row["repeated"] > 0.05}
    right.barh(
        range(len(others)), [row["recall"] for row in others.values()], color=LEARNED, height=0.5
    )
    right.set_yticks(range(len(others)), [name.replace(", ", "\n") for name in others], fontsize=8)
    right.invert_yaxis()
    right.set(xlim=(0, 1), xlabel="repeated tokens found")
    right.set_title("agents", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)

"""Draw the time to first token by the bandwidth of the store, beside what CacheBlend claims."""

from pathlib import Path
from typing import Any

import numpy as np

INK, MUTED = "#1f2430", "#8a8f9c"
COLOURS = {"fixed": "#2f6fb0", "controller": "#c8553d"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        record: What benchmarks.tiers measured.
        path: Of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    medians, num_mb = record["medians_s"], record["num_bytes"] / 1e6
    compute_s, text_s = medians["fixed"]["device"], medians["fixed"]["text"]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bandwidth = np.geomspace(10, 10_000, 200)
    load_s = num_mb / bandwidth
    axes.plot(bandwidth, np.maximum(load_s, compute_s), color=MUTED, ls="--")
    axes.annotate("max(load, compute)", (12, max(num_mb / 12, compute_s)), color=MUTED, va="bottom")
    axes.axhline(text_s, color=INK, lw=1)
    axes.annotate("text: full prefill", (10_000, text_s), color=INK, ha="right", va="bottom")
    axes.axhline(compute_s, color=INK, lw=1, ls=":")
    axes.annotate("chunks on the device", (10_000, compute_s), color=INK, ha="right", va="top")
    for mode, rows in medians.items():
        throttled = {float(p.split()[1]): s for p, s in rows.items() if p.startswith("file ")}
        measured = sorted(throttled.items())
        axes.plot(*zip(*measured, strict=True), marker="o", color=COLOURS[mode], label=mode)
    axes.set(
        xscale="log", yscale="log", xlabel="MB/s of the store", ylabel="seconds to first token"
    )
    axes.set_title(f"{num_mb:.0f} MB of chunk KV in files, read at a given rate", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)

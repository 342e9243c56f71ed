"""What the agent's run found: the table, the JSON, the plot, and whether it is good enough."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from examples.agent.measure import Turn, shares

FIRST_TURN = 4
"""By then text that stays has been seen three times."""
LEAST_FOUND, LEAST_FASTER = 0.85, 3.0


def make_table(turns: Sequence[Turn], notes: Sequence[str]) -> Table:
    """Lay the turns out: tokens by what became of them, and times in seconds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("turn", justify="right")
    table.add_column("the agent", no_wrap=True)
    for name in ("prompt", "prefix", "reused", "recomputed", "computed", "repeated, found"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT", "stock", "faster"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (turn, note) in enumerate(zip(turns, notes, strict=True), start=1):
        tokens, repeated = turn.tokens, turn.repeats.repeated
        kinds = ("prompt", "prefix", "reused", "recomputed", "computed")
        table.add_row(
            str(number),
            note,
            *(str(tokens[f"{kind}_tokens"]) for kind in kinds),
            f"{turn.found / repeated:.0%}" if repeated else "",
            f"{turn.blend_s:.2f}",
            f"{turn.stock_s:.2f}",
            f"{turn.stock_s / turn.blend_s:.1f}x",
        )
    return table


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures that the run is judged by, and all turns."""
    found, faster = shares(turns, FIRST_TURN)
    return {
        "first_turn": FIRST_TURN,
        "found_of_repeated": found,
        "faster_than_stock": faster,
        "turns": [
            {
                **turn.tokens,
                "exact": turn.repeats.exact,
                "repeated": turn.repeats.repeated,
                "found": turn.found,
                "ttft_s": turn.blend_s,
                "stock_ttft_s": turn.stock_s,
            }
            for turn in turns
        ],
    }


def shortfalls(told: dict[str, Any], *, any_speed: bool) -> list[str]:
    """Return a sentence for every bound that was missed."""
    missed = []
    if told["found_of_repeated"] < LEAST_FOUND:
        missed.append(f"found {told['found_of_repeated']:.2f} of what repeats, not {LEAST_FOUND}")
    if told["faster_than_stock"] < LEAST_FASTER and not any_speed:
        missed.append(f"{told['faster_than_stock']:.1f} times as fast, not {LEAST_FASTER}")
    return missed


def draw(told: dict[str, Any], path: Path) -> None:
    """Write a PNG: what became of the tokens, and the time to first token beside stock.

    Args:
        told: From figures.
        path: Of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    turns = told["turns"]
    numbers = range(1, len(turns) + 1)
    below = [0] * len(turns)
    for kind, name, color in (
        ("prefix_tokens", "exact prefix", "#8a8f9c"),
        ("reused_tokens", "found and reused", "#2f6fb0"),
        ("recomputed_tokens", "found and recomputed", "#8fb8de"),
        ("computed_tokens", "computed", "#c8553d"),
    ):
        heights = [turn[kind] for turn in turns]
        left.bar(numbers, heights, bottom=below, color=color, label=name, width=0.7)
        below = [one + more for one, more in zip(below, heights, strict=True)]
    left.set(xlabel="turn", title="tokens of the prompt")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.plot(numbers, [turn["stock_ttft_s"] for turn in turns], "o-", color="#8a8f9c")
    right.plot(numbers, [turn["ttft_s"] for turn in turns], "o-", color="#2f6fb0")
    right.annotate(
        "stock",
        (len(turns), turns[-1]["stock_ttft_s"]),
        (0, 6),
        textcoords="offset points",
        ha="right",
    )
    right.annotate(
        "--blend-find learned",
        (len(turns), turns[-1]["ttft_s"]),
        (0, 6),
        textcoords="offset points",
        ha="right",
    )
    right.set(xlabel="turn", title="time to first token, seconds", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)

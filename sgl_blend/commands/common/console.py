"""What the commands show while they work, and where their results go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int], None]
"""Takes what is being done, and how many requests were answered since the last call."""

_TABLE_WIDTH = 150
"""Columns of the table where the output is no terminal."""


@contextmanager
def progress(console: Console, num_requests: int | None) -> Iterator[Progress]:
    """Show a bar while the block runs; None where it is not known how many requests there will be."""
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the model", total=num_requests)

        def watch(what: str, answered: int) -> None:
            bar.update(task, description=what, advance=answered)

        yield watch


def output_console() -> Console:
    """Return where results go: as wide as the terminal, or wide enough for the table."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print a sentence as one line, however long, so that a log can be searched for it."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

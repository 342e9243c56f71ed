"""What the commands share: flags, checks before work begins, progress and output."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sgl_blend.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console

    from sgl_blend.commands.evaluation.evaluate import Watch
    from sgl_blend.commands.evaluation.prompts import Templates

_TABLE_WIDTH = 150
"""Columns of the table where the output is no terminal."""

_Value = TypeVar("_Value")


def add_engine_and_template_flags(parser: argparse.ArgumentParser) -> None:
    """Add how items become text and how the engine is started."""
    for part in ("system", "chunk", "question"):
        parser.add_argument(
            f"--{part}-template",
            help=f"format string with {{{part}}}; by default the model folder's own, "
            f"else {{{part}}} alone",
        )
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=_engine_arg,
        metavar="NAME=VALUE",
        help="further keyword argument of sglang.Engine, its value as JSON or text; repeatable",
    )


def read_templates(args: argparse.Namespace) -> Templates:
    """Return the templates that the parsed flags and the model's folder give.

    Raises:
        CommandError: One is malformed.
    """
    from sgl_blend.commands.evaluation.prompts import find_templates

    return find_templates(
        args.model_path,
        system_template=args.system_template,
        chunk_template=args.chunk_template,
        question_template=args.question_template,
    )


def check_limit(limit: int | None) -> None:
    """Refuse a ``--limit`` below 1.

    Raises:
        CommandError: It is.
    """
    if limit is not None and limit < 1:
        raise CommandError(f"--limit must be at least 1, got {limit}")


def check_packages(command: str, names: Sequence[str], extra: str = "eval") -> None:
    """Refuse to go on without packages.

    Args:
        command: Who needs them.
        names: Of the modules.
        extra: Of sgl-blend that brings them.

    Raises:
        CommandError: One is missing.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"sgl-blend {command} needs {', '.join(missing)}; install them with "
            f"`pip install 'sgl-blend[{extra},sglang]'`"
        )


def check_outputs(paths: Iterable[Path]) -> None:
    """Refuse to work for files that could not be written in the end.

    Raises:
        CommandError: The folder of one is missing.
    """
    for path in paths:
        if not path.absolute().parent.is_dir():
            raise CommandError(f"cannot write {path}: {path.parent} is not a folder")


def list_of(kind: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """Read comma-separated values, each once."""

    def read(text: str) -> list[_Value]:
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    read.__name__ = f"comma-separated {kind.__name__}"  # argparse's messages name the type
    return read


def _engine_arg(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@contextmanager
def progress(console: Console, num_requests: int | None) -> Iterator[Watch]:
    """Show a bar while the block runs; None where it is not known how many requests there will be."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
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

"""Arguments that several commands take, and checks before work begins."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from sgl_blend.errors import CommandError

_Value = TypeVar("_Value")


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

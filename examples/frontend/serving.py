"""What both programs share: a server to ask, documents, and a table of what became of the tokens."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang
from rich import box
from rich.console import Console
from rich.table import Table

import sgl_blend
from examples.demo.material import MODULES, Recipe, cut, prepare, render
from sgl_blend.commands.common.server import running

FOLDER = Path(__file__).resolve().parents[2] / "build" / "frontend"
SHORT = Recipe(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2)
KINDS = ("prompt", "prefix", "reused", "recomputed", "computed")
FLAGS = ["--enable-blend", "--blend-on-miss", "build", "--blend-when", "always"]
"""A missing chunk is built before its request is answered, so the very next call finds it."""


def arguments(what: str) -> argparse.Namespace:
    """Read the command line: url and short."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--url", help="of a blending server; without it one is started")
    parser.add_argument("--short", action="store_true", help="start it with a tiny model")
    return parser.parse_args()


@contextmanager
def blending(url: str | None, *, short: bool) -> Iterator[None]:
    """Let SGLang's programs ask a blending server: a given one, or one with the demo's model."""
    if url is not None:
        _use(url)
        yield
        return
    folder = FOLDER / ("short" if short else "full")
    folder.mkdir(parents=True, exist_ok=True)
    material = prepare(folder, SHORT if short else Recipe(), print)
    print("starting a server ...")
    with running(material.model, FLAGS, folder / "server.log") as server:
        _use(server.url)
        yield


def _use(url: str) -> None:
    sgl_blend.configure(url)
    sglang.set_default_backend(sglang.RuntimeEndpoint(url))


def documents(count: int) -> list[str]:
    """Return the beginnings of the documentation of some modules."""
    return [next(cut(render(name), _Words())) for name in MODULES[:count]]


class _Words:
    """Counts words as if they were tokens; a little fewer than there are."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[str]:
        return text.split()


def show(title: str, calls: Sequence[tuple[str, Any]]) -> None:
    """Print what became of the tokens of each call.

    Args:
        title: Of the table.
        calls: Names, and what get_meta_info() told of each.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("call", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for name, told in calls:
        (report,) = told["sgl_blend"]
        table.add_row(name, *(str(report[f"{kind}_tokens"]) for kind in KINDS))
    Console(width=100).print(table)

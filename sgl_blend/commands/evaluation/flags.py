"""Flags of ``eval`` and ``verify``: how items become text, and how the engine is started."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_blend.commands.evaluation.prompts import Templates


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


def _engine_arg(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value

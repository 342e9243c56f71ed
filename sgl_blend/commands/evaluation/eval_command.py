"""``sgl-blend eval``: the table of answer quality, printed, drawn and written as JSON."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_blend.commands.common.arguments import check_limit, check_outputs, check_packages, list_of
from sgl_blend.commands.common.console import output_console, print_line, progress
from sgl_blend.commands.evaluation.converters import FORMATS, read_items
from sgl_blend.commands.evaluation.flags import add_engine_and_template_flags, read_templates
from sgl_blend.policies import NAMED
from sgl_blend.settings.config import BUILD_PREFIXES, BlendConfig

if TYPE_CHECKING:
    from sgl_blend.commands.evaluation.evaluate import Settings


def add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``eval`` command."""
    defaults = BlendConfig()
    parser = commands.add_parser(
        "eval",
        help="measure answer quality and divergence from full prefill through the real engine",
        description="Answer the items of a file with a full prefill and blended in many ways, "
        "through the real engine, and print how good and how costly each way is.",
        epilog="On a CPU a small model answers many times faster with OMP_NUM_THREADS=1.",
    )
    parser.set_defaults(run=run_eval)
    parser.add_argument("--model-path", required=True, help="folder or name of the model")
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        help="items, one JSON object a line: system, chunks, question, answers or answer, kind",
    )
    parser.add_argument(
        "--format", choices=("auto", *FORMATS), default="auto", help="of the data file"
    )
    parser.add_argument("--limit", type=int, help="take the first so many items only")
    parser.add_argument(
        "--policies",
        type=list_of(str),
        default=["default"],
        help=f"comma-separated: default (the server's), {', '.join(NAMED)}",
    )
    parser.add_argument(
        "--ratios",
        type=list_of(float),
        default=[defaults.blend_recompute_ratio],
        help="comma-separated shares of the reused tokens to recompute",
    )
    parser.add_argument(
        "--check-layers",
        type=list_of(int),
        default=[defaults.blend_check_layer],
        help="comma-separated; one engine is started for each, and each build prefix",
    )
    parser.add_argument(
        "--build-prefixes",
        type=list_of(str),
        default=[defaults.blend_build_prefix],
        help=f"comma-separated: {', '.join(BUILD_PREFIXES)}",
    )
    parser.add_argument("--max-new-tokens", type=int, default=32, help="longest answer")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap intervals")
    add_engine_and_template_flags(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw quality against cost")


def run_eval(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    packages = ("numpy", "rich", "rouge_score", "sglang", "transformers")
    check_packages("eval", [*packages, "matplotlib"] if args.plot else packages)
    check_outputs(path for path in (args.json, args.plot) if path is not None)
    from msgspec.structs import replace
    from rich.console import Console

    from sgl_blend.commands.common.records import command_line, to_json
    from sgl_blend.commands.evaluation.evaluate import evaluate
    from sgl_blend.commands.evaluation.report import DataFile, make_table, warnings

    check_limit(args.limit)
    items = read_items(args.data, args.format, args.limit)
    settings = make_settings(args)
    console = Console(stderr=True)
    with progress(console, (len(settings.variants()) + 1) * len(items)) as watch:
        report = evaluate(settings, items, watch)
    report = replace(
        report,
        command=command_line(args.argv),
        data=DataFile(
            file=args.data.name, sha256=hashlib.sha256(args.data.read_bytes()).hexdigest()
        ),
    )
    output_console().print(make_table(report))
    for warning in warnings(report):
        print_line(console, f"warning: {warning}", "yellow")
    if args.json is not None:
        args.json.write_bytes(to_json(report))
    if args.plot is not None:
        from sgl_blend.commands.evaluation.plot import draw

        draw(report, args.plot)
    return 0


def make_settings(args: argparse.Namespace) -> Settings:
    """Turn the parsed command line into settings, checked.

    Raises:
        BlendError: A value is unknown or out of range.
    """
    from sgl_blend.commands.evaluation.evaluate import Settings

    default = BlendConfig().blend_policy
    settings = Settings(
        model_path=args.model_path,
        policies=[default if name == "default" else name for name in args.policies],
        ratios=args.ratios,
        check_layers=args.check_layers,
        build_prefixes=args.build_prefixes,
        templates=read_templates(args),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        engine_args=dict(args.engine_arg),
    )
    settings.check()
    return settings

"""``sgl-blend codec profile``: which levels of coding a model's KV bears."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgl_blend.commands.common.arguments import check_limit, check_outputs, check_packages, list_of
from sgl_blend.commands.common.console import output_console, print_line, progress
from sgl_blend.commands.evaluation.flags import add_engine_and_template_flags, read_templates
from sgl_blend.errors import CommandError
from sgl_blend.storage.level_names import CODED

if TYPE_CHECKING:
    from rich.console import Console

    from sgl_blend.commands.codec.profile import Outcome, Plan

NO_LEVEL = 1
"""Exit status if no level is within the budget."""
ENTROPY = ("zstd", "arithmetic")


def add_codec(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``codec`` command."""
    parser = commands.add_parser("codec", help="code stored chunks in a few bits per value")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    profile = actions.add_parser(
        "profile",
        help="measure which levels a model bears, and write them for --blend-store-profile",
        description="Build the chunks of your prompts with the real engine, measure their KV, and ask "
        "every prompt again with its chunks from a store at each level. Levels that lose more than "
        "--max-loss are left out of the profile. Exit status 0: some level is in it; 1: none is.",
    )
    profile.set_defaults(run=run_profile)
    profile.add_argument("--model-path", required=True, help="folder or name of the model")
    profile.add_argument("--data", type=Path, required=True, help="prompts as for eval")
    profile.add_argument(
        "--out", type=Path, required=True, help="where the profile goes, for --blend-store-profile"
    )
    profile.add_argument(
        "--max-loss",
        type=float,
        default=0.01,
        help="accuracy that a level may lose against the same chunks stored losslessly; for prompts "
        "without answers, the share of them whose first token may change",
    )
    profile.add_argument("--levels", type=list_of(str), default=list(CODED))
    profile.add_argument(
        "--entropy",
        choices=ENTROPY,
        default=ENTROPY[0],
        help="zstd is fast; arithmetic is CacheGen's own, somewhat smaller and many times slower",
    )
    profile.add_argument(
        "--page-size", type=int, default=64, help="as of the server that will use the profile"
    )
    profile.add_argument("--limit", type=int, help="take the first so many prompts only")
    profile.add_argument("--json", type=Path, metavar="OUT", help="write every figure as JSON")
    add_engine_and_template_flags(profile)


def run_profile(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0 or NO_LEVEL.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_packages("codec", ("numpy", "rich", "sglang", "transformers", "zstandard"))
    check_outputs(path for path in (args.json, args.out) if path is not None)
    from rich.console import Console

    from sgl_blend.commands.codec.profile import make_profile
    from sgl_blend.storage.codec.levels import write_profile

    plan = _make_plan(args)
    with progress(Console(stderr=True), None) as watch:
        outcome = make_profile(plan, watch)
    _print(outcome, output_console())
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome.facts()), indent=2))
    write_profile(outcome.profile, args.out)
    return 0 if outcome.profile.levels else NO_LEVEL


def _make_plan(args: argparse.Namespace) -> Plan:
    from sgl_blend.commands.codec.profile import Plan
    from sgl_blend.commands.evaluation.converters import read_items

    check_limit(args.limit)
    unknown = [name for name in args.levels if name not in CODED]
    if unknown:
        raise CommandError(f"--levels: unknown level {unknown[0]!r}, expected {', '.join(CODED)}")
    if not 0 <= args.max_loss < 1:
        raise CommandError(f"--max-loss must be in [0, 1), got {args.max_loss}")
    if args.page_size < 16:
        raise CommandError(f"--page-size must be at least 16, got {args.page_size}")
    return Plan(
        model_path=args.model_path,
        items=read_items(args.data, "auto", args.limit),
        data=args.data.name,
        max_loss=args.max_loss,
        levels=[name for name in CODED if name in args.levels],
        entropy=args.entropy,
        page_size=args.page_size,
        templates=read_templates(args),
        engine_args=dict(args.engine_arg),
    )


def _print(outcome: Outcome, console: Console) -> None:
    print_line(
        console, f"prompts    {outcome.num_prompts}, chunk pages measured {outcome.num_pages}"
    )
    for row in outcome.rows:
        low, high = row.loss_ci95
        told = "" if row.is_within else ", beyond the budget: left out"
        print_line(
            console,
            f"{row.level:10} {row.bits:.2f} bits ({8 / row.bits:.1f}x smaller than 8 bit), "
            f"{row.what} {row.value:.3f}, lost {row.loss:+.3f} [{low:+.3f}, {high:+.3f}], KL "
            f"{row.kl:.2g}, differences in {row.anchor_share:.0%} of the layers{told}",
        )

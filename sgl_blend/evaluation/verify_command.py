"""``sgl-blend verify``: may this model be blended, and with which settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgl_blend.evaluation.arguments import (
    add_engine_and_template_flags,
    check_limit,
    check_outputs,
    check_packages,
    list_of,
    output_console,
    print_line,
    progress,
    read_templates,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sgl_blend.evaluation.scores import Row
    from sgl_blend.evaluation.verify import Plan, Verdict

REFUSED = 1
"""Exit status for a model that must not be blended."""


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``verify`` command."""
    parser = commands.add_parser(
        "verify",
        help="find out whether a model may be blended, and how cheaply",
        description="Check the rotation of keys by numbers, that ratio 1 is a full prefill, and how "
        "far cheaper settings are from one; suggest the cheapest within --max-kl.",
    )
    parser.set_defaults(run=run_verify)
    parser.add_argument("--model-path", required=True, help="folder or name of the model")
    parser.add_argument(
        "--max-kl",
        type=float,
        default=0.1,
        help="mean KL of the first token from full prefill that is acceptable, in nats",
    )
    parser.add_argument(
        "--data", type=Path, help="prompts as for eval, instead of those of the package"
    )
    parser.add_argument("--limit", type=int, help="take the first so many of them only")
    parser.add_argument("--policies", type=list_of(str), default=["hkvd", "gradual"])
    parser.add_argument("--ratios", type=list_of(float), default=[0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
    parser.add_argument("--check-layers", type=list_of(int), default=[1, 2])
    add_engine_and_template_flags(parser)
    parser.add_argument(
        "--profile", type=Path, metavar="OUT", help="write the settings for --blend-profile"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")


def run_verify(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0, or REFUSED.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_packages("verify", ("numpy", "rich", "sglang", "transformers"))
    check_outputs(path for path in (args.json, args.profile) if path is not None)
    from rich.console import Console

    from sgl_blend.evaluation.verify import verify

    plan = _make_plan(args)
    with progress(Console(stderr=True), None) as watch:
        verdict = verify(plan, watch)
    _print(verdict, plan.max_kl, output_console())
    if args.json is not None:
        text = msgspec.json.encode(
            {"model": args.model_path, "max_kl": plan.max_kl, **_facts(verdict)}
        )
        args.json.write_bytes(msgspec.json.format(text, indent=2) + b"\n")
    if verdict.refusal is not None:
        return REFUSED
    if args.profile is not None:
        verdict.profile(plan.max_kl).save(args.profile)
    return 0


def _make_plan(args: argparse.Namespace) -> Plan:
    from sgl_blend.evaluation.converters import read_items
    from sgl_blend.evaluation.verify import Plan, bundled_items

    check_limit(args.limit)
    items = (
        bundled_items()[: args.limit]
        if args.data is None
        else read_items(args.data, "auto", args.limit)
    )
    return Plan(
        model_path=args.model_path,
        max_kl=args.max_kl,
        items=items,
        templates=read_templates(args),
        policies=args.policies,
        ratios=args.ratios,
        check_layers=args.check_layers,
        engine_args=dict(args.engine_arg),
    )


def _facts(verdict: Verdict) -> dict[str, object]:
    exactness = verdict.exactness
    return {
        "passed": verdict.refusal is None,
        "refusal": verdict.refusal,
        "rotation_errors": {str(d): error for d, error in exactness.rotation_errors.items()},
        "dtype": exactness.dtype,
        "noise_kl": exactness.noise_kl,
        "ratio_one_kl": exactness.ratio_one_kl,
        "default": verdict.default,
        "cheapest": verdict.cheapest,
        "rows": list(verdict.rows),
    }


def _print(verdict: Verdict, max_kl: float, console: Console) -> None:
    exactness = verdict.exactness
    errors = ", ".join(f"{d:,}: {error:.0e}" for d, error in exactness.rotation_errors.items())
    lines = [
        f"rotation   relative error by distance in tokens: {errors} ({exactness.dtype})",
        f"ratio 1    KL {exactness.ratio_one_kl:.1e}, bound {exactness.bound:.1e} "
        f"(two full prefills: {exactness.noise_kl:.1e})",
    ]
    if verdict.default is not None:
        lines.append(f"default    {_describe(verdict.default)}")
    if verdict.cheapest is not None:
        lines.append(f"cheapest   {_describe(verdict.cheapest)}, within {max_kl:g} nats")
    lines.append(
        "verdict    this model may be blended" if verdict.refusal is None else verdict.refusal
    )
    for line in lines:
        print_line(console, line)


def _describe(row: Row) -> str:
    return (
        f"{row.policy} {row.ratio:g} at check layer {row.check_layer}: KL {row.kl:.2g}, same first "
        f"token {row.top1:.0%}, cost {row.layer_rows_share or 0:.0%} of a full prefill"
    )

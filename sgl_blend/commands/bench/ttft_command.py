"""``sgl-blend bench ttft``: the table of speed-ups, printed, drawn and written as JSON."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from sgl_blend.commands.bench.arguments import (
    add_common_flags,
    add_server_flags,
    check_common,
    check_fits,
    check_least,
    make_server_settings,
    model_and_logs,
    servers,
    tell,
)
from sgl_blend.commands.bench.cases import PAPER, make_cases
from sgl_blend.commands.bench.shapes import read_shape
from sgl_blend.commands.common.arguments import list_of
from sgl_blend.commands.common.console import output_console, print_line, progress
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig, check_ratio

if TYPE_CHECKING:
    from sgl_blend.commands.bench.ttft import TtftSettings


def add_ttft(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench ttft`` command."""
    parser = kinds.add_parser(
        "ttft",
        help="time to first token of prompts whose chunks are stored",
        description="Time to first token of prompts whose chunks are stored, each time in a new "
        "order after the same system prompt and before a new question. The server blends every "
        "prompt (--blend-when always), also where by default it would not.",
    )
    parser.set_defaults(run=run_ttft)
    add_server_flags(parser)
    parser.add_argument(
        "--lengths",
        type=list_of(length),
        default=[PAPER, 3000, 8000, 16000, 32000],
        help="comma-separated prompt lengths in tokens (8k is 8000); paper is 6 x 512 + question",
    )
    parser.add_argument(
        "--ratios",
        type=list_of(float),
        default=[0.0, 0.05, 0.15, 0.3, 1.0],
        help="comma-separated shares of the reused tokens to recompute",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=list_of(int),
        default=[256, 512, 1024],
        help="comma-separated; prompts are cut into equal chunks of about this length",
    )
    parser.add_argument(
        "--batches", type=list_of(int), default=[1, 8], help="comma-separated: prompts sent at once"
    )
    parser.add_argument("--repeats", type=int, default=7, help="of every measurement")
    parser.add_argument(
        "--policies",
        type=list_of(str),
        default=[BlendConfig().blend_policy],
        help="comma-separated; each selects at every ratio",
    )
    add_common_flags(parser, one_policy=False)


def length(text: str) -> int | str:
    """Read a prompt length: tokens, thousands of them (8k), or the paper's setting."""
    if text == PAPER:
        return text
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)


length.__name__ = "lengths"


def run_ttft(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for.

    Returns:
        1 if some case has no figures.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_common(args)
    from rich.console import Console

    from sgl_blend.commands.bench.report import (
        TtftReport,
        caveats,
        describe,
        errors,
        make_ttft_table,
    )
    from sgl_blend.commands.bench.ttft import TtftRow, measure_ttft
    from sgl_blend.commands.common.records import to_json

    settings = make_ttft_settings(args)
    num_rows = len(settings.cases) * len(settings.variants)
    console = Console(stderr=True)
    with model_and_logs(args) as (model, logs):
        shape = read_shape(model)
        check_fits(shape, max(case.prompt_tokens for case in settings.cases) + 1)
        server_settings = make_server_settings(
            args,
            model,
            num_tokens=max(case.ample_tokens for case in settings.cases),
            num_requests=2 * max(case.batch for case in settings.cases),
        )
        with (
            servers(server_settings, logs, console) as pair,
            progress(console, settings.num_requests) as watch,
        ):
            circumstances = describe(args.argv, args.shape or args.model_path, pair)

            def report_of(rows: list[TtftRow]) -> TtftReport:
                return TtftReport(
                    circumstances=circumstances,
                    repeats=settings.repeats,
                    seed=settings.seed,
                    rows=rows,
                )

            def save(rows: list[TtftRow]) -> None:
                tell(console, f"{len(rows)} of {num_rows} rows")
                if args.json is not None:
                    args.json.write_bytes(to_json(report_of(rows)))

            report = report_of(
                asyncio.run(
                    measure_ttft(pair, settings, shape.vocab_size, shape.num_layers, watch, save)
                )
            )
    output_console().print(make_ttft_table(report))
    for sentence in caveats(report.circumstances):
        print_line(console, f"warning: {sentence}", "yellow")
    found = errors(report)
    for sentence in found:
        print_line(console, f"error: {sentence}", "red")
    if args.plot is not None:
        from sgl_blend.commands.bench.plot import draw_ttft

        draw_ttft(report, args.plot)
    return 1 if found else 0


def make_ttft_settings(args: argparse.Namespace) -> TtftSettings:
    """Turn the parsed command line into settings, checked.

    Raises:
        BlendError: A value is out of range.
    """
    from sgl_blend.commands.bench.ttft import TtftSettings

    check_least("--repeats", args.repeats, 1)
    for ratio in args.ratios:
        check_ratio("--ratios", ratio, CommandError)
    for chunk_tokens in args.chunk_tokens:
        check_least("--chunk-tokens", chunk_tokens, BlendConfig().blend_min_chunk_tokens)
    for batch in args.batches:
        check_least("--batches", batch, 1)
    return TtftSettings(
        cases=make_cases(
            args.lengths,
            args.chunk_tokens,
            args.batches,
            system_tokens=args.system_tokens,
            question_tokens=args.question_tokens,
        ),
        ratios=args.ratios,
        policies=args.policies,
        repeats=args.repeats,
        seed=args.seed,
    )

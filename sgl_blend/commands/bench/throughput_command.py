"""``sgl-blend bench throughput``: the table of rates, printed, drawn and written as JSON."""

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
    check_positive,
    make_server_settings,
    model_and_logs,
    servers,
    tell,
)
from sgl_blend.commands.bench.shapes import read_shape
from sgl_blend.commands.common.arguments import list_of
from sgl_blend.commands.common.console import output_console, print_line, progress
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig, check_ratio

if TYPE_CHECKING:
    from sgl_blend.commands.bench.throughput import ThroughputSettings

_FLAGS = (
    *("rates", "slo", "seconds", "blocks", "documents", "chunks", "chunk_tokens"),
    *("output_tokens", "ratio", "policy", "system_tokens", "question_tokens", "seed"),
)

_RUNNING = 16
"""Requests that a server on a CPU runs at the same time."""


def add_throughput(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench throughput`` command."""
    parser = kinds.add_parser(
        "throughput",
        help="requests per second before the time to first token grows",
        description="Requests arrive at Poisson times, whether or not earlier ones are answered. "
        "Each holds some of the documents in a random order and a new question. The server blends "
        "every prompt (--blend-when always), also where by default it would not.",
    )
    parser.set_defaults(run=run_throughput)
    add_server_flags(parser)
    parser.add_argument(
        "--rates",
        type=list_of(float),
        help="comma-separated requests per second; by default doubled until both servers are too "
        "slow, and then looked at more closely",
    )
    parser.add_argument(
        "--slo",
        type=float,
        default=3.0,
        help="fast enough is a TTFT p50 of so many times the idle stock server's",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a block")
    parser.add_argument("--blocks", type=int, default=2, help="at each rate, on each server")
    parser.add_argument("--documents", type=int, default=40, help="that all prompts are made of")
    parser.add_argument(
        "--chunks", type=int, default=6, help="most in a prompt; at least half as many are in each"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512, help="length of a document")
    parser.add_argument("--output-tokens", type=int, default=16, help="length of an answer")
    parser.add_argument(
        "--ratio",
        type=float,
        default=BlendConfig().blend_recompute_ratio,
        help="share of the reused tokens to recompute",
    )
    add_common_flags(parser)


def run_throughput(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_common(args)
    from rich.console import Console

    from sgl_blend.commands.bench.client_speed import measure_client
    from sgl_blend.commands.bench.knees import Outcome
    from sgl_blend.commands.bench.report import (
        ThroughputReport,
        caveats,
        client_line,
        describe,
        make_throughput_table,
        summary,
        warnings,
    )
    from sgl_blend.commands.bench.throughput import ThroughputBench, sample_bodies
    from sgl_blend.commands.common.records import to_json

    settings = make_throughput_settings(args)
    traffic = settings.traffic
    console = Console(stderr=True)
    with model_and_logs(args) as (model, logs):
        shape = read_shape(model)
        check_fits(shape, traffic.most_tokens)
        client_rate = measure_client(sample_bodies(settings, shape.vocab_size))
        server_settings = make_server_settings(
            args,
            model,
            num_tokens=traffic.stored_tokens + 2 * _RUNNING * traffic.most_tokens,
            num_requests=_RUNNING,
        )
        blocks = None if settings.rates is None else 2 * settings.blocks * len(settings.rates)
        with (
            servers(server_settings, logs, console) as pair,
            progress(console, blocks) as watch,
        ):
            circumstances = describe(args.argv, args.shape or args.model_path, pair)

            def report_of(outcome: Outcome) -> ThroughputReport:
                return ThroughputReport(
                    circumstances=circumstances,
                    settings={name: getattr(args, name) for name in _FLAGS},
                    client_rate=client_rate,
                    outcome=outcome,
                )

            def save(outcome: Outcome) -> None:
                tell(console, f"{len(outcome.points)} rates")
                if args.json is not None:
                    args.json.write_bytes(to_json(report_of(outcome)))

            bench = ThroughputBench(pair, settings, shape.vocab_size, shape.num_layers, watch, save)
            report = report_of(asyncio.run(bench.run()))
    output_console().print(make_throughput_table(report))
    print_line(output_console(), summary(report.outcome))
    print_line(output_console(), client_line(report))
    for sentence in [*caveats(report.circumstances), *warnings(report)]:
        print_line(console, f"warning: {sentence}", "yellow")
    if args.plot is not None:
        from sgl_blend.commands.bench.plot import draw_throughput

        draw_throughput(report, args.plot)
    return 0


def make_throughput_settings(args: argparse.Namespace) -> ThroughputSettings:
    """Turn the parsed command line into settings, checked.

    Raises:
        BlendError: A value is out of range.
    """
    from sgl_blend.commands.bench.throughput import ThroughputSettings, Traffic

    for rate in args.rates or ():
        check_positive("--rates", rate)
    check_least("--slo", args.slo, 1)
    check_positive("--seconds", args.seconds)
    check_least("--blocks", args.blocks, 1)
    check_least("--chunks", args.chunks, 2)
    check_least("--documents", args.documents, args.chunks)
    check_least("--chunk-tokens", args.chunk_tokens, BlendConfig().blend_min_chunk_tokens)
    check_least("--output-tokens", args.output_tokens, 1)
    check_ratio("--ratio", args.ratio, CommandError)
    return ThroughputSettings(
        traffic=Traffic(
            num_documents=args.documents,
            num_chunks=args.chunks,
            chunk_tokens=args.chunk_tokens,
            system_tokens=args.system_tokens,
            question_tokens=args.question_tokens,
            output_tokens=args.output_tokens,
        ),
        rates=args.rates,
        seconds=args.seconds,
        blocks=args.blocks,
        slo=args.slo,
        ratio=args.ratio,
        policy=args.policy,
        seed=args.seed,
    )

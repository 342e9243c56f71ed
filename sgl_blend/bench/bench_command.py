"""``sgl-blend bench``: TTFT and throughput beside stock SGLang, printed, drawn and written as JSON."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sgl_blend.bench.cases import PAPER, make_cases
from sgl_blend.bench.shapes import SHAPES, Shape, read_shape, write_shape
from sgl_blend.config import BlendConfig, check_policy, check_ratio
from sgl_blend.errors import CommandError
from sgl_blend.evaluation.arguments import (
    check_outputs,
    check_packages,
    list_of,
    output_console,
    progress,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sgl_blend.bench.pair import Pair, ServerSettings
    from sgl_blend.bench.throughput import ThroughputSettings
    from sgl_blend.bench.ttft import TtftSettings

_Result = TypeVar("_Result")


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench`` commands."""
    parser = commands.add_parser(
        "bench",
        help="measure time to first token and throughput beside stock SGLang",
        description="Start a blending and a stock server, send both the same requests in turns, and "
        "compare.",
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    _add_ttft(kinds)
    _add_throughput(kinds)


def _add_ttft(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "ttft",
        help="time to first token of prompts whose chunks are stored",
        description="Time to first token of prompts whose chunks are stored, each time in a new "
        "order behind the same system prompt and before a new question. The server blends every "
        "prompt (--blend-when always), also where by default it would not.",
    )
    parser.set_defaults(run=run_ttft)
    _add_server_flags(parser)
    parser.add_argument(
        "--lengths",
        type=list_of(_length),
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
    _add_common_flags(parser)


def _add_throughput(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="requests per second before the time to first token grows",
        description="Requests arrive at Poisson times, whether or not earlier ones are answered. "
        "Each holds some of the documents in a random order and a new question. The server blends "
        "every prompt (--blend-when always), also where by default it would not.",
    )
    parser.set_defaults(run=run_throughput)
    _add_server_flags(parser)
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
    _add_common_flags(parser)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=tuple(SHAPES), help="of a model without weights")
    model.add_argument("--model-path", help="folder or name of a real model")
    parser.add_argument(
        "--server-arg",
        action="append",
        default=[],
        type=_server_arg,
        metavar="NAME[=VALUE]",
        help="further flag of both servers, without its dashes; repeatable",
    )
    parser.add_argument(
        "--blend-arg",
        action="append",
        default=[],
        type=_server_arg,
        metavar="NAME[=VALUE]",
        help="the same for the blending server alone: blend-check-layer=1",
    )
    parser.add_argument(
        "--work-folder",
        type=Path,
        metavar="FOLDER",
        help="keep the shape's config and the servers' logs there; by default they are removed",
    )


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default=BlendConfig().blend_policy, help="of selection")
    parser.add_argument("--system-tokens", type=int, default=128, help="of the system prompt")
    parser.add_argument("--question-tokens", type=int, default=64, help="behind the chunks")
    parser.add_argument("--seed", type=int, default=0, help="of all prompts, times and intervals")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw it")


def _length(text: str) -> int | str:
    if text == PAPER:
        return text
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)


_length.__name__ = "lengths"


def _server_arg(text: str) -> list[str]:
    name, equals, value = text.partition("=")
    if not name or name.startswith("-"):
        raise argparse.ArgumentTypeError(
            f"expected NAME or NAME=VALUE without dashes, got {text!r}"
        )
    return [f"--{name}", value] if equals else [f"--{name}"]


# --- what both commands do ----------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> None:
    """Refuse early what could not be done in the end.

    Raises:
        CommandError: A package or a folder is missing, or a value out of range.
        BlendError: Policy or ratio are not known.
    """
    packages = ["httpx", "numpy", "rich", "sglang", "transformers"]
    packages += ["matplotlib"] if args.plot else []
    check_packages("bench", packages, extra="bench")
    check_outputs(path for path in (args.json, args.plot) if path is not None)
    check_policy("--policy", args.policy, CommandError, evaluation=False)
    check_least("--system-tokens", args.system_tokens, 1)
    check_least("--question-tokens", args.question_tokens, 1)


def check_least(flag: str, value: float, least: float) -> None:
    """Refuse a value that is too small.

    Raises:
        CommandError: It is, or it is not a number.
    """
    if not least <= value < math.inf:
        raise CommandError(f"{flag} must be at least {least}, got {value}")


def check_positive(flag: str, value: float) -> None:
    """Refuse a value that is not a positive number.

    Raises:
        CommandError: It is not.
    """
    if not 0 < value < math.inf:
        raise CommandError(f"{flag} must be a positive number, got {value}")


@contextmanager
def _model_and_logs(args: argparse.Namespace) -> Iterator[tuple[Path | str, Path]]:
    """Yield the model to serve and the folder for logs."""
    with tempfile.TemporaryDirectory(prefix="sgl-blend-bench-") as temporary:
        folder = Path(temporary) if args.work_folder is None else args.work_folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if args.shape is not None:
            yield write_shape(args.shape, folder), folder
            return
        path = Path(args.model_path)
        yield (path.absolute() if path.is_dir() else args.model_path), folder


@contextmanager
def _servers(settings: ServerSettings, logs: Path, console: Console) -> Iterator[Pair]:
    """Run both servers, and end them also when this process is terminated."""
    import httpx

    from sgl_blend.bench.pair import both
    from sgl_blend.bench.server import ServerError

    previous = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    console.print("starting the stock and the blending server ...", highlight=False)
    try:
        with both(settings, logs) as pair:
            yield pair
    except httpx.HTTPError as err:
        raise ServerError(f"a server did not answer: {err!r}") from err
    finally:
        signal.signal(signal.SIGTERM, previous)


def _server_settings(
    args: argparse.Namespace, model: Path | str, num_tokens: int, num_requests: int
) -> ServerSettings:
    from sgl_blend.bench.pair import ServerSettings

    return ServerSettings(
        model=model,
        dummy=args.shape is not None,
        flags=[word for flag in args.server_arg for word in flag],
        blend_flags=[word for flag in args.blend_arg for word in flag],
        num_tokens=num_tokens,
        num_requests=num_requests,
    )


def _tell(console: Console, line: str) -> None:
    """Print a line where there is no bar."""
    if not console.is_terminal:
        console.print(line, highlight=False)


def _check_fits(shape: Shape, num_tokens: int) -> None:
    if num_tokens > shape.num_positions:
        raise CommandError(
            f"a prompt and its answer must fit the model's {shape.num_positions} positions, "
            f"got {num_tokens} tokens"
        )


# --- ttft ---------------------------------------------------------------------------------------


def run_ttft(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for.

    Returns:
        1 if some case has no figures.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    _prepare(args)
    from rich.console import Console

    from sgl_blend.bench.report import TtftReport, describe, errors, make_ttft_table, to_json
    from sgl_blend.bench.ttft import TtftRow, measure_ttft

    settings = make_ttft_settings(args)
    num_rows = len(settings.cases) * len(settings.ratios)
    console = Console(stderr=True)
    with _model_and_logs(args) as (model, logs):
        shape = read_shape(model)
        _check_fits(shape, max(case.prompt_tokens for case in settings.cases) + 1)
        server_settings = _server_settings(
            args,
            model,
            num_tokens=max(case.ample_tokens for case in settings.cases),
            num_requests=2 * max(case.batch for case in settings.cases),
        )
        with (
            _servers(server_settings, logs, console) as pair,
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
                _tell(console, f"{len(rows)} of {num_rows} rows")
                if args.json is not None:
                    args.json.write_bytes(to_json(report_of(rows)))

            report = report_of(
                asyncio.run(
                    measure_ttft(pair, settings, shape.vocab_size, shape.num_layers, watch, save)
                )
            )
    output_console().print(make_ttft_table(report))
    found = errors(report)
    for sentence in found:
        console.print(f"error: {sentence}", style="red", markup=False, highlight=False)
    if args.plot is not None:
        from sgl_blend.bench.plot import draw_ttft

        draw_ttft(report, args.plot)
    return 1 if found else 0


def make_ttft_settings(args: argparse.Namespace) -> TtftSettings:
    """Turn the parsed command line into settings, checked.

    Raises:
        BlendError: A value is out of range.
    """
    from sgl_blend.bench.ttft import TtftSettings

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
        policy=args.policy,
        repeats=args.repeats,
        seed=args.seed,
    )


# --- throughput ---------------------------------------------------------------------------------

_THROUGHPUT_FLAGS = (
    *("rates", "slo", "seconds", "blocks", "documents", "chunks", "chunk_tokens"),
    *("output_tokens", "ratio", "policy", "system_tokens", "question_tokens", "seed"),
)


def run_throughput(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    _prepare(args)
    from rich.console import Console

    from sgl_blend.bench.report import (
        ThroughputReport,
        describe,
        make_throughput_table,
        summary,
        to_json,
        warnings,
    )
    from sgl_blend.bench.throughput import Outcome, ThroughputBench

    settings = make_throughput_settings(args)
    traffic = settings.traffic
    console = Console(stderr=True)
    with _model_and_logs(args) as (model, logs):
        shape = read_shape(model)
        _check_fits(shape, traffic.most_tokens)
        server_settings = _server_settings(
            args,
            model,
            num_tokens=traffic.stored_tokens + 2 * _RUNNING * traffic.most_tokens,
            num_requests=_RUNNING,
        )
        blocks = None if settings.rates is None else 2 * settings.blocks * len(settings.rates)
        with (
            _servers(server_settings, logs, console) as pair,
            progress(console, blocks) as watch,
        ):
            circumstances = describe(args.argv, args.shape or args.model_path, pair)

            def report_of(outcome: Outcome) -> ThroughputReport:
                return ThroughputReport(
                    circumstances=circumstances,
                    settings={name: getattr(args, name) for name in _THROUGHPUT_FLAGS},
                    outcome=outcome,
                )

            def save(outcome: Outcome) -> None:
                _tell(console, f"{len(outcome.points)} rates")
                if args.json is not None:
                    args.json.write_bytes(to_json(report_of(outcome)))

            bench = ThroughputBench(pair, settings, shape.vocab_size, watch, save)
            report = report_of(asyncio.run(bench.run()))
    output_console().print(make_throughput_table(report))
    output_console().print(summary(report.outcome), markup=False, highlight=False)
    for sentence in warnings(report.outcome):
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False)
    if args.plot is not None:
        from sgl_blend.bench.plot import draw_throughput

        draw_throughput(report, args.plot)
    return 0


_RUNNING = 16
"""Requests that a server on a CPU runs at the same time."""


def make_throughput_settings(args: argparse.Namespace) -> ThroughputSettings:
    """Turn the parsed command line into settings, checked.

    Raises:
        BlendError: A value is out of range.
    """
    from sgl_blend.bench.throughput import ThroughputSettings, Traffic

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

"""``sgl-blend bench profile``: where the time of a blended prefill goes."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_blend.commands.bench.arguments import (
    add_common_flags,
    add_server_flags,
    check_common,
    check_fits,
    check_least,
    make_server_settings,
    model_and_logs,
    tell,
)
from sgl_blend.commands.bench.cases import PAPER, Case, make_case
from sgl_blend.commands.bench.shapes import read_shape
from sgl_blend.commands.bench.ttft_command import length
from sgl_blend.commands.common.console import output_console, print_line
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig, check_ratio

if TYPE_CHECKING:
    from rich.table import Table

    from sgl_blend.commands.bench.client import Reply
    from sgl_blend.commands.bench.report import ProfileReport
    from sgl_blend.commands.common.server import Server

_TRACE_TIMEOUT_S = 120.0
HOST_NOTE = (
    "The profiler adds some microseconds of host time to every launch: read the device column, and "
    "compare its sum with the TTFT that was measured without the profiler."
)


def add_profile(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench profile`` command."""
    parser = kinds.add_parser(
        "profile",
        help="time of every phase of a blended prefill",
        description="Ask a blending server for prompts whose chunks are stored, under SGLang's own "
        "profiler, and add up what each phase took on the host and on the device. Profiling itself "
        "takes time: TTFT is measured before, without it.",
    )
    parser.set_defaults(run=run_profile)
    add_server_flags(parser)
    parser.add_argument(
        "--length", type=length, default=PAPER, help="prompt length in tokens; paper by default"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512, help="length of a chunk")
    parser.add_argument("--batch", type=int, default=1, help="prompts sent at once")
    parser.add_argument(
        "--ratio", type=float, default=BlendConfig().blend_recompute_ratio, help="recomputed share"
    )
    parser.add_argument("--repeats", type=int, default=5, help="profiled requests or batches")
    add_common_flags(parser)


def run_profile(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_common(args)
    check_least("--repeats", args.repeats, 1)
    check_least("--batch", args.batch, 1)
    check_ratio("--ratio", args.ratio, CommandError)
    if args.plot is not None:
        raise CommandError("bench profile draws nothing; leave --plot away")
    from rich.console import Console

    from sgl_blend.commands.bench.pair import BLEND_FLAGS
    from sgl_blend.commands.bench.report import ProfileReport, describe_servers
    from sgl_blend.commands.common.records import to_json
    from sgl_blend.commands.common.server import running

    case = make_case(
        args.length,
        args.chunk_tokens,
        args.batch,
        system_tokens=args.system_tokens,
        question_tokens=args.question_tokens,
    )
    console = Console(stderr=True)
    # Every request begins with another document, or the radix cache would know its beginning.
    num_asked = case.batch * (2 * args.repeats + 1)
    num_documents = max(case.num_documents, num_asked)
    with model_and_logs(args) as (model, logs):
        shape = read_shape(model)
        check_fits(shape, case.prompt_tokens + 1)
        settings = make_server_settings(
            args,
            model,
            num_tokens=case.ample_tokens
            + num_documents * case.chunk_tokens
            + num_asked * case.prompt_tokens,
            num_requests=2 * case.batch,
        )
        flags = [*settings.common_flags(None), *BLEND_FLAGS, *settings.blend_flags]
        tell(console, "starting the blending server ...")
        with running(model, flags, logs / "blend.log") as server:
            found = asyncio.run(_profile(server, case, num_documents, shape.vocab_size, args, logs))
            circumstances = describe_servers(
                args.argv,
                args.shape or args.model_path,
                {"blend": server},
                int(server.server_info()["max_total_num_tokens"]),
            )
    report = ProfileReport(circumstances=circumstances, case=case.name, batch=case.batch, **found)
    output_console().print(_make_table(report))
    if report.phases["device"]:
        print_line(output_console(), HOST_NOTE)
    if args.json is not None:
        args.json.write_bytes(to_json(report))
    return 0


async def _profile(
    server: Server,
    case: Case,
    num_documents: int,
    vocab_size: int,
    args: argparse.Namespace,
    folder: Path,
) -> dict[str, Any]:
    """Return the measured fields of the report."""
    from sgl_blend.commands.bench.client import ask_together, connect
    from sgl_blend.commands.bench.phase_times import add_up, read_trace
    from sgl_blend.commands.bench.prompts import Library, to_body
    from sgl_blend.commands.bench.ttft import find_shortfall, introducing_params

    library = Library(
        random.Random(f"profile {args.seed}"),
        vocab_size,
        system_tokens=case.system_tokens,
        chunk_tokens=case.chunk_tokens,
        num_documents=num_documents,
    )
    firsts = iter(range(num_documents))
    params = {"sgl_blend_ratio": args.ratio, "sgl_blend_policy": args.policy}
    introducing = introducing_params([args.policy], 0.999)
    traces = folder / f"traces-{time.time_ns()}"
    traces.mkdir()
    async with connect(server) as client:

        async def ask() -> list[Reply]:
            orders = [library.order(case.num_chunks, next(firsts)) for _ in range(case.batch)]
            prompts = [library.prompt(order, case.question_tokens) for order in orders]
            replies = await ask_together(client, [to_body(p, params, 1) for p in prompts])
            for prompt, reply in zip(prompts, replies, strict=True):
                error = find_shortfall(prompt.num_reusable, reply)
                if error is not None:
                    raise CommandError(f"bench profile: {error}")
            return replies

        for prompt in library.introductions(case.num_chunks, case.question_tokens):
            await ask_together(client, [to_body(prompt, introducing, 1)])
        server.wait_for_builds()
        await ask()
        plain = [reply for _ in range(args.repeats) for reply in await ask()]
        kinds = ["CPU", "GPU"] if _on_gpu() else ["CPU"]
        wanted = {"output_dir": str(traces), "activities": kinds, "with_stack": False}
        server.http.post("/start_profile", json=wanted).raise_for_status()
        traced = [reply for _ in range(args.repeats) for reply in await ask()]
        server.http.post("/stop_profile").raise_for_status()
    # One file per rank; the first one's ranks show what all do.
    seconds = add_up(read_trace(_wait_for_traces(traces)[0]))
    return {
        "ttft_s": statistics.median(reply.ttft_s for reply in plain),
        "traced_ttft_s": statistics.median(reply.ttft_s for reply in traced),
        "tokens": plain[0].report,
        "phases": {
            place: {name: value / args.repeats for name, value in times.items()}
            for place, times in seconds.items()
        },
    }


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _wait_for_traces(folder: Path) -> list[Path]:
    """Return the trace files once the server has written them.

    Raises:
        CommandError: It wrote none.
    """
    started, size = time.monotonic(), -1
    while time.monotonic() - started < _TRACE_TIMEOUT_S:
        found = sorted(path for path in folder.rglob("*.json*") if path.is_file())
        now = sum(path.stat().st_size for path in found)
        if found and now == size:
            return found
        size = now
        time.sleep(1.0)
    raise CommandError("bench profile: the server wrote no trace")


def _make_table(report: ProfileReport) -> Table:
    from rich import box
    from rich.table import Table

    host, device = report.phases["host"], report.phases["device"]
    total = report.traced_ttft_s
    measured = device or host
    table = Table(
        title=f"{report.case}, batch {report.batch}: TTFT {report.ttft_s * 1e3:.4g} ms, "
        f"under the profiler {total * 1e3:.4g} ms",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("phase", no_wrap=True)
    for name in ("host ms", "device ms", "of TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in sorted({*host, *device}, key=lambda name: -measured.get(name, 0.0)):
        shown = f"{device[name] * 1e3:.4g}" if name in device else ""
        share = measured.get(name, 0.0) / total
        table.add_row(name, f"{host.get(name, 0.0) * 1e3:.4g}", shown, f"{share:.0%}")
    rest = total - sum(measured.values())
    table.add_row(
        "everything else (scheduler, sampling, HTTP)",
        f"{rest * 1e3:.4g}",
        "",
        f"{rest / total:.0%}",
    )
    return table

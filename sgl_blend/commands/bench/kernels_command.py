"""``sgl-blend bench kernels``: each kernel's time beside the roofline of the device it ran on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_blend.commands.common.arguments import check_outputs, check_packages, list_of
from sgl_blend.commands.common.console import output_console, print_line
from sgl_blend.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from sgl_blend.commands.bench.kernel_speed import Speed


def add_kernels(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench kernels`` command."""
    parser = kinds.add_parser(
        "kernels",
        help="time, bytes, FLOPs and share of the roofline of every kernel",
        description="Time every kernel on one device, no server: Triton kernels on a GPU, torch "
        "references on a CPU. The roofline is what a large copy and a large matrix product reach "
        "there.",
    )
    parser.set_defaults(run=run_kernels)
    parser.add_argument("--device", help="by default cuda where there is one, else cpu")
    parser.add_argument(
        "--shapes",
        type=list_of(str),
        help="comma-separated: tiny, 8b-8k, 8b-32k; by default tiny on a CPU, else the others",
    )
    parser.add_argument(
        "--compile-flashinfer",
        action="store_true",
        help="compile what FlashInfer needs to take part, minutes the first time",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the shares of the roofline"
    )


def run_kernels(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    packages = ["rich", "triton", *(["matplotlib"] if args.plot else [])]
    check_packages("bench", packages, extra="bench")
    check_outputs(path for path in (args.json, args.plot) if path is not None)
    import torch
    from rich.console import Console

    from sgl_blend.commands.bench.kernel_speed import measure
    from sgl_blend.commands.bench.report import KernelsReport
    from sgl_blend.commands.common.records import command_line, find_origin, to_json

    console = Console(stderr=True)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = args.shapes or (["tiny"] if device == "cpu" else ["8b-8k", "8b-32k"])
    try:
        speeds = measure(device, shapes, compile_flashinfer=args.compile_flashinfer)
    except (ValueError, RuntimeError) as err:
        raise CommandError(f"bench kernels: {str(err).splitlines()[0]}") from err
    report = KernelsReport(circumstances=find_origin(command_line(args.argv)), speeds=speeds)
    if speeds.rows:
        output_console().print(_make_table(speeds.rows))
    for sentence in speeds.errors:
        print_line(console, f"error: {sentence}", "red")
    if args.json is not None:
        args.json.write_bytes(to_json(report))
    if args.plot is not None and speeds.rows:
        from sgl_blend.commands.bench.plot import draw_kernels

        draw_kernels(report, args.plot)
    return 1 if speeds.errors else 0


def _make_table(rows: list[Speed]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{rows[0].device}: median times; share of the time the roofline allows",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("kernel", no_wrap=True)
    for name in ("shape", "ms", "MB", "GFLOP", "GB/s", "TFLOP/s", "roofline ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        seconds = row.ms / 1e3
        table.add_row(
            row.kernel,
            row.shape,
            f"{row.ms:.3g}",
            f"{row.num_bytes / 1e6:.4g}",
            f"{row.num_flop / 1e9:.3g}",
            f"{row.num_bytes / seconds / 1e9:.3g}",
            f"{row.num_flop / seconds / 1e12:.3g}",
            f"{row.roofline_ms:.3g}",
            f"{row.share:.0%}",
        )
    return table

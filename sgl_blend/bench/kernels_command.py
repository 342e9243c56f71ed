"""``sgl-blend bench kernels``: each kernel's time beside the roof of the device it ran on."""

from __future__ import annotations

import argparse
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_blend.errors import CommandError
from sgl_blend.evaluation.arguments import check_outputs, check_packages, list_of, output_console

if TYPE_CHECKING:
    from rich.table import Table


def add_kernels(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench kernels`` command."""
    parser = kinds.add_parser(
        "kernels",
        help="time, bytes, FLOPs and share of the roof of every kernel",
        description="Time every kernel on one device, no server: Triton kernels on a GPU, torch "
        "references on a CPU. The roof is what a large copy and a large matrix product reach there.",
    )
    parser.set_defaults(run=run_kernels)
    parser.add_argument("--device", help="by default cuda where there is one, else cpu")
    parser.add_argument(
        "--shapes",
        type=list_of(str),
        help="comma-separated: tiny, 8b-8k, 8b-32k; by default tiny on a CPU, else the others",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")


def run_kernels(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_packages("bench", ["rich", "triton"], extra="bench")
    check_outputs([args.json] if args.json is not None else [])
    import torch

    from sgl_blend.bench.kernel_speed import measure
    from sgl_blend.bench.report import PACKAGES, find_commit, without_folders
    from sgl_blend.evaluation.report import describe_machine, find_versions

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = args.shapes or (["tiny"] if device == "cpu" else ["8b-8k", "8b-32k"])
    try:
        rows = measure(device, ",".join(shapes))
    except (ValueError, RuntimeError) as err:
        raise CommandError(f"bench kernels: {str(err).splitlines()[0]}") from err
    output_console().print(_make_table(rows))
    if args.json is not None:
        report = {
            "command": shlex.join(["sgl-blend", *map(without_folders, args.argv)]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": find_versions(PACKAGES),
            "commit": find_commit(),
            "machine": describe_machine(),
            "rows": rows,
        }
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0


def _make_table(rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{rows[0]['device']}: median times; share of the time the roof allows",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("kernel", no_wrap=True)
    for name in ("shape", "ms", "MB", "GFLOP", "GB/s", "TFLOP/s", "roof ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        seconds = row["ms"] / 1e3
        table.add_row(
            row["kernel"],
            row["shape"],
            f"{row['ms']:.3g}",
            f"{row['num_bytes'] / 1e6:.4g}",
            f"{row['num_flop'] / 1e9:.3g}",
            f"{row['num_bytes'] / seconds / 1e9:.3g}",
            f"{row['num_flop'] / seconds / 1e12:.3g}",
            f"{row['roof_ms']:.3g}",
            f"{row['share']:.0%}",
        )
    return table

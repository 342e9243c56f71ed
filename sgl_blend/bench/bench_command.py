"""``sgl-blend bench``: time to first token and throughput beside stock SGLang."""

from __future__ import annotations

import argparse

from sgl_blend.bench.throughput_command import add_throughput
from sgl_blend.bench.ttft_command import add_ttft


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench`` commands."""
    parser = commands.add_parser(
        "bench",
        help="measure time to first token and throughput beside stock SGLang",
        description="Start a blending and a stock server, send both the same requests in turns, and "
        "compare.",
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    add_ttft(kinds)
    add_throughput(kinds)

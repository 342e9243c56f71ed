"""``sgl-blend bench``: how fast, beside stock SGLang and beside the device's roofline."""

from __future__ import annotations

import argparse

from sgl_blend.commands.bench.kernels_command import add_kernels
from sgl_blend.commands.bench.profile_command import add_profile
from sgl_blend.commands.bench.throughput_command import add_throughput
from sgl_blend.commands.bench.ttft_command import add_ttft


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench`` commands."""
    parser = commands.add_parser(
        "bench",
        help="measure time to first token, throughput and kernels",
        description="ttft and throughput start a blending and a stock server, send both the same "
        "requests in turns, and compare; profile looks into the blending one; kernels needs no server.",
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    add_ttft(kinds)
    add_throughput(kinds)
    add_profile(kinds)
    add_kernels(kinds)

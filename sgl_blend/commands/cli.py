"""The command ``sgl-blend``; each subcommand adds itself in COMMANDS."""

import argparse
import sys
from collections.abc import Sequence

from sgl_blend.commands.bench.bench_command import add_bench
from sgl_blend.commands.codec.codec_command import add_codec
from sgl_blend.commands.evaluation.eval_command import add_eval
from sgl_blend.commands.evaluation.verify_command import add_verify
from sgl_blend.commands.planning.plan_storage_command import add_plan_storage
from sgl_blend.errors import BlendError

COMMANDS = (add_eval, add_verify, add_bench, add_plan_storage, add_codec)
"""Each adds a subparser whose default ``run`` takes the parsed namespace and returns the status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 2 and one sentence if it cannot be run."""
    parser = argparse.ArgumentParser(prog="sgl-blend", description="Tools around blended serving.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv, argparse.Namespace(argv=argv))
    try:
        status: int = args.run(args)
    except BlendError as err:
        sys.stderr.write(f"sgl-blend: {err}\n")
        return 2
    return status

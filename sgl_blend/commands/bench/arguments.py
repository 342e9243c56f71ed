"""What both benchmarks share: flags, checks before work begins, the servers."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_blend.commands.bench.shapes import SHAPES, Shape, write_shape
from sgl_blend.commands.common.arguments import check_outputs, check_packages
from sgl_blend.commands.common.console import print_line
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig, check_policy

if TYPE_CHECKING:
    from rich.console import Console

    from sgl_blend.commands.bench.pair import Pair, ServerSettings


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add which model is served, and how."""
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


def add_common_flags(parser: argparse.ArgumentParser, *, one_policy: bool = True) -> None:
    """Add what all prompts have in common, and where results go.

    Args:
        parser: Of a benchmark.
        one_policy: Whether it takes one policy; one that takes several adds ``--policies`` itself.
    """
    if one_policy:
        parser.add_argument("--policy", default=BlendConfig().blend_policy, help="of selection")
    parser.add_argument("--system-tokens", type=int, default=128, help="of the system prompt")
    parser.add_argument("--question-tokens", type=int, default=64, help="after the chunks")
    parser.add_argument("--seed", type=int, default=0, help="of all prompts, times and intervals")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw it")


def _server_arg(text: str) -> list[str]:
    name, equals, value = text.partition("=")
    if not name or name.startswith("-"):
        raise argparse.ArgumentTypeError(
            f"expected NAME or NAME=VALUE without dashes, got {text!r}"
        )
    return [f"--{name}", value] if equals else [f"--{name}"]


def check_common(args: argparse.Namespace) -> None:
    """Refuse early what could not be done in the end.

    Raises:
        CommandError: A package or a folder is missing, or a value out of range.
        BlendError: Policy or ratio are not known.
    """
    packages = ["httpx", "numpy", "rich", "sglang", "transformers"]
    packages += ["matplotlib"] if args.plot else []
    check_packages("bench", packages, extra="bench")
    check_outputs(path for path in (args.json, args.plot) if path is not None)
    if hasattr(args, "policies"):
        for policy in args.policies:
            check_policy("--policies", policy, CommandError, evaluation=False)
    else:
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
def model_and_logs(args: argparse.Namespace) -> Iterator[tuple[Path | str, Path]]:
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
def servers(settings: ServerSettings, logs: Path, console: Console) -> Iterator[Pair]:
    """Run both servers, and end them also when this process is terminated."""
    import httpx

    from sgl_blend.commands.bench.pair import both
    from sgl_blend.commands.common.server import ServerError

    previous = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    print_line(console, "starting the stock and the blending server ...")
    try:
        with both(settings, logs) as pair:
            yield pair
    except httpx.HTTPError as err:
        raise ServerError(f"a server did not answer: {err!r}") from err
    finally:
        signal.signal(signal.SIGTERM, previous)


def make_server_settings(
    args: argparse.Namespace, model: Path | str, num_tokens: int, num_requests: int
) -> ServerSettings:
    """Return how the parsed flags start the servers.

    Args:
        args: Parsed.
        model: Folder or name.
        num_tokens: KV that a server should hold, where it is not a GPU that says what fits.
        num_requests: That it should run at the same time there.
    """
    from sgl_blend.commands.bench.pair import ServerSettings

    return ServerSettings(
        model=model,
        dummy=args.shape is not None,
        flags=[word for flag in args.server_arg for word in flag],
        blend_flags=[word for flag in args.blend_arg for word in flag],
        num_tokens=num_tokens,
        num_requests=num_requests,
    )


def tell(console: Console, line: str) -> None:
    """Print a line where there is no bar."""
    if not console.is_terminal:
        print_line(console, line)


def check_fits(shape: Shape, num_tokens: int) -> None:
    """Refuse prompts that are too long for the model.

    Raises:
        CommandError: So many tokens are.
    """
    if num_tokens > shape.num_positions:
        raise CommandError(
            f"a prompt and its answer must fit the model's {shape.num_positions} positions, "
            f"got {num_tokens} tokens"
        )

"""Show what blending does: real text, the real server, the stock server beside it.

    python -m examples.demo.run

Everything is made and written under build/; the figures go to build/demo.json. Exits with 1 if one
of them misses its bound.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.material import Material, Prompt, Recipe, prepare
from examples.demo.measure import Answer, Run, ask, stream_first_token, wait_for_chunks
from examples.demo.report import (
    RATIO,
    Variant,
    compare,
    figures,
    make_table,
    shortfalls,
    summary,
    to_json,
)
from sgl_blend.commands.common.server import KEEP_MEMORY, Server, ServerError, running
from sgl_blend.settings.config import BlendConfig

BUILD = Path(__file__).resolve().parents[2] / "build"
FOLDER = BUILD / "demo"
DEFAULT = BlendConfig().blend_policy
VARIANTS = (
    *(Variant(DEFAULT, ratio) for ratio in (0.0, RATIO, 0.5, 1.0)),
    *(Variant(policy, RATIO) for policy in ("hkvd", "funnel") if policy != DEFAULT),
)
FIRST_TOKEN_FLAGS = () if torch.cuda.is_available() else ("--disable-overlap-schedule",)
"""Of both servers. The overlap schedule launches a decode step before it looks at the prefill's result.
A GPU does that beside the host; on a CPU every first token waits for it."""

T = TypeVar("T")


class Screen:
    """Progress for people: a bar of what is going on now, a line for what is done.

    Where the output is no terminal, the lines are all there is.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, line: str) -> None:
        """Print a line at once."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def track(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """Iterate over items with a bar."""
        with self._bar(what, len(items)) as move:
            for done, item in enumerate(items, start=1):
                yield item
                move(done)

    @contextmanager
    def waiting(self, what: str, total: int) -> Iterator[Callable[[float], None]]:
        """Show a bar for something that is waited for; yields what moves it."""
        started = time.monotonic()
        with self._bar(what, total) as move:
            yield move
        self.say(f"{what}: {time.monotonic() - started:.0f} s")

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[float], None]]:
        if not self.console.is_terminal:
            self.say(f"{what} ...")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=min(int(done), total))


@contextmanager
def server(screen: Screen, name: str, material: Material, extra: list[str]) -> Iterator[Server]:
    """Run a server, with a bar while it starts."""
    log = FOLDER / f"{name}.log"
    with ExitStack() as stack:
        with screen.waiting(f"starting the {name} server", 30) as waiting:
            # Without these settings page faults slow down whichever server has bad luck.
            started = stack.enter_context(
                running(
                    material.model,
                    [*FIRST_TOKEN_FLAGS, *extra],
                    log,
                    waiting,
                    environment=KEEP_MEMORY,
                )
            )
        yield started


def warm_up(screen: Screen, blending: Server, stock: Server, material: Material) -> None:
    """Let both servers meet the same prompts, every chunk once, before anything is timed."""
    *first_sight, again = material.warm_up
    meet(
        screen,
        "blending server, first sight of the chunks",
        blending,
        first_sight,
        Prompt.marked,
    )
    num_chunks = len(material.chunk_tokens)
    with screen.waiting("building and probing chunks in the background", num_chunks) as waiting:
        wait_for_chunks(blending, num_chunks, waiting)
    meet(screen, "blending server, warm-up", blending, [again], Prompt.marked)
    meet(screen, "stock server, warm-up", stock, material.warm_up, Prompt.plain)


def measure(
    screen: Screen, blending: Server, stock: Server, material: Material
) -> tuple[dict[Variant, Run], Run]:
    """Send every prompt to the stock server and, in each variant, to the blending one.

    One request at a time, and the servers take turns, so that whatever else this machine does
    slows both sides alike.

    Returns:
        What came of it by variant, and what the stock server answered.
    """
    blended: dict[Variant, list[Answer]] = {variant: [] for variant in VARIANTS}
    full: list[Answer] = []
    size = material.vocab_size
    for number, prompt in enumerate(screen.track("prompts", material.prompts), start=1):
        full.append(ask(stock, prompt.plain(), None, size))
        for (policy, ratio), answers in blended.items():
            params = {"sgl_blend_policy": policy, "sgl_blend_ratio": ratio}
            answers.append(ask(blending, prompt.marked(), params, size))
        times = ", ".join(f"{variant}: {run[-1].ttft_s:.2f}" for variant, run in blended.items())
        screen.say(
            f"prompt {number}/{len(material.prompts)}, first token after: "
            f"full {full[-1].ttft_s:.2f} s, {times}"
        )
    return {variant: Run(tuple(answers)) for variant, answers in blended.items()}, Run(tuple(full))


def meet(
    screen: Screen,
    stage: str,
    started: Server,
    prompts: Sequence[Prompt],
    render: Callable[[Prompt], str],
) -> None:
    """Send prompts whose answers and times do not matter."""
    for prompt in screen.track(stage, prompts):
        stream_first_token(started, render(prompt), None)


def main() -> int:
    parser = argparse.ArgumentParser(description="Show what blending gains and what it costs.")
    parser.add_argument(
        "--any-speed",
        action="store_true",
        help="do not fail for a speed-up below the bound, as on a machine shared with others",
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="time only the first N prompts, for time"
    )
    args = parser.parse_args()
    if args.prompts is not None and args.prompts < 1:
        parser.error(f"--prompts must be at least 1, got {args.prompts}")
    started_s = time.monotonic()
    # Unwind when terminated as when interrupted, so that no server outlives the demo.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    console = Console()
    screen = Screen(console)
    FOLDER.mkdir(parents=True, exist_ok=True)
    material = prepare(FOLDER, Recipe(), lambda line: screen.say(f"making {line}"))
    material = replace(material, prompts=material.prompts[: args.prompts])
    screen.say(
        f"Llama of {material.num_parameters / 1e6:.0f} M random weights; "
        f"{len(material.prompts)} prompts of about {material.prompt_tokens[0]} tokens"
    )
    try:
        with (
            server(screen, "blending", material, ["--enable-blend"]) as blending,
            server(screen, "stock", material, []) as stock,
        ):
            commands = {"blending": blending.command, "stock": stock.command}
            warm_up(screen, blending, stock, material)
            blended, full = measure(screen, blending, stock, material)
    except (ServerError, httpx.HTTPError, openai.OpenAIError) as err:
        console.print(f"error: {err}", style="red", markup=False, highlight=False)
        return 1
    rows = compare(blended, full)
    wall_s = time.monotonic() - started_s
    (BUILD / "demo.json").write_text(to_json(rows, full, material, commands, wall_s))
    console.print(make_table(rows, full, len(material.prompts)))
    screen.say(
        "Both servers saw the same traffic in turns, and every timed prompt was new to them. The "
        "blending server answered each chunk's first sight in full and built it in the background "
        "(--blend-on-miss compute). Distributions were read after each timed request, from the KV "
        "that it had left in the radix cache."
    )
    found = figures(rows)
    missed = shortfalls(found)
    for sentence in missed:
        console.print(f"missed: {sentence}", style="red", highlight=False)
    print(summary(found))
    fatal = [sentence for sentence in missed if not (args.any_speed and "speedup" in sentence)]
    return 1 if fatal else 0


if __name__ == "__main__":
    sys.exit(main())

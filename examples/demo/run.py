"""Show what blending does: real text, the real server, the stock server beside it.

    python examples/demo/run.py

Everything is made and written under build/; the figures go to build/demo.json. Exits with 1 if one
of them misses its bound.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
from material import Material, Prompt, Recipe, prepare
from measure import Run, Track, run_prompts, stream_first_token, wait_for_chunks
from report import compare, figures, make_table, shortfalls, summary, to_json
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from servers import Server, ServerError, running

BUILD = Path(__file__).resolve().parents[2] / "build"
FOLDER = BUILD / "demo"
RATIOS = (0.0, 0.15, 0.5, 1.0)


class Screen:
    """Progress for people: a bar of what is going on now, a line for what is done.

    Where the output is no terminal, the lines are all there is.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, line: str) -> None:
        """Print a line at once."""
        self.console.print(line, highlight=False)

    def track(self, stage: str) -> Track:
        """Return a Track whose bars are headed by stage."""

        def over(what: str, items: Iterable[str]) -> Iterator[str]:
            texts = list(items)
            with self._bar(f"{stage}: {what}", len(texts)) as move:
                for done, text in enumerate(texts, start=1):
                    yield text
                    move(done)

        return over

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
            started = stack.enter_context(running(material.model, extra, log, waiting))
        yield started


def measure_blended(screen: Screen, started: Server, material: Material) -> dict[float, Run]:
    """Let the server meet every chunk once, then send the prompts at every ratio."""
    *first_sight, again = material.warm_up
    meet(screen, "first sight of the chunks", started, first_sight, Prompt.marked)
    num_chunks = len(material.chunk_tokens)
    with screen.waiting("building chunks in the background", num_chunks) as waiting:
        wait_for_chunks(started, num_chunks, waiting)
    meet(screen, "warm-up", started, [again], Prompt.marked)
    runs = {}
    for ratio in RATIOS:
        stage = f"blended, ratio {ratio:g}"
        runs[ratio] = run_prompts(
            started,
            [prompt.marked() for prompt in material.prompts],
            {"sgl_blend_ratio": ratio},
            material.vocab_size,
            screen.track(stage),
        )
        screen.say(f"{stage}: median TTFT {runs[ratio].median_s:.2f} s")
    return runs


def measure_stock(screen: Screen, started: Server, material: Material) -> Run:
    """Send the very same traffic, without separators, to SGLang as it is."""
    meet(screen, "warm-up", started, material.warm_up, Prompt.plain)
    run = run_prompts(
        started,
        [prompt.plain() for prompt in material.prompts],
        None,
        material.vocab_size,
        screen.track("stock, full prefill"),
    )
    screen.say(f"stock, full prefill: median TTFT {run.median_s:.2f} s")
    return run


def meet(
    screen: Screen,
    stage: str,
    started: Server,
    prompts: Iterable[Prompt],
    render: Callable[[Prompt], str],
) -> None:
    """Send prompts whose answers and times do not matter."""
    for text in screen.track(stage)("prompts", map(render, prompts)):
        stream_first_token(started, text, None)


def main() -> int:
    started_s = time.monotonic()
    # Unwind when terminated as when interrupted, so that no server outlives the demo.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    console = Console()
    screen = Screen(console)
    FOLDER.mkdir(parents=True, exist_ok=True)
    material = prepare(FOLDER, Recipe(), lambda line: screen.say(f"making {line}"))
    screen.say(
        f"Llama of {material.num_parameters / 1e6:.0f} M random weights; "
        f"{len(material.prompts)} prompts of about {material.prompt_tokens[0]} tokens"
    )
    commands = {}
    try:
        with server(screen, "blending", material, ["--enable-blend"]) as blending:
            commands["blending"] = blending.command
            blended = measure_blended(screen, blending, material)
        with server(screen, "stock", material, []) as stock:
            commands["stock"] = stock.command
            full = measure_stock(screen, stock, material)
    except (ServerError, httpx.HTTPError, openai.OpenAIError) as err:
        console.print(f"error: {err}", style="red", markup=False, highlight=False)
        return 1
    rows = compare(blended, full)
    wall_s = time.monotonic() - started_s
    (BUILD / "demo.json").write_text(to_json(rows, full, material, commands, wall_s))
    console.print(make_table(rows, full, len(material.prompts)))
    screen.say(
        "Both servers saw the same traffic, and every timed prompt was new to them. The blending "
        "server answered each chunk's first sight in full and built it in the background "
        "(--blend-on-miss compute). Distributions were read afterwards from the KV that the timed "
        "request had left in the radix cache."
    )
    found = figures(rows)
    missed = shortfalls(found)
    for sentence in missed:
        console.print(f"missed: {sentence}", style="red", highlight=False)
    print(summary(found))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

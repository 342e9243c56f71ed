"""The demo's prompts without a mark: a server that learns them, beside stock.

    python -m examples.demo.find

The prompts are sent by an unmodified OpenAI client, in three visits with other orders of the documents.
At first nothing is known. What comes for the second time becomes a chunk, and from the third time on
it is found. Exits with 1 if the last visit finds too little or is not faster than stock.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import httpx
import openai
from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.material import Material, Prompt, Recipe, prepare
from examples.demo.measure import (
    TOKEN_KINDS,
    kl_divergence,
    read_distribution,
    stream_first_token,
)
from examples.demo.run import BUILD, FOLDER, Screen, server
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import Server, ServerError

SECOND_ORDERS = (11, 2, 7, 4, 9, 0), (10, 1, 8, 3, 6, 5)
"""Places of the first visit. No two prompts of all visits begin with the same document."""
LEAST_FOUND, LEAST_FASTER = 0.75, 2.5
"""Of the last visit: tokens found per prompt token, and stock's time by ours."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a prompt: tokens by kind, seconds on both servers, and KL to stock."""

    tokens: dict[str, int]
    blend_s: float
    stock_s: float
    kl: float


def visits(material: Material) -> dict[str, list[Prompt]]:
    """Return the prompts by how often their documents came before: never, once, more."""
    first = material.warm_up[:2]
    chunks = [chunk for prompt in first for chunk in prompt.chunks]
    second = [
        Prompt(tuple(chunks[place] for place in order), first[0].question)
        for order in SECOND_ORDERS
    ]
    return {
        "first": list(first),
        "second": second,
        "later": list(material.prompts),
    }


def ask_both(blend: Server, stock: Server, prompt: Prompt, vocab_size: int) -> Answer:
    """Send a prompt to both servers, to each when nothing is being built: builds must slow neither."""
    import numpy as np

    text = prompt.plain()
    blend.wait_for_builds()
    before = blend.info()
    ours = stream_first_token(blend, text, None)
    after = blend.info()
    blend.wait_for_builds()
    full = stream_first_token(stock, text, None)
    names = ("prompt_tokens", "found_tokens", *TOKEN_KINDS)
    pair = [np.stack([read_distribution(one, text, None, vocab_size)]) for one in (stock, blend)]
    return Answer(
        {name: int(after[name]) - int(before[name]) for name in names},
        ours.ttft_s,
        full.ttft_s,
        kl_divergence(*pair),
    )


def make_table(found: dict[str, list[Answer]]) -> Table:
    """Lay the visits out (number of prompts): mean tokens of a prompt, median times, mean KL."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("sight", no_wrap=True)
    kinds = [kind.removesuffix("_tokens") for kind in TOKEN_KINDS]
    for name in ("found", *kinds, "TTFT", "stock", "faster", "KL"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, answers in found.items():
        told = _sum(answers)
        table.add_row(
            f"{name} ({len(answers)})",
            f"{told['found_tokens'] / told['prompt_tokens']:.0%}",
            *(f"{told[kind] / len(answers):.0f}" for kind in TOKEN_KINDS),
            f"{median(one.blend_s for one in answers):.2f}",
            f"{median(one.stock_s for one in answers):.2f}",
            f"{_faster(answers):.2f}x",
            f"{sum(one.kl for one in answers) / len(answers):.2g}",
        )
    return table


def figures(found: dict[str, list[Answer]]) -> dict[str, float]:
    """Return what the demo is judged by: its last visit."""
    later = found["later"]
    told = _sum(later)
    return {
        "found_share": told["found_tokens"] / told["prompt_tokens"],
        "speedup_ttft": _faster(later),
        "kl": sum(one.kl for one in later) / len(later),
    }


def shortfalls(told: dict[str, float], *, any_speed: bool) -> list[str]:
    """Return a sentence for every bound that was missed."""
    missed = []
    if told["found_share"] < LEAST_FOUND:
        missed.append(f"{told['found_share']:.2f} of the tokens were found, not {LEAST_FOUND}")
    if told["speedup_ttft"] < LEAST_FASTER and not any_speed:
        missed.append(f"{told['speedup_ttft']:.2f} times as fast as stock, not {LEAST_FASTER}")
    return missed


def _sum(answers: Sequence[Answer]) -> dict[str, int]:
    return {name: sum(one.tokens[name] for one in answers) for name in answers[0].tokens}


def _faster(answers: Sequence[Answer]) -> float:
    return median(one.stock_s for one in answers) / median(one.blend_s for one in answers)


def main() -> int:
    parser = argparse.ArgumentParser(description="Find the demo's documents without a mark.")
    parser.add_argument("--any-speed", action="store_true", help="do not fail for the speed")
    any_speed = parser.parse_args().any_speed
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    console = Console(width=100)
    screen = Screen(console)
    FOLDER.mkdir(parents=True, exist_ok=True)
    material = prepare(FOLDER, Recipe(), lambda line: screen.say(f"making {line}"))
    flags = ["--enable-blend", "--blend-find", "learned"]
    found: dict[str, list[Answer]] = {}
    try:
        with (
            server(screen, "learning", material, flags) as blend,
            server(screen, "stock", material, []) as stock,
        ):
            for name, prompts in visits(material).items():
                found[name] = [
                    ask_both(blend, stock, prompt, material.vocab_size)
                    for prompt in screen.track(name, prompts)
                ]
    except (ServerError, httpx.HTTPError, openai.OpenAIError) as err:
        console.print(f"error: {err}", style="red", markup=False, highlight=False)
        return 1
    told = figures(found)
    (BUILD / "demo-find.json").write_text(
        json.dumps({**told, **origin_of_script()}, indent=2) + "\n"
    )
    console.print(make_table(found))
    missed = shortfalls(told, any_speed=any_speed)
    for sentence in missed:
        console.print(f"missed: {sentence}", style="red", highlight=False)
    print(
        f"without a mark: {told['found_share']:.0%} of the prompt tokens found, first token "
        f"{told['speedup_ttft']:.1f}x as soon as stock, KL {told['kl']:.2g}"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

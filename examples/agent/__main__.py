"""An agent with a clock in its system prompt, on a blending server and on a stock server.

    python -m examples.agent

Its prompts are sent by an unmodified OpenAI client. Nothing in them is marked: the server learns what
comes again. Everything is made under build/agent. Exits with 1 if a bound is missed.
"""

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from examples.agent.conversation import STEPS, Agent, Tools
from examples.agent.material import RECIPE, make_documents, make_workspace, prepare_model
from examples.agent.measure import play
from examples.agent.report import draw, figures, make_table, shortfalls
from examples.demo.material import Recipe
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.common.server import launched

FOLDER = Path(__file__).resolve().parents[2] / "build" / "agent"
SHORT = Recipe(
    seed=2_411,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    max_position_embeddings=8_192,
)
FLAGS = ["--enable-blend", "--blend-find", "learned"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve an agent, learned and stock.")
    parser.add_argument("--short", action="store_true", help="with a tiny model, at any speed")
    parser.add_argument("--any-speed", action="store_true", help="do not fail for the speed")
    parser.add_argument("--json", type=Path, default=FOLDER / "agent.json")
    parser.add_argument("--plot", type=Path, help="a PNG of tokens and times")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    console = Console(width=140)
    folder = FOLDER / ("short" if args.short else "full")
    model = prepare_model(folder, SHORT if args.short else RECIPE, console.print)
    make_workspace(folder / "files")
    agent = Agent(Tools(folder / "files", make_documents(model)))
    prompts = [*agent.prompts()]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    with ExitStack() as stack:
        always = ["--blend-when", "always"] if args.short else []
        console.print("starting two servers ...")
        launches = [
            stack.enter_context(launched(model, flags, folder / f"{name}.log"))
            for name, flags in (("blend", [*FLAGS, *always]), ("stock", []))
        ]
        blend, stock = (launch.wait() for launch in launches)
        turns = play(blend, stock, prompts)
    told = figures(turns)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**told, **origin_of_script()}, indent=1) + "\n")
    console.print(make_table(turns, [step.says for step in STEPS]))
    if args.plot is not None:
        draw(told, args.plot)
    missed = shortfalls(told, any_speed=args.any_speed or args.short)
    for sentence in missed:
        console.print(f"missed: {sentence}", style="red")
    print(
        f"from turn {told['first_turn']} on: {told['found_of_repeated']:.2f} of what repeats is found, "
        f"first token {told['faster_than_stock']:.1f} times as soon as stock"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""How much is found in prompts without marks, beside the same prompts with every document marked.

Parts, all by default:

    streams  prompts that frameworks and agents write, through the real engine with a slim model:
             which share of their tokens is served from chunks, how much of what came before is
             found again, and how much is built for it. Four renderings and two tokenizers.
    lookup   intake and lookup of a prompt of 8,000 tokens, with 100,000 chunks in SGLang's tree and a
             million starts in the index; and the memory of a start.
    ttft     prompts that never repeat, on two real servers in pairs: --blend-find marks and learned.

    .venv/bin/python -m benchmarks.find --json benchmarks/results/find.json
    .venv/bin/python -m benchmarks.find --parts streams --count 40     # a look

The engines of the first two parts are those that tests step by hand, so PYTHONPATH holds tests/. Every
server that learns is a new one. Nothing is evicted, and builds are waited for.

hit is the share of a stream's tokens that were served beyond what a prefix cache would have served.
recall is the same against the tokens that an earlier prompt holds in a run of at least 32 tokens. Both
are of the second half of a stream. built is the tokens that were built in the background per token of
all prompts. An agent that keeps its last messages is served with --blend-learn-share 1 as well: its
documents cost more builds than the default allows.

Exit status 1 if a bar is missed; BARS has them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import find_engine, find_plot
from benchmarks.find_engine import Found
from benchmarks.find_streams import (
    RENDERINGS,
    SPLITS,
    WINDOW,
    Chat,
    Marked,
    make_documents,
    make_model,
    make_tokenizer,
    rag,
    streams,
)
from benchmarks.match import REFERENCE_MS
from benchmarks.repeats import Repeats, count_repeats
from sgl_blend.commands.common.records import origin_of_script

ROOT = Path(__file__).parents[1]
PARTS = ("streams", "lookup", "ttft")
UNBOUNDED = " (learn share 1)"
BARS: dict[str, float] = {
    "hit of marked": 0.93,  # at least, each rendering and tokenizer
    "recall, agent that edits files": 0.88,  # at least
    f"recall, {WINDOW}": 0.75,  # at least
    "built, documents by Zipf's law": 0.15,  # at most
    "built, never repeated": 0.01,  # at most
    "piece": 220.0,  # at least, tokens
    "lookup p99": 1.0,  # at most, milliseconds of the machine of REFERENCE_MS, as in match.py
    "bytes of a start": 40.0,  # at most
    "ttft of marks": 1.02,  # at most
}
POOL_TOKENS = 2_000_000
SETTINGS: dict[str, Any] = {
    "enable_blend": True,
    "blend_when": "always",
    "blend_check_layer": 1,
    "blend_policy": "hkvd",
    "skip_tokenizer_init": False,
    "max_total_tokens": POOL_TOKENS,
    "max_running_requests": 2,
    "context_length": 32_768,
}


# --- streams ------------------------------------------------------------------------------------


def measure_streams(count: int) -> dict[str, Any]:
    """Serve all streams."""
    measured: dict[str, Any] = {"marked": {}, "rag": {}, "others": {}}
    for split in SPLITS:
        folder = ROOT / "build" / "find" / split
        tokenizer = make_tokenizer(split, folder)
        make_model(folder)
        chat, documents = Chat(tokenizer), make_documents(tokenizer)
        for rendering in RENDERINGS:
            name = f"{rendering}, {split}"
            stream = rag(chat, documents, rendering, count)
            repeats = count_repeats(one.tokens for one in stream)
            for kind, is_marked in (("marked", True), ("rag", False)):
                served = _serve(folder, stream, marked=is_marked)
                measured[kind][name] = _figures(stream, repeats, *served)
            marked, learned = measured["marked"][name], measured["rag"][name]
            learned["of_marked"] = learned["hit"] / marked["hit"]
            print(
                f"{name:22} hit {learned['hit']:.3f}, marked {marked['hit']:.3f}: "
                f"{learned['of_marked']:.3f}; recall {learned['recall']:.3f}, "
                f"built {learned['built']:.3f}, piece {learned['piece']:.0f} tokens",
                flush=True,
            )
        for name, make in streams(chat, documents).items():
            stream = make()
            repeats = count_repeats(one.tokens for one in stream)
            for note, share in {"": None, **({UNBOUNDED: 1.0} if name == WINDOW else {})}.items():
                served = _serve(folder, stream, marked=False, share=share)
                told = _figures(stream, repeats, *served)
                measured["others"][f"{name}{note}, {split}"] = told
                print(
                    f"{name}{note}, {split}: recall {told['recall']:.3f}, "
                    f"built {told['built']:.4f}, piece {told['piece']:.0f} tokens, "
                    f"{told['tokens_of_a_prompt']:.0f} a prompt",
                    flush=True,
                )
    return measured


def _serve(
    folder: Path, stream: Sequence[Marked], *, marked: bool, share: float | None = None
) -> tuple[list[Found], int]:
    from harness import Engine

    more: dict[str, Any] = {} if share is None else {"blend_learn_share": share}
    engine = Engine(folder, **SETTINGS, **more, blend_find="marks" if marked else "learned")
    try:
        served: tuple[list[Found], int] = engine.call(find_engine.serve, stream, marked)
    finally:
        engine.close()
    return served


def _figures(
    stream: Sequence[Marked], repeats: Sequence[Repeats], found: Sequence[Found], learned: int
) -> dict[str, float]:
    """Return shares; those of use are of the second half."""
    half = len(stream) // 2
    beyond = [max(0, one.served - told.exact) for one, told in zip(found, repeats, strict=True)]
    tokens = [len(one.tokens) for one in stream]
    repeated = [told.repeated for told in repeats]
    return {
        "prompts": len(stream),
        "tokens_of_a_prompt": statistics.mean(tokens),
        "exact": sum(told.exact for told in repeats[half:]) / sum(tokens[half:]),
        "repeated": sum(repeated[half:]) / sum(tokens[half:]),
        "hit": sum(beyond[half:]) / sum(tokens[half:]),
        "recall": sum(beyond[half:]) / max(1, sum(repeated[half:])),
        "built": learned / sum(tokens),
        "piece": sum(one.piece_tokens for one in found) / max(1, sum(one.pieces for one in found)),
    }


# --- time ---------------------------------------------------------------------------------------


def measure_lookups(num_chunks: int, num_starts: int, num_prompts: int) -> dict[str, Any]:
    """Time intake and lookup in a worker."""
    from harness import Engine
    from tiny_models import make_slim_model

    settings = {**SETTINGS, "skip_tokenizer_init": True, "max_total_tokens": 100 * num_chunks}
    engine = Engine(make_slim_model(ROOT / "build" / "models"), **settings, blend_find="known")
    try:
        told: dict[str, Any] = engine.call(
            find_engine.time_lookups, num_chunks, num_starts, num_prompts
        )
    finally:
        engine.close()
    both, fixed = told["both_ms"], told["fixed_ms"]
    print(
        f"intake and lookup of {told['prompt_tokens']} tokens, {told['found_tokens']:.0f} found: "
        f"p50 {both['p50']:.3f}, p99 {both['p99']:.3f} ms; fixed work p50 {fixed['p50']:.3f}, "
        f"p99 {fixed['p99']:.3f} ms; {told['bytes_of_a_start']:.1f} bytes a start",
        flush=True,
    )
    return told


def measure_ttft(pairs: int, rounds: int) -> dict[str, Any]:
    """Compare the time to first token of prompts that never repeat, with and without learning."""
    from benchmarks.cold import Kind, both, compare, summarise
    from examples.demo.material import Recipe, prepare
    from sgl_blend.commands.common.server import KEEP_MEMORY

    material = prepare(ROOT / "build" / "demo", Recipe(), print)
    flags = ["--enable-blend"], ["--enable-blend", "--blend-find", "learned"]
    found = []
    for number in range(rounds):
        first = number % 2 == 0
        logs = ROOT / "build"
        with both(material.model, flags, logs, KEEP_MEMORY, stock_first=first) as servers:
            found.append(compare(*servers, material, Kind(chunks=False), pairs))
    told = summarise(found)
    print(f"TTFT of unique prompts: {1 + told['overhead']:.4f} of that with marks only", flush=True)
    return told


# --- bars ---------------------------------------------------------------------------------------


def judge(record: dict[str, Any]) -> list[str]:
    """Return a line for each bar that is missed."""
    missed: list[str] = []

    def check(name: str, bar: str, value: float, *, at_least: bool) -> None:
        bound = BARS[bar]
        if (value < bound) if at_least else (value > bound):
            missed.append(f"{name}: {bar} is {value:.4g}, the bar {bound:g}")

    if told := record.get("streams"):
        for name, row in told["rag"].items():
            check(name, "hit of marked", row["of_marked"], at_least=True)
            check(name, "built, documents by Zipf's law", row["built"], at_least=False)
            check(name, "piece", row["piece"], at_least=True)
        for name, row in told["others"].items():
            kind = name.rpartition(",")[0]
            if kind == "never repeated":
                check(name, "built, never repeated", row["built"], at_least=False)
            else:
                bar = f"recall, {kind.removesuffix(UNBOUNDED)}"
                check(name, bar, row["recall"], at_least=True)
    if told := record.get("lookup"):
        slowness = max(1.0, told["fixed_ms"]["p50"] / REFERENCE_MS)
        check("lookup", "lookup p99", told["both_ms"]["p99"] / slowness, at_least=False)
        check("lookup", "bytes of a start", told["bytes_of_a_start"], at_least=False)
    if told := record.get("ttft"):
        check("ttft", "ttft of marks", 1 + told["overhead"], at_least=False)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--count", type=int, default=300, help="prompts of a stream by Zipf's law")
    parser.add_argument("--chunks", type=int, default=100_000, help="of the lookup, in the tree")
    parser.add_argument("--starts", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--prompts", type=int, default=500, help="that are looked up")
    parser.add_argument("--pairs", type=int, default=12, help="of the times, in each round")
    parser.add_argument("--rounds", type=int, default=2, help="the servers are started in each")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "find.json")
    parser.add_argument("--plot", type=Path, help="a PNG of the streams")
    args = parser.parse_args()
    record = json.loads(args.json.read_text()) if args.json.exists() else {}
    for part in args.parts:
        match part:
            case "streams":
                record |= {**origin_of_script(), part: measure_streams(args.count)}
            case "lookup":
                told = measure_lookups(args.chunks, args.starts, args.prompts)
                record[part] = {**told, **origin_of_script()}
            case _:
                record[part] = {**measure_ttft(args.pairs, args.rounds), **origin_of_script()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot is not None and "streams" in record:
        find_plot.draw(record["streams"], args.plot)
    missed = judge(record)
    for line in missed:
        print("missed:", line)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

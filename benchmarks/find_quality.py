"""What learned chunks cost in quality, beside marked ones, on prompts of the test model.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.find_quality

The prompts begin alike, as those of one application do. The same held-out prompts are answered three
times: in full, with every document marked, and without a mark by a server that has learned. It learned
from other prompts: each half of the documents of a prompt was seen in two of them, behind a document of
another prompt. So its chunks hold several documents, as runs that come again do, and a prompt is made
of two of them and of their seams.

Compared are KL(full || blended) of the first token and the share of right answers, in pairs, with
bootstrap intervals. Exit status 1 if the mean KL is more than 0.1 nats above that of marked chunks, or
if fewer than half of the documents' tokens were found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from examples.tinyrag.evaluate import FINAL_SEED, MODELS
from examples.tinyrag.world import make_held_out
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.evaluation.evaluate import NUM_TOP
from sgl_blend.commands.evaluation.items import Item, ItemLine
from sgl_blend.commands.evaluation.prompts import (
    Prompt,
    find_templates,
    load_encoder,
    make_prompt,
)
from sgl_blend.commands.evaluation.runner import CPU_DEFAULTS, Answer, BlendEngine, read_answer
from sgl_blend.commands.evaluation.scores import score_answer
from sgl_blend.engine.offline import OfflineEngine
from sgl_blend.settings.config import BlendConfig

ROOT = Path(__file__).parents[1]
BAR_NATS, LEAST_FOUND = 0.1, 0.5
"""Documents of this model have 37 to 75 tokens, and nothing below 64 tokens is learned by itself."""
BATCH = 10
NEW_TOKENS = 8
PATIENCE_S = 120.0
SMALL_CHUNKS = {"blend_min_chunk_tokens": 8, "blend_when": "always"}
LEARNS = {
    **SMALL_CHUNKS,
    "enable_blend": True,
    "blend_find": "learned",
    "blend_learn_share": 1.0,
    "max_running_requests": 16,
}

Tokens = tuple[int, ...]


def batches(prompts: Sequence[Prompt]) -> Iterator[slice]:
    """Yield the prompts that are asked at once."""
    for begin in range(0, len(prompts), BATCH):
        yield slice(begin, begin + BATCH)


def ask_marked(
    model: Path, prompts: Sequence[Prompt], num_top: int, say: Callable[[str], None]
) -> tuple[list[Answer], list[Answer]]:
    """Answer prompts in full, and with their chunks marked and built first."""
    default = BlendConfig()
    full: list[Answer] = []
    marked: list[Answer] = []
    with BlendEngine(
        str(model),
        check_layer=default.blend_check_layer,
        build_prefix=default.blend_build_prefix,
        engine_args=SMALL_CHUNKS,
    ) as engine:
        for part in batches(prompts):
            some = prompts[part]
            told = engine.ask_full(some, max_new_tokens=NEW_TOKENS, num_top=num_top)
            full += told
            marked += engine.ask(
                some,
                default.blend_policy,
                [default.blend_recompute_ratio] * len(some),
                max_new_tokens=NEW_TOKENS,
                reference_ids=[answer.first.token_ids for answer in told],
            )
            say(f"marked: {len(full)} of {len(prompts)}")
    return full, marked


def ask_learned(
    model: Path, prompts: Sequence[Prompt], full: Sequence[Answer], say: Callable[[str], None]
) -> tuple[list[Answer], int]:
    """Answer prompts without a mark after their halves were learned.

    Returns:
        The answers, and the tokens of all chunks that were learned.
    """
    settings = {**CPU_DEFAULTS, **LEARNS, "model_path": str(model)}
    engine = OfflineEngine(settings)
    answers: list[Answer] = []
    try:
        teach(engine, [first_sights(prompts, number)[0] for number in range(8)])  # names the head
        for part in batches(prompts):
            numbers = range(len(prompts))[part]
            for sight in range(2):
                lessons = [text for n in numbers for text in first_sights(prompts, n, sight)]
                teach(engine, lessons)
            reference = [full[number].first.token_ids for number in numbers]
            outputs = engine.generate(
                [prompts[number].token_ids for number in numbers],
                [{} for _ in numbers],
                NEW_TOKENS,
                {"token_ids_logprob": [list(ids) for ids in reference]},
            )
            answers += [
                read_answer(output, "output_token_ids_logprobs", ids)
                for output, ids in zip(outputs, reference, strict=True)
            ]
            say(f"learned: {len(answers)} of {len(prompts)}")
        learned = int(engine.blend_info()["finding"]["learned_tokens"])
    finally:
        engine.close()
    return answers, learned


def under_one_head(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give all prompts the text before the first document of the first one, as one application does."""
    head = prompts[0].token_ids[: prompts[0].spans[0]]
    return [
        replace(
            one,
            token_ids=head + one.token_ids[one.spans[0] :],
            spans=tuple(edge - one.spans[0] + len(head) for edge in one.spans),
        )
        for one in prompts
    ]


def first_sights(prompts: Sequence[Prompt], number: int, sight: int = 0) -> list[Tokens]:
    """Return two prompts that hold a half each of a prompt's documents, behind another document."""
    prompt = prompts[number]
    chunks = [prompt.token_ids[start:stop] for start, stop in _pairs(prompt.spans)]
    head, question = prompt.token_ids[: prompt.spans[0]], prompt.token_ids[prompt.spans[-1] :]
    middle = (len(chunks) + 1) // 2
    told = []
    for place, half in enumerate((chunks[:middle], chunks[middle:])):
        other = prompts[(number + 211 * (sight + 1) + 97 * place) % len(prompts)]
        begin, end = _pairs(other.spans)[sight % (len(other.spans) // 2)]
        told.append(head + other.token_ids[begin:end] + sum(half, ()) + question)
    return told


def _pairs(spans: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(spans[::2], spans[1::2], strict=True))


def teach(engine: OfflineEngine, prompts: Sequence[Tokens]) -> None:
    """Ask prompts and wait until what was learned of them is built.

    Raises:
        TimeoutError: It is not.
    """
    engine.generate(prompts, [{} for _ in prompts], 1, {})
    deadline = time.monotonic() + PATIENCE_S
    while _pending(engine.blend_info()):
        if time.monotonic() > deadline:
            raise TimeoutError("what was learned is not built")
        time.sleep(0.05)


def _pending(info: Mapping[str, Any]) -> int:
    return int(info["chunks_pending"]) + int(info["probes_pending"])


def compare(
    items: Sequence[Item],
    full: Sequence[Answer],
    answers: Mapping[str, Sequence[Answer]],
    vocab_size: int,
) -> dict[str, Any]:
    """Return KL, accuracy and tokens of both ways, and their differences in pairs."""
    told: dict[str, Any] = {}
    kl: dict[str, np.ndarray] = {}
    right: dict[str, np.ndarray] = {}
    for name, some in (("full", full), *answers.items()):
        scores = [
            score_answer(item, answer, whole, vocab_size)
            for item, answer, whole in zip(items, some, full, strict=True)
        ]
        kl[name] = np.array([score.kl for score in scores])
        right[name] = np.array([score.right for score in scores])
        reports = [answer.report for answer in some]
        told[name] = {
            "kl": float(kl[name].mean()),
            "kl_ci95": mean_interval(kl[name].tolist(), 0),
            "accuracy": float(right[name].mean()),
            "accuracy_ci95": mean_interval(right[name].tolist(), 0),
            "tokens": {
                kind: sum(report[f"{kind}_tokens"] for report in reports)
                for kind in ("prompt", "prefix", "reused", "recomputed", "computed", "found")
            },
            "chunks": sum(report["chunk_hits"] for report in reports),
        }
    more_kl, more_right = kl["learned"] - kl["marked"], right["learned"] - right["marked"]
    told["learned_minus_marked"] = {
        "kl": float(more_kl.mean()),
        "kl_ci95": mean_interval(more_kl.tolist(), 0),
        "accuracy": float(more_right.mean()),
        "accuracy_ci95": mean_interval(more_right.tolist(), 0),
    }
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=tuple(MODELS), default="seed1")
    parser.add_argument("--count", type=int, default=500, help="prompts")
    parser.add_argument("--seed", type=int, default=FINAL_SEED, help="of the prompts")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "find_quality.json")
    args = parser.parse_args()
    model = MODELS[args.model]
    encode = load_encoder(str(model))
    templates = find_templates(str(model))
    items = [
        msgspec.convert(line, ItemLine).to_item() for line in make_held_out(args.seed, args.count)
    ]
    prompts = under_one_head([make_prompt(item, templates, encode) for item in items])
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    full, marked = ask_marked(model, prompts, min(NUM_TOP, vocab_size), print)
    learned, built = ask_learned(model, prompts, full, print)
    told = compare(items, full, {"marked": marked, "learned": learned}, vocab_size)
    documents = sum(stop - start for one in prompts for start, stop in _pairs(one.spans))
    told |= {"document_tokens": documents, "learned_tokens": built}
    told["found_of_documents"] = told["learned"]["tokens"]["found"] / documents
    record = {**origin_of_script(), "model": args.model, "count": args.count, **told}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    for name in ("full", "marked", "learned"):
        row = told[name]
        low, high = row["kl_ci95"]
        print(
            f"{name:8} accuracy {row['accuracy']:.3f}, KL {row['kl']:.4f} [{low:.4f}, {high:.4f}]"
        )
    more = told["learned_minus_marked"]
    low, high = more["kl_ci95"]
    print(
        f"learned minus marked: KL {more['kl']:+.4f} [{low:+.4f}, {high:+.4f}], accuracy "
        f"{more['accuracy']:+.3f}; {told['found_of_documents']:.3f} of the documents' tokens found "
        f"in {told['learned']['chunks']} pieces"
    )
    return int(more["kl"] > BAR_NATS or told["found_of_documents"] < LEAST_FOUND)


if __name__ == "__main__":
    sys.exit(main())

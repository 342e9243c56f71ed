"""May a conversation's own KV be reused behind a line that changed? Both ways, on the test model.

    PYTHONPATH=tests OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.own_history

A turn's prompt is the last one's with one text in front changed, as a clock in a system prompt is.
What stands behind it can be served in two ways:

    canonical   its documents are chunks, built behind the text before the line, or behind BOS alone:
                what sgl-blend does
    own         KV of the last turn's prompt is taken as it is: it attended to the old line

Two kinds of conversations: nothing depends on the line that changed (filler), or later documents
refer to it. Each way with the usual ratio of recomputed tokens, and own also without any. Compared with
a full prefill of the new prompt: KL of the first token, and how often the answer is the same. Where
the full prefills of both turns answer differently it is counted how often a way gives the old answer:
it knows what the conversation does not hold any more.

The engine is the one that tests step by hand, so PYTHONPATH holds tests/.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from harness import Answer, Driver, Engine, Prompt
from sparse_path import begin_anew, build_chunks, prefill_in_full, store_kv_of

from examples.tinyrag.evaluate import MODELS
from examples.tinyrag.words import THINGS
from examples.tinyrag.world import class_of, make_held_out
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.evaluation.items import ItemLine
from sgl_blend.commands.evaluation.prompts import find_templates, load_encoder

ROOT = Path(__file__).parents[1]
RATIO = 0.15
WAYS = {
    "canonical": RATIO,
    "canonical, behind BOS": RATIO,
    "own": RATIO,
    "own, none recomputed": 0.0,
}
"""Share of the reused tokens that is recomputed."""
SETTINGS: dict[str, Any] = {
    "enable_blend": True,
    "blend_when": "always",
    "blend_min_chunk_tokens": 4,
    "max_total_tokens": 12_000,
}
_PLACE = ("near the old bridge", "behind the quiet station", "under the green tower")


@dataclass(frozen=True, slots=True)
class Turns:
    """Two turns of a conversation.

    Attributes:
        head: Tokens in front of the line that changes.
        lines: The line in the first turn and in the second, of equal length.
        documents: What stands behind it.
        question: The last tokens.
    """

    head: list[int]
    lines: tuple[list[int], list[int]]
    documents: list[list[int]]
    question: list[int]

    def prompt(self, turn: int, *, whole: bool, behind_bos: bool = False) -> Prompt:
        """Return a turn's prompt with the documents as chunks, or all of them as one.

        Chunks are built behind what stands before the first mark. So a token is marked there, which is
        too short to be a chunk.
        """
        documents = (
            [[token for one in self.documents for token in one]] if whole else self.documents
        )
        front = self.head + self.lines[turn]
        mark = 1 if behind_bos else len(self.head)
        segments = [front[:mark], front[mark : mark + 1], front[mark + 1 :], *documents]
        chunk_at = [1, *range(3, 3 + len(documents))]
        return Prompt([*segments, self.question], chunk_at)


def conversations(folder: Path, count: int, seed: int, *, depends: bool) -> list[Turns]:
    """Make conversations; in half of the cases the first document is the line that changes."""
    encode, templates = load_encoder(str(folder)), find_templates(str(folder))
    draw = random.Random(f"own history/{seed}/{depends}")
    made = []
    for line in make_held_out(seed, 4 * count if depends else count):
        item = msgspec.convert(line, ItemLine).to_item()
        chunks = list(item.chunks)
        if depends:
            changed = _with_other_things(chunks.pop(0), draw)
            if changed is None:
                continue
            texts = changed
        else:
            texts = _clock(draw), _clock(draw)
        lines = [encode(templates.chunk_template.format(chunk=text), False) for text in texts]
        made.append(
            Turns(
                head=encode(templates.system_template.format(system=item.system), True),
                lines=(lines[0], lines[1]),
                documents=[
                    encode(templates.chunk_template.format(chunk=chunk), False) for chunk in chunks
                ],
                question=encode(templates.question_template.format(question=item.question), False),
            )
        )
        if len(made) == count:
            break
    return made


def _with_other_things(text: str, draw: random.Random) -> tuple[str, str] | None:
    """Return a text, and the same with each thing replaced by another one of its class."""
    things = {thing for things in THINGS.values() for thing in things}
    words = text.split()
    other = {
        word: draw.choice([one for one in THINGS[class_of(word)] if one != word])
        for word in words
        if word in things
    }
    return (text, " ".join(other.get(word, word) for word in words)) if other else None


def _clock(draw: random.Random) -> str:
    """Return a line about nothing that is asked, always of the same length."""
    return " ".join(f"the heavy engine rested {draw.choice(_PLACE)} ." for _ in range(2))


@dataclass(frozen=True, slots=True)
class Seen:
    """How one way answered the second turn.

    Attributes:
        kl: KL(full || this) of the first token, nats.
        agrees: Whether the likeliest token is that of a full prefill.
        is_old: Whether it is that of the first turn instead; None where both turns have the same.
        reused: Tokens that were taken as they were.
    """

    kl: float
    agrees: bool
    is_old: bool | None
    reused: int


def ask_turns(driver: Driver, some: Sequence[Turns]) -> dict[str, list[Seen]]:
    """Answer second turns in every way; runs in the worker."""
    seen: dict[str, list[Seen]] = {way: [] for way in WAYS}
    for turns in some:
        begin_anew(driver)
        first, second = (turns.prompt(turn, whole=True) for turn in range(2))
        old, full = (prefill_in_full(driver, prompt) for prompt in (first, second))
        for way, ratio in WAYS.items():
            is_own = way.startswith("own")
            prompt = turns.prompt(1, whole=is_own, behind_bos=way.endswith("BOS"))
            params = {"sgl_blend_policy": "hkvd" if ratio else "none", "sgl_blend_ratio": ratio}
            # A salt of its own: what is stored for one way must not serve another.
            prompt = replace(prompt, params=params, salt=way)
            state = build_chunks(driver, prompt, probed=False)
            if is_own:
                store_kv_of(driver, first, state)
            (answer,) = driver.ask(prompt)
            seen[way].append(_compare(answer, full, old))
            driver.settle()
    return seen


def _compare(answer: Answer, full: Answer, old: Answer) -> Seen:
    assert answer.report["fallback"] is None, answer.report
    log_p, log_q = np.array(full.logprobs[0]), np.array(answer.logprobs[0])
    differs = old.output_ids[0] != full.output_ids[0]
    return Seen(
        kl=max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum())),
        agrees=answer.output_ids[0] == full.output_ids[0],
        is_old=answer.output_ids[0] == old.output_ids[0] if differs else None,
        reused=answer.report["reused_tokens"],
    )


def sum_up(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return means with intervals."""
    kl, agrees = [one.kl for one in seen], [float(one.agrees) for one in seen]
    old = [float(one.is_old) for one in seen if one.is_old is not None]
    return {
        "kl": float(np.mean(kl)),
        "kl_ci95": mean_interval(kl, 0),
        "same_answer": float(np.mean(agrees)),
        "same_answer_ci95": mean_interval(agrees, 0),
        "changed_answers": len(old),
        "old_answer": float(np.mean(old)) if old else None,
        "old_answer_ci95": mean_interval(old, 0) if old else None,
        "reused_tokens": float(np.mean([one.reused for one in seen])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=tuple(MODELS), default="seed1")
    parser.add_argument("--count", type=int, default=200, help="conversations of each kind")
    parser.add_argument("--seed", type=int, default=20_261_126)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "own_history.json")
    args = parser.parse_args()
    folder = MODELS[args.model]
    record: dict[str, Any] = {
        **origin_of_script(),
        "model": args.model,
        "ratio": RATIO,
        "kinds": {},
    }
    engine = Engine(folder, **SETTINGS)
    try:
        for kind, depends in (("nothing depends on it", False), ("later text refers to it", True)):
            some = conversations(folder, args.count, args.seed, depends=depends)
            seen = engine.call(ask_turns, some)
            told = {way: sum_up(found) for way, found in seen.items()}
            record["kinds"][kind] = {"conversations": len(some), "ways": told}
            for way, row in told.items():
                old = "" if row["old_answer"] is None else f", old answer {row['old_answer']:.3f}"
                print(
                    f"{kind}: {way}: KL {row['kl']:.3f} [{row['kl_ci95'][0]:.3f}, "
                    f"{row['kl_ci95'][1]:.3f}], same answer {row['same_answer']:.3f}"
                    f"{old} of {row['changed_answers']}",
                    flush=True,
                )
    finally:
        engine.close()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

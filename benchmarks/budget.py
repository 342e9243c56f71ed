"""Is it worth it to give each request as many tokens as its chunks' memory says?

A fixed budget recomputes the same share of every request's chunks. A remembered budget recomputes as
many tokens as have a memory (scheduler/probes.py) above one threshold for all requests. The threshold
is that of other prompts, where it gives the same mean share. So a request with many tokens that depend
on their context gets more, and one with few gets less.

    .venv/bin/python -m benchmarks.budget --json benchmarks/results/budget.json

Both are asked of the real engine, with a ratio per request. Printed: accuracy of either, the interval
of their difference, KL, and the share that was recomputed.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.probes import CHECK_LAYER, MODEL, Item, Lower, texts_of
from examples.tinyrag.world import make_held_out
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.evaluation.items import ItemLine
from sgl_blend.commands.evaluation.prompts import find_templates, load_encoder, make_prompt
from sgl_blend.commands.evaluation.runner import BlendEngine
from sgl_blend.commands.evaluation.scores import Score, recomputed_share, score_answer
from sgl_blend.scheduler.probes import NUM_PROBES, PROBE_TOKENS

RATIOS = (0.1, 0.15, 0.2)
POLICIES = ("hkvd", "funnel")
OTHER_SEED = 1000
"""Is added to the seed of the prompts from which thresholds come."""
NUM_TOP = 50


def memories(model: Lower, prompts: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Return per prompt what is remembered of its moved tokens, float32 [tokens]."""
    texts = texts_of("words", model, PROBE_TOKENS)[:NUM_PROBES]
    return [Item(model, prompt).after(model, texts).max(0).values for prompt in prompts]


def threshold(found: Sequence[torch.Tensor], ratio: float) -> float:
    """Return what as large a share of all tokens as the ratio lies above."""
    return torch.cat(list(found)).quantile(1 - ratio).item()


def budgets(found: Sequence[torch.Tensor], limit: float) -> list[float]:
    """Return per prompt the share of its tokens that lies above the threshold."""
    return [float((memory > limit).float().mean()) for memory in found]


def compare(fixed: Sequence[Score], remembered: Sequence[Score]) -> dict[str, Any]:
    """Set both budgets side by side, item by item."""
    gains = [b.right - a.right for a, b in zip(fixed, remembered, strict=True)]
    found: dict[str, Any] = {"gain": statistics.mean(gains), "gain_ci95": mean_interval(gains, 0)}
    for name, scores in (("fixed", fixed), ("remembered", remembered)):
        found[name] = {
            "accuracy": statistics.mean(score.right for score in scores),
            "kl": statistics.mean(score.kl for score in scores),
            "recomputed_share": recomputed_share([score.report for score in scores]),
        }
    return found


def measure(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Ask every prompt with both budgets."""
    model = Lower(folder)
    prompts = make_held_out(seed, count)
    own, others = memories(model, prompts), memories(model, make_held_out(seed + OTHER_SEED, count))
    items = [msgspec.convert(prompt, ItemLine).to_item() for prompt in prompts]
    encode = load_encoder(str(folder))
    asked = [make_prompt(item, find_templates(str(folder)), encode) for item in items]
    vocab_size = model.whole.config.vocab_size
    rows = []
    with BlendEngine(str(folder), check_layer=CHECK_LAYER, build_prefix="first") as engine:
        full = engine.ask_full(asked, max_new_tokens=2, num_top=NUM_TOP)
        top = [answer.first.token_ids for answer in full]

        def ask(policy: str, ratios: Sequence[float]) -> list[Score]:
            answers = engine.ask(asked, policy, ratios, max_new_tokens=2, reference_ids=top)
            scored = zip(items, answers, full, strict=True)
            return [score_answer(item, one, base, vocab_size) for item, one, base in scored]

        for policy in POLICIES:
            for ratio in RATIOS:
                given = budgets(own, threshold(others, ratio))
                found = compare(ask(policy, [ratio] * len(asked)), ask(policy, given))
                spread = statistics.quantiles(given, n=20)
                rows.append({"policy": policy, "ratio": ratio, "p5": spread[0], "p95": spread[-1]})
                rows[-1].update(found)
                print(json.dumps(rows[-1]), flush=True)
    right = [score_answer(i, a, a, vocab_size).right for i, a in zip(items, full, strict=True)]
    return {"full": statistics.mean(right), "prompts": count, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=6, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write the result there, by the model's name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {**origin_of_script(), **measure(args.model, args.seed, args.prompts)}
    print("full", found["full"])
    if args.json is not None:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps({**known, args.model.name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

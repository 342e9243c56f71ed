"""What should the deviation of KV that came in few bits be measured by?

The blended forward once more in plain torch, on a committed test model and held-out prompts. The stored
KV of the chunks is rounded to a level's bins. Then the tokens to recompute are chosen in three ways:

    as it came    by their deviation from the rounded KV
    clean         by their deviation from the KV before it was rounded
    beyond        likewise, but of each channel's difference only what rounding does not explain
                  counts: half a bin is taken off, as the engine does
    none          nothing is recomputed

    .venv/bin/python -m benchmarks.coded_score --prompts 200 --json benchmarks/results/coded-score.json

Printed for each level, and for two that are coarser than any that is served: the mean KL(full || this)
of the first token, the share of right first tokens, and 95 % intervals of what the first way and the
third save against the second, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.lower_layers import CHECK, KV, RATIO, Network
from examples.tinyrag.evaluate import FINAL_SEED, MODELS
from examples.tinyrag.world import make_held_out
from sgl_blend.commands.common.bootstrap import mean_interval
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.commands.evaluation.items import ItemLine
from sgl_blend.commands.evaluation.prompts import find_templates, load_encoder, make_prompt
from sgl_blend.storage.codec.levels import (
    LEVELS,
    PROFILE_VERSION,
    CodecProfile,
    Level,
    Transform,
)
from sgl_blend.storage.codec.quantiser import decode_unit, encode_unit, make_unit_code
from sgl_blend.storage.codec.statistics import measure_scales

ROOT = Path(__file__).parents[1]
DEVELOPMENT_SEED = 7
ROWS = (
    *(level for name, level in LEVELS.items() if name != "q8"),
    Level("bins of 3", 4, 3.0),
    Level("bins of 4", 4, 4.0),
)
WAYS = ("as it came", "clean", "beyond", "none")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and what is known of it.

    Attributes:
        ids: Its tokens.
        reusable: bool [tokens], tokens of chunks.
        stored: KV with that of the stored chunks in its place, keys not rotated.
        expected: Logprobs after a full prefill.
        answer: The right first token.
    """

    ids: list[int]
    reusable: torch.Tensor
    stored: KV
    expected: torch.Tensor
    answer: int


@torch.inference_mode()
def make_cases(network: Network, folder: Path, seed: int, count: int) -> list[Case]:
    """Build the chunks of prompts, and put the prompts together."""
    encode = load_encoder(str(folder))
    templates = find_templates(
        str(folder), system_template=None, chunk_template=None, question_template=None
    )
    cases = []
    for made in make_held_out(seed, count):
        item = msgspec.convert(made, ItemLine).to_item()
        prompt = make_prompt(item, templates, encode)
        ids, spans = list(prompt.token_ids), prompt.spans
        full, expected = network.prefill(ids)
        stored = [(k.clone(), v.clone()) for k, v in full]
        reusable = torch.zeros(len(ids), dtype=torch.bool)
        for start, stop in zip(spans[::2], spans[1::2], strict=True):
            built, _ = network.prefill(ids[: spans[0]] + ids[start:stop])
            reusable[start:stop] = True
            for own, kv in zip(stored, built, strict=True):
                for target, source in zip(own, kv, strict=True):
                    target[start:stop] = source[spans[0] :]
        answer = encode(item.answers[0], False)[0]
        cases.append(Case(ids, reusable, stored, expected, answer))
    return cases


def scales_of(cases: Sequence[Case]) -> CodecProfile:
    """Measure the scales of chunk KV."""
    num_layers = len(cases[0].stored)
    units = [
        [case.stored[layer][kind][case.reusable] for case in cases]
        for layer in range(num_layers)
        for kind in (0, 1)
    ]
    _, heads, dim = units[0][0].shape
    rows = [measure_scales(unit) for unit in units]
    return CodecProfile(
        PROFILE_VERSION, "", num_layers, heads, dim, "development", len(cases), 0.0, 0, rows, {}
    )


def coded(case: Case, profile: CodecProfile, level: Level) -> KV:
    """Return the stored KV as a level leaves it."""
    rows = case.reusable.nonzero()[:, 0]
    found = []
    for layer, pair in enumerate(case.stored):
        made = []
        for kind, whole in enumerate(pair):
            code = make_unit_code(profile, level, 2 * layer + kind, Transform.DIRECT, slice(None))
            out = whole.clone()
            packed, _ = encode_unit(whole[rows].contiguous(), code)
            out[rows] = decode_unit(packed, code, len(rows))
            made.append(out)
        found.append((made[0], made[1]))
    return found


def half_bins(profile: CodecProfile, level: Level) -> torch.Tensor:
    """Return how far rounding can move V in the check layer, float32 [heads, dim]."""
    code = make_unit_code(profile, level, 2 * CHECK + 1, Transform.DIRECT, slice(None))
    return code.step / 2


@torch.inference_mode()
def blend(
    network: Network,
    case: Case,
    stored: KV,
    score_by: KV,
    ratio: float,
    explained: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the first token's logprobs after a blended forward.

    Args:
        network: The model.
        case: What is asked.
        stored: KV that tokens keep which are not recomputed.
        score_by: KV that the deviation of the check layer is measured against.
        ratio: Share of the chunk tokens that is recomputed.
        explained: Of each channel's difference so much does not count, float32 [heads, dim].
    """
    rows = torch.arange(len(case.ids))
    budget = math.ceil(ratio * int(case.reusable.sum()))
    kv = [(k.clone(), v.clone()) for k, v in stored]
    hidden = network.embed(case.ids)
    for layer in range(len(network.layers)):
        q, k, v = network.project(hidden, layer)
        if layer == CHECK:
            apart = (v - score_by[layer][1]).abs()
            if explained is not None:
                apart = (apart - explained).clamp(min=0.0)
            scores = apart.square().sum((1, 2))
            scores[~case.reusable] = torch.inf
            kept = scores.topk(budget + int((~case.reusable).sum())).indices.sort().values
            rows, hidden, q, k, v = rows[kept], hidden[kept], q[kept], k[kept], v[kept]
        kv[layer][0][rows], kv[layer][1][rows] = k, v
        hidden = network.finish(hidden, q, rows, kv[layer], layer)
    return network.first_token(hidden)


def measure(name: str, prompts: int) -> dict[str, Any]:
    """Measure one committed model."""
    folder = MODELS[name]
    network = Network(folder)
    profile = scales_of(make_cases(network, folder, DEVELOPMENT_SEED, 60))
    cases = make_cases(network, folder, FINAL_SEED, prompts)
    found: dict[str, Any] = {"lossless": _figures(network, cases, None, profile)}
    for level in ROWS:
        found[level.name] = _figures(network, cases, level, profile)
        print(name, level.name, json.dumps(found[level.name]), flush=True)
    return found


def _figures(
    network: Network, cases: Sequence[Case], level: Level | None, profile: CodecProfile
) -> dict[str, Any]:
    kl: dict[str, list[float]] = {way: [] for way in WAYS}
    right: dict[str, list[float]] = {way: [] for way in WAYS}
    for case in cases:
        stored = case.stored if level is None else coded(case, profile, level)
        for way in WAYS:
            by = case.stored if way == "clean" else stored
            beyond = None if level is None or way != "beyond" else half_bins(profile, level)
            got = blend(network, case, stored, by, 0.0 if way == "none" else RATIO, beyond)
            kl[way].append(float((case.expected.exp() * (case.expected - got)).sum()))
            right[way].append(float(int(got.argmax()) == case.answer))
    return {
        "kl": {way: statistics.mean(values) for way, values in kl.items()},
        "right": {way: statistics.mean(values) for way, values in right.items()},
        "kl_saved_ci95": list(_interval(kl["clean"], kl["as it came"])),
        "kl_saved_beyond_ci95": list(_interval(kl["clean"], kl["beyond"])),
        "right_gained_ci95": list(_interval(right["as it came"], right["clean"])),
    }


def _interval(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    return mean_interval([a - b for a, b in zip(one, other, strict=True)], seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "coded-score.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, args.prompts) for name in args.models}
    record = {**origin_of_script(), "prompts": args.prompts, "models": found}
    args.json.parent.mkdir(exist_ok=True, parents=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""CacheBlend written down once more in plain float64, selection and all, for one small model.

Slow and simple on purpose: no batches, no pool, no pages. A request is [system][a][b][c][question];
each chunk's KV comes from prefilling [system][chunk] alone. `a` stands where it was built, so its KV
is exact; `b` and `c` are moved and blended. Nothing here comes from sgl-blend.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import torch
from prompts import random_tokens
from safetensors.torch import load_file
from tiny_models import NUM_LAYERS

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 60 + 9 * i) for i in range(3)]
QUESTION = random_tokens(99, 20)
HEADS, KV_HEADS, DIM, THETA, EPS = 4, 2, 16, 10000.0, 1e-6
MAX_ASKED = 128
"""A query-aware policy asks the last so many rows of a long question (docs/reference/policies.md)."""

EXACT = "exact-"
"""Before a policy's name: the rows it drops keep their true KV."""
SKIP_LAYERS = ("edge", "first-k", "block")
"""Policies that drop rows before the first layer."""
EARLY_SHARES = {"funnel": Fraction(3, 10), "remembered": Fraction(0)}
"""Policies that drop rows before the first layer by memory, and the share that is left at least."""
RANDOM_SEED = 2405
FIRST_ROWS = 8
"""Hybrid takes at most so many first rows of a chunk, and at most half its budget for them."""


@dataclass
class Layer:
    """What one layer of the reference computed for its rows."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass
class Seen:
    """What the score of a policy is written down with, in float64.

    Attributes:
        old: Stored KV of the kept rows, with keys at their new positions.
        new: The same rows as just computed.
        k: [tokens, KV heads, dim], keys of the whole request.
        kept: Positions of the kept rows.
        truth: A full prefill of the request: the layers above the check layer.
        stored: Stored KV of all moved rows in these layers.
        num_asked: Rows of the question that a policy may ask.
    """

    old: Layer
    new: Layer
    k: torch.Tensor
    kept: torch.Tensor
    truth: list[Layer]
    stored: list[Layer]
    num_asked: int


Score = Callable[[Seen], torch.Tensor]
"""Returns how much each kept row matters."""


def find_scores() -> dict[str, Score]:
    """Collect the scores that the tests of policies write down: see docs/contributing.md."""
    found: dict[str, Score] = {}
    for path in sorted(Path(__file__).parent.glob("test_policy_*.py")):
        found |= import_module(path.stem).SCORES
    return found


def measure(policy: str, seen: Seen) -> list[float]:
    """Return how much each kept row matters; nothing for a policy that measures nothing."""
    score = find_scores().get(policy.removeprefix(EXACT))
    return [] if score is None else score(seen).tolist()


class Reference:
    """A Llama in float64."""

    def __init__(self, folder: Path) -> None:
        self.weights = {
            name.removeprefix("model."): tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> Layer:
        x = self.norm(hidden, f"layers.{layer}.input_layernorm")
        name = f"layers.{layer}.self_attn"
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(len(x), -1, DIM) for part in "qkv")
        return Layer(rotate(q, positions), rotate(k, positions), v)

    def finish(
        self,
        layer: int,
        hidden: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to keys at positions up to each row's own, and apply the MLP."""
        group = HEADS // KV_HEADS
        logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(DIM)
        later = torch.arange(k.shape[0]) > positions[:, None]
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)
        hidden = hidden + self.linear(mixed, f"layers.{layer}.self_attn.o_proj")
        x = self.norm(hidden, f"layers.{layer}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(x, f"layers.{layer}.mlp.gate_proj"))
        up = self.linear(x, f"layers.{layer}.mlp.up_proj")
        return hidden + self.linear(gate * up, f"layers.{layer}.mlp.down_proj")

    def prefill(self, tokens: list[int]) -> list[Layer]:
        """Return q, k and v of every layer."""
        hidden = self.weights["embed_tokens.weight"][tokens]
        positions = torch.arange(len(tokens))
        layers = []
        for number in range(NUM_LAYERS):
            layers.append(self.project(number, hidden, positions))
            one = layers[-1]
            hidden = self.finish(number, hidden, one.q, one.k, one.v, positions)
        return layers

    def blend(
        self,
        policy: str,
        ratio: float,
        check: int,
        question: Sequence[int] = QUESTION,
        texts: Sequence[Sequence[int]] = (),
        known: Sequence[bool] = (True, True),
    ) -> torch.Tensor:
        """Return the log-probabilities of the first answer token.

        Args:
            policy: Its name.
            ratio: Share of the moved rows that is computed.
            check: The check layer.
            question: Tokens after the last chunk.
            texts: Those of probes.
            known: Whether each moved chunk was probed.
        """
        tokens = [*SYSTEM, *(token for chunk in CHUNKS for token in chunk), *question]
        num_asked = min(len(question), MAX_ASKED)
        moved, stored = self.stored(len(SYSTEM) + len(CHUNKS[0]))
        schedule = counts(policy, ratio, len(moved), NUM_LAYERS - check - 1)
        truth = self.prefill(tokens)
        reused = stored
        if policy.startswith(EXACT):  # scored by what is stored, answered with what is true
            reused = [Layer(one.q, one.k[moved], one.v[moved]) for one in truth]
        hidden, rows = self.weights["embed_tokens.weight"][tokens], torch.arange(len(tokens))
        kept, decided = moved, moved[:0]
        lengths = [len(CHUNKS[1]), len(CHUNKS[2])]
        if policy.removeprefix(EXACT) in SKIP_LAYERS:
            kept = moved[select(policy, [], lengths, schedule[0])]
        if policy.removeprefix(EXACT) in EARLY_SHARES:
            probed = torch.repeat_interleave(torch.tensor(known), torch.tensor(lengths))
            memory = self.remembered(texts, check)
            kept, decided = self.early(policy, ratio, moved, probed, memory)
            lengths = [len(kept)]
        if len(kept) < len(moved):
            rows = rows[~torch.isin(rows, moved) | torch.isin(rows, kept)]
            hidden = hidden[rows]
        for number in range(NUM_LAYERS):
            fresh = self.project(number, hidden, rows)
            k, v = torch.zeros(2, len(tokens), KV_HEADS, DIM, dtype=torch.float64)
            k[moved], v[moved] = reused[number].k, reused[number].v
            k[rows], v[rows] = fresh.k, fresh.v
            hidden = self.finish(number, hidden, fresh.q, k, v, rows)
            if number < check or number == NUM_LAYERS - 1:
                continue
            count = schedule[number - check]
            if count < len(kept):
                within = torch.isin(moved, kept)
                old = Layer(fresh.q, stored[number].k[within], stored[number].v[within])
                new = Layer(fresh.q, k[kept], v[kept])
                seen = Seen(old, new, k, kept, truth[check + 1 :], stored[check + 1 :], num_asked)
                measured = measure(policy, seen)
                scores = [
                    math.inf if row in decided else score
                    for row, score in zip(kept.tolist(), measured, strict=False)
                ]
                chosen = kept[select(policy, scores, lengths, count)]
                stays = ~torch.isin(rows, kept) | torch.isin(rows, chosen)
                hidden, rows, kept, lengths = hidden[stays], rows[stays], chosen, [count]
        return self.linear(self.norm(hidden[-1], "norm"), "lm_head").log_softmax(-1)

    def stored(self, first: int) -> tuple[torch.Tensor, list[Layer]]:
        """Prefill chunks alone, move their keys, and return positions and KV by layer."""
        start = first
        positions, parts = [], []
        for chunk in CHUNKS[1:]:
            where = torch.arange(start, start + len(chunk))
            shift = torch.full((len(chunk),), start - len(SYSTEM))
            alone = self.prefill([*SYSTEM, *chunk])
            parts.append(
                [
                    Layer(one.q, rotate(one.k[len(SYSTEM) :], shift), one.v[len(SYSTEM) :])
                    for one in alone
                ]
            )
            positions.append(where)
            start += len(chunk)
        both = [
            Layer(b.q, torch.cat([b.k, c.k]), torch.cat([b.v, c.v]))
            for b, c in zip(*parts, strict=True)
        ]
        return torch.cat(positions), both

    def early(
        self,
        policy: str,
        ratio: float,
        moved: torch.Tensor,
        probed: torch.Tensor,
        memory: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which moved rows are computed at all, and which of them surely to the end."""
        least = counts(policy, ratio, int(probed.sum()), 1)[0]
        share = EARLY_SHARES[policy.removeprefix(EXACT)]
        count = max(least, math.ceil(share * int(probed.sum())))
        best = moved[probed][memory[probed].argsort(descending=True, stable=True)[:count]]
        kept = torch.cat([moved[~probed], best]).sort().values
        return kept, best if count == least else best[:0]

    def remembered(self, texts: Sequence[Sequence[int]], check: int) -> torch.Tensor:
        """Return how far V of each moved row was from what is stored, at most, after some texts."""
        parts = []
        for chunk in CHUNKS[1:]:
            alone = self.prefill([*SYSTEM, *chunk])[check].v[len(SYSTEM) :]
            after = [
                self.prefill([*SYSTEM, *text, *chunk])[check].v[-len(chunk) :] for text in texts
            ]
            largest = torch.stack([distances(one, alone) for one in after]).max(0).values
            parts.append(largest.sqrt().half().float())  # as exactly as the engine remembers it
        return torch.cat(parts)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, dim] as complex numbers."""
    frequencies = THETA ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    turn = torch.polar(
        torch.ones(len(positions), DIM // 2, dtype=torch.float64),
        torch.outer(positions.double(), frequencies),
    )
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def distances(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of each row, over all heads."""
    return (new - old).square().sum((1, 2))


def attention_paid(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return what the last rows of a request pay to each position, all heads together."""
    positions = torch.arange(len(k))
    asking = positions[-len(q) :]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV_HEADS, 1))
    logits = (logits / math.sqrt(DIM)).masked_fill(positions > asking[:, None], -torch.inf)
    return logits.softmax(-1).sum((0, 1))


def counts(policy: str, ratio: float, num_moved: int, num_layers: int) -> list[int]:
    """Return how many moved rows are computed in each layer above the check layer."""
    name = policy.removeprefix(EXACT)
    share = Fraction(ratio).limit_denominator(10**6)  # the ratio that was meant, not its rounding
    share = {"none": Fraction(0), "block": Fraction(0), "all": Fraction(1)}.get(name, share)
    if name != "gradual" or num_layers == 1:
        return [math.ceil(share * num_moved)] * num_layers
    begin = min(Fraction(1), share * 3 / 2)
    step = 2 * (share - begin) / (num_layers - 1)  # on a line whose mean is the ratio
    return [min(num_moved, round((begin + step * i) * num_moved)) for i in range(num_layers)]


def select(policy: str, scores: list[float], lengths: list[int], count: int) -> list[int]:
    """Return the rows that are computed, ascending; of equals the earlier ones.

    Args:
        policy: Its name.
        scores: How much each row matters; empty if nothing was measured.
        lengths: Rows of each chunk.
        count: Rows to return.
    """
    name = policy.removeprefix(EXACT)
    places = [(place, length) for length in lengths for place in range(length)]
    if name == "random":
        generator = torch.Generator().manual_seed(RANDOM_SEED)
        return sorted(torch.randperm(len(places), generator=generator)[:count].tolist())
    first_rows = min(FIRST_ROWS, count // (2 * len(lengths)))

    def rank(row: int) -> tuple[float, float, int]:
        place, length = places[row]
        if name == "first-k":
            return place, 0.0, row
        if name == "edge":
            return min(place, length - 1 - place), 0.0, row
        raised = name == "hybrid" and place < first_rows
        if not scores or raised:
            return -math.inf, 0.0, row
        return 0.0, -scores[row], row

    return sorted(sorted(range(len(places)), key=rank)[:count])

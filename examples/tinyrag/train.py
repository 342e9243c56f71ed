"""Train the test model: python -m examples.tinyrag.train --seed 1 --out build/tinyrag/seed1.

Next-token loss on all tokens, answers weighted up; attention guidance for a few heads at first, off
long before the end; never on isolated chunks. Resumable: the same command goes on where it stopped.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from examples.tinyrag.muon import Muon
from examples.tinyrag.network import (
    Guides,
    Shape,
    TinyLlama,
    load_hf,
    save_hf,
    seen_in_blocks,
    shape_settings,
)
from examples.tinyrag.tokenizer import save_tokenizer
from examples.tinyrag.words import ASK, CHUNK, vocabulary
from examples.tinyrag.world import (
    BLOCK_KINDS,
    FULL,
    KINDS,
    STAGES,
    Example,
    Size,
    make_example,
)

CHUNK_ID, ASK_ID = vocabulary().index(CHUNK), vocabulary().index(ASK)

Heads = dict[str, tuple[tuple[int, int], ...]]

DEEP_HEADS: Heads = {
    "owner": ((0, 0),),
    "ref": ((0, 2), (1, 2)),
    "alias": ((1, 0), (2, 0)),
    "read": ((3, 0), (3, 2), (4, 0)),
}
"""(layer, head) that guidance asks to fetch what a role needs.

Statements are resolved in layers 0 to 2 and read in layers 3 and 4, as real models understand a text
in lower layers and use it in higher ones; a model that reads at once would not need fresh KV above
the check layer.
"""

SHALLOW_HEADS: Heads = {**DEEP_HEADS, "read": ((2, 2), (3, 0), (3, 2))}
"""The same for 4 layers: the question reads in the last one."""

BLOCK_HEADS: Heads = {
    "owner": ((0, 0),),
    "read": ((2, 2), (3, 0), (3, 2)),
    "hop": ((4, 0), (4, 2), (5, 0)),
}
"""The same for chunks that see only themselves: the question follows an alias by itself."""

SHAPES = {
    "tiny": {},
    "shallow": {"num_layers": 4},
    "large": {
        "num_layers": 12,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 1408,
    },
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how hard; lengths are optimiser steps, shares are of the whole run."""

    steps: int = 6000
    tokens_per_step: int = 3072
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    settled_lr: float = 0.4
    """Rates fall to this share of their peak early on; with the peak, answers stay at 70 to 80 %."""
    settled_at: float = 0.15
    final_lr: float = 0.02
    decay_from: float = 0.55
    lm_weight: float = 0.3
    guide_weight: float = 1.0
    guide_full: float = 0.35
    guide_off: float = 0.6
    stage_accuracy: float = 0.93
    stage_steps: tuple[int, ...] = (600, 400, 400)
    """A stage of the curriculum ends when its answers are right, or after so many steps."""

    def rate(self, step: int) -> float:
        """Return the learning rates of a step as a share of their peak."""
        done = step / self.steps
        early = _between(_falling(done, 0.0, self.settled_at), self.settled_lr, 1.0)
        late = _between(_falling(done, self.decay_from, 1.0), self.final_lr / self.settled_lr, 1.0)
        return min(1.0, (step + 1) / 50) * early * late


# --- batches ---


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences, their answers and guides."""

    tokens: torch.Tensor
    mask: torch.Tensor
    """True where the next token counts."""
    answers: tuple[torch.Tensor, torch.Tensor]
    kinds: list[str]
    guides: dict[int, Guides]
    num_tokens: int


def make_batch(
    seed: int,
    step: int,
    stage: int,
    budget: int,
    device: torch.device,
    heads: Heads = DEEP_HEADS,
    kinds: Sequence[str] = KINDS,
) -> Batch:
    """Write the batch of a step; the same seed and step always give the same one."""
    draw = random.Random(f"train/{seed}/{step}")
    examples: list[Example] = []
    length = num_tokens = 0
    while True:
        # Longer stages keep a share of easier prompts, so that short ones are not unlearnt.
        size: Size = STAGES[stage] if draw.random() < 0.9 else STAGES[draw.randint(0, stage)]
        example = make_example(draw, size, draw.randint(4, 14), kinds)
        longest = max(length, len(example.tokens))
        if examples and longest * (len(examples) + 1) > budget:
            break
        examples.append(example)
        length = longest
        num_tokens += len(example.tokens)
    tokens = torch.zeros(len(examples), length, dtype=torch.long)
    mask = torch.zeros(len(examples), length, dtype=torch.bool)
    rows, columns, asked = [], [], []
    guides: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, example in enumerate(examples):
        tokens[number, : len(example.tokens)] = torch.tensor(example.tokens)
        mask[number, : len(example.tokens) - 1] = True
        for column, kind in example.answers:
            rows.append(number)
            columns.append(column)
            asked.append(kind)
        for role, query, key in example.guides:
            for layer, head in heads.get(role, ()):
                guides.setdefault(layer, []).append((head, number, query, key))
    return Batch(
        tokens.to(device),
        mask.to(device),
        (torch.tensor(rows, device=device), torch.tensor(columns, device=device)),
        asked,
        {
            layer: Guides(*torch.tensor(found, device=device).T.unbind())
            for layer, found in guides.items()
        },
        num_tokens,
    )


# --- training ---


class Trainer:
    """Model, optimisers and place in the curriculum; all of it goes into the checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        shape: Shape,
        seed: int,
        out: Path,
        device: torch.device,
        blocks: Path | None = None,
    ) -> None:
        self.recipe, self.seed, self.out, self.device = recipe, seed, out, device
        self.in_blocks = blocks is not None
        self.kinds = KINDS if blocks is None else BLOCK_KINDS
        torch.manual_seed(seed)
        self.model = TinyLlama(shape).to(device)
        if blocks is not None:
            load_hf(self.model, blocks)
        self.heads = DEEP_HEADS if shape.num_layers > 4 else SHALLOW_HEADS
        if blocks is not None:
            self.heads = BLOCK_HEADS
        named = list(self.model.named_parameters())
        matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in named if p.dim() != 2 or "embed" in n]
        self.muon = Muon(matrices, lr=recipe.muon_lr)
        self.adam = torch.optim.AdamW(
            others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.step = self.stage_began = self.num_tokens = 0
        self.stage = 0 if blocks is None else len(STAGES) - 1  # the curriculum is behind it
        self.seconds = 0.0
        self.right: dict[str, float] = {}
        self._load()

    @property
    def checkpoint(self) -> Path:
        """Where the state of training lies."""
        return self.out / "checkpoint.pt"

    def _load(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        for name in ("step", "stage", "stage_began", "num_tokens", "seconds", "right"):
            setattr(self, name, state[name])
        print(f"goes on at step {self.step}", flush=True)

    def save(self) -> None:
        """Write the checkpoint, and the model as users load it."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "shape": shape_settings(self.model.shape),
            **{
                name: getattr(self, name)
                for name in ("step", "stage", "stage_began", "num_tokens", "seconds", "right")
            },
        }
        self.out.mkdir(parents=True, exist_ok=True)
        unfinished = self.checkpoint.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)
        save_hf(self.model, self.out / "model")
        save_tokenizer(self.out / "model")

    def run(self, stop_after_s: float) -> None:
        """Train until the recipe's end or until the time is up."""
        began = saved = reported = time.monotonic()
        while self.step < self.recipe.steps and time.monotonic() - began < stop_after_s:
            tick = time.monotonic()
            loss, lm, guide = self._train_step()
            self.seconds += time.monotonic() - tick
            self._advance()
            now = time.monotonic()
            if now - reported > 15 or self.step == self.recipe.steps:
                self._report(loss, lm, guide)
                reported = now
            if now - saved > 120:
                self.save()
                saved = now
        self.save()

    def _train_step(self) -> tuple[float, float, list[float]]:
        recipe = self.recipe
        batch = make_batch(
            self.seed,
            self.step,
            self.stage,
            recipe.tokens_per_step,
            self.device,
            self.heads,
            self.kinds,
        )
        seen = seen_in_blocks(batch.tokens, CHUNK_ID, ASK_ID) if self.in_blocks else None
        done = self.step / recipe.steps
        guide_weight = recipe.guide_weight * _falling(done, recipe.guide_full, recipe.guide_off)
        rate = recipe.rate(self.step)
        for optimiser, peak in ((self.muon, recipe.muon_lr), (self.adam, recipe.adam_lr)):
            optimiser.param_groups[0]["lr"] = peak * rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            guides = batch.guides if guide_weight > 0 else None
            logits, guide = self.model(batch.tokens, guides, seen)
        logits = logits.float()
        rows, columns = batch.answers
        answer_logits, wanted = logits[rows, columns], batch.tokens[rows, columns + 1]
        answer = F.cross_entropy(answer_logits, wanted)
        lm = F.cross_entropy(logits[batch.mask], batch.tokens.roll(-1, 1)[batch.mask])
        loss = answer + recipe.lm_weight * lm + guide_weight * guide.sum()
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.step += 1
        self.num_tokens += batch.num_tokens
        for kind, right in zip(
            batch.kinds, (answer_logits.argmax(-1) == wanted).tolist(), strict=True
        ):
            self.right[kind] = self.right.get(kind, 0.0) * 0.995 + 0.005 * right
            self.right[kind + "/n"] = self.right.get(kind + "/n", 0.0) * 0.995 + 0.005
        return answer.item(), lm.item(), guide.tolist()

    def accuracy(self, kind: str) -> float:
        """Return the moving share of right answers of a kind."""
        return self.right.get(kind, 0.0) / max(1e-9, self.right.get(kind + "/n", 0.0))

    def _advance(self) -> None:
        if self.stage == len(STAGES) - 1:
            return
        spent = self.step - self.stage_began
        good = min(self.accuracy(kind) for kind in self.kinds) >= self.recipe.stage_accuracy
        if (good and spent >= 100) or spent >= self.recipe.stage_steps[self.stage]:
            self.stage += 1
            self.stage_began = self.step
            self.right = {}

    def _report(self, answer: float, lm: float, guide: list[float]) -> None:
        row = {
            "step": self.step,
            "stage": self.stage,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds),
            "answer_loss": round(answer, 4),
            "lm_loss": round(lm, 4),
            "guide_loss": [round(loss, 2) for loss in guide],
            **{kind: round(self.accuracy(kind), 3) for kind in self.kinds},
        }
        print(json.dumps(row), flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "curve.jsonl").open("a") as curve:
            curve.write(json.dumps(row) + "\n")


def _falling(done: float, full: float, off: float) -> float:
    """Return 1 up to full, 0 from off on, a straight line between."""
    return min(1.0, max(0.0, (off - done) / (off - full)))


def _between(share: float, low: float, high: float) -> float:
    return low + share * (high - low)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument(
        "--blocks", type=Path, metavar="MODEL", help="go on from this one, in blocks"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop, to go on later")
    for name in ("steps", "tokens_per_step"):
        parser.add_argument(
            "--" + name.replace("_", "-"), type=int, default=getattr(Recipe(), name)
        )
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    recipe = Recipe(steps=args.steps, tokens_per_step=args.tokens_per_step)
    shape = Shape(vocab_size=len(vocabulary()), **SHAPES[args.size])
    trainer = Trainer(recipe, shape, args.seed, args.out, torch.device(args.device), args.blocks)
    size = sum(p.numel() for p in trainer.model.parameters())
    print(f"{size:,} parameters, {FULL}, {recipe}", flush=True)
    trainer.run(args.minutes * 60)


if __name__ == "__main__":
    main()

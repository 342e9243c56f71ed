"""Which probes tell best which tokens deviate: after what texts, how many, the largest or the mean?

A probe prefills a chunk after another text and measures how far V in the check layer is from the V that
is stored (scheduler/probes.py). Here that is done in plain torch on the test model, for three kinds of
text, and compared with what deviates when the chunk stands in a held-out prompt:

    words     tokens drawn at random, the same for every chunk; what the server uses
    model     a text that the model itself has written, the same for every chunk
    chunks    chunks of other prompts

    .venv/bin/python -m benchmarks.probes --json benchmarks/results/probes.json

Printed: of the tokens that hkvd chooses at a ratio of 0.15, how many are among the 15 % of the largest
memory (what `remembered` computes) and among the 30 % (what `funnel` lets pass).
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from examples.tinyrag.words import BOS, vocabulary
from examples.tinyrag.world import make_held_out
from sgl_blend.commands.common.records import origin_of_script

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tinyrag" / "model"
CHECK_LAYER = 2
RATIO = 0.15
PASSING = (0.15, 0.3, 0.4, 0.5)
KINDS = ("words", "model", "chunks")
COUNTS = (1, 2, 4, 8)
LENGTHS = (64, 256, 1024)
IDS = {word: number for number, word in enumerate(vocabulary())}


class Lower:
    """The layers of a model up to the check layer.

    Args:
        folder: The model.
    """

    def __init__(self, folder: Path) -> None:
        self.whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._layers = self.whole.model.layers

    @torch.inference_mode()
    def values(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return V of the check layer, float32 [tokens, KV heads * head_dim]."""
        self.whole.model.layers = self._layers[: CHECK_LAYER + 1]
        found: list[torch.Tensor] = []
        projection = self._layers[CHECK_LAYER].self_attn.v_proj
        handle = projection.register_forward_hook(lambda module, args, out: found.append(out))
        try:
            self.whole.model(torch.tensor([list(tokens)]), use_cache=False)
        finally:
            handle.remove()
            self.whole.model.layers = self._layers
        return found[0][0]

    @torch.inference_mode()
    def write(self, seed: int, length: int) -> list[int]:
        """Return a text that the model writes by itself, at temperature 1."""
        torch.manual_seed(seed)
        tokens = [IDS[BOS]]
        while len(tokens) <= length:
            logits = self.whole(torch.tensor([tokens[-512:]]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.softmax(-1).multinomial(1)))
        return tokens[1:]


def texts_of(kind: str, model: Lower, length: int) -> list[list[int]]:
    """Return texts that stand before every chunk alike."""
    if kind == "model":
        return [model.write(seed, length) for seed in range(max(COUNTS))]
    draw = random.Random(2405)
    return [[draw.randrange(len(IDS)) for _ in range(length)] for _ in range(max(COUNTS))]


def other_chunks(seed: int, length: int) -> Iterator[list[int]]:
    """Yield texts of so many tokens, put together from chunks of prompts that are not asked."""
    while True:
        seed += 1
        text: list[int] = []
        for item in make_held_out(seed, 8):
            text += [IDS[word] for chunk in item["chunks"] for word in f"<doc> {chunk}".split()]  # type: ignore[attr-defined]
        yield from (text[i : i + length] for i in range(0, len(text) - length, length))


def distances(new: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return how far each token's V is from the stored one, as it is remembered."""
    return (new - stored).square().sum(1).sqrt().half().float()


class Item:
    """One held-out prompt: what hkvd chooses of the chunks that were moved."""

    def __init__(self, model: Lower, item: dict[str, Any]) -> None:
        self.system = [IDS[BOS], *(IDS[word] for word in item["system"].split())]
        self.chunks = [[IDS[word] for word in f"<doc> {c}".split()] for c in item["chunks"]]
        tokens = [*self.system, *(token for chunk in self.chunks for token in chunk)]
        whole = model.values(tokens)[len(self.system) + len(self.chunks[0]) :]
        self.stored = [
            model.values([*self.system, *chunk])[len(self.system) :] for chunk in self.chunks[1:]
        ]
        self.true = distances(whole, torch.cat(self.stored))
        self.chosen = set(self.true.topk(max(1, round(RATIO * len(self.true)))).indices.tolist())

    def after(self, model: Lower, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the distances of all moved tokens after each text, [texts, tokens]."""
        rows = []
        for text in texts:
            row = [
                distances(model.values([*self.system, *text, *chunk])[-len(chunk) :], stored)
                for chunk, stored in zip(self.chunks[1:], self.stored, strict=True)
            ]
            rows.append(torch.cat(row))
        return torch.stack(rows)

    def covered(self, memory: torch.Tensor, share: float) -> float:
        """Return how many of the chosen tokens are among the share of the largest memory."""
        top = memory.topk(max(1, round(share * len(memory)))).indices.tolist()
        return len(self.chosen & set(top)) / len(self.chosen)


def measure(model: Lower, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per kind, length, count and way of joining the mean share that is covered."""
    prompts = [Item(model, item) for item in items]
    rows = []
    for kind in KINDS:
        for length in LENGTHS if kind == "words" else (256,):
            fixed = [] if kind == "chunks" else texts_of(kind, model, length)
            others = other_chunks(77, length)
            found = [
                one.after(model, fixed or [next(others) for _ in range(max(COUNTS))])
                for one in prompts
            ]
            for count in COUNTS:
                joined = {"max": [f[:count].max(0).values for f in found]}
                if count > 1:
                    joined["mean"] = [f[:count].mean(0) for f in found]
                for way, memories in joined.items():
                    pairs = list(zip(prompts, memories, strict=True))
                    rows.append(
                        {
                            "text": kind,
                            "tokens": length,
                            "probes": count,
                            "joined": way,
                            **{
                                f"covered_{share}": statistics.mean(
                                    one.covered(memory, share) for one, memory in pairs
                                )
                                for share in PASSING
                            },
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=6, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(Lower(args.model), make_held_out(args.seed, args.prompts))
    if args.json is not None:
        record = {**origin_of_script(), "model": args.model.name, "prompts": args.prompts}
        args.json.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What does a policy lose that drops rows before the first layer: by its choice, or by dropping at all?

The blended forward once more in plain torch, on a model of the demo's shape with plain random weights.
Each prompt holds six documents of the demo in a new order. Compared with a full prefill are:

    hkvd              all rows pass the layers up to the check layer
    stale             the same choice, but what is dropped keeps its stored KV in these layers too
    funnel            the rows of the largest memory pass, after probes as the server makes them
    true              the rows pass that deviate most in this very prompt

    .venv/bin/python -m benchmarks.lower_layers --prompts 4

Printed: KL(full || blended) of the first token, per prompt and in the mean. Wants 2 GB, and a minute a
prompt on one core.
"""

import argparse
import json
import math
import random
import statistics
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo.material import MODULES, SYSTEM, Recipe, cut, prepare, render, tokens_of
from sgl_blend.policies import POLICIES
from sgl_blend.scheduler.probes import made_up_texts
from sgl_blend.settings.config import BlendConfig

FOLDER = Path(__file__).parents[1] / "build" / "lower-layers"
CHECK = BlendConfig().blend_check_layer
RATIO = BlendConfig().blend_recompute_ratio
QUESTION = "Which of these modules can compare two sequences, and how?"
CHUNKS = 6

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer K before its rotation and V, [tokens, KV heads, head_dim]."""


class Network:
    """A Llama, layer by layer and row by row."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.layers = self.model.model.layers
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim: int = config.head_dim or config.hidden_size // self.heads
        self._rotary = self.model.model.rotary_emb

    def embed(self, ids: list[int]) -> torch.Tensor:
        """Return [tokens, hidden]."""
        hidden: torch.Tensor = self.model.model.embed_tokens(torch.tensor(ids))
        return hidden

    def project(self, hidden: torch.Tensor, layer: int) -> list[torch.Tensor]:
        """Return q, k and v of a layer, keys and queries not rotated."""
        module, count = self.layers[layer], hidden.shape[0]
        normed, attention = module.input_layernorm(hidden), module.self_attn
        return [
            projection(normed).view(count, heads, self.dim)
            for projection, heads in (
                (attention.q_proj, self.heads),
                (attention.k_proj, self.kv_heads),
                (attention.v_proj, self.kv_heads),
            )
        ]

    def finish(
        self,
        hidden: torch.Tensor,
        q: torch.Tensor,
        rows: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        layer: int,
    ) -> torch.Tensor:
        """Attend from some rows to all KV before them, and go through the rest of the layer."""
        k, v = kv
        positions, groups = torch.arange(k.shape[0]), self.heads // self.kv_heads
        q, k = self._rotate(q, rows), self._rotate(k, positions).repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.repeat_interleave(groups, 1).transpose(0, 1),
            attn_mask=positions[None] <= rows[:, None],
        )
        module = self.layers[layer]
        hidden = hidden + module.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        after: torch.Tensor = hidden + module.mlp(module.post_attention_layernorm(hidden))
        return after

    def first_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logprobs after the last row, float64."""
        logits: torch.Tensor = self.model.lm_head(self.model.model.norm(hidden[-1]))
        return logits.double().log_softmax(-1)

    def prefill(self, ids: list[int], num_layers: int | None = None) -> tuple[KV, torch.Tensor]:
        """Return the KV of all layers, or of the first ones, and the logprobs of the first token."""
        hidden, rows, kv = self.embed(ids), torch.arange(len(ids)), KV()
        for layer in range(num_layers or len(self.layers)):
            q, k, v = self.project(hidden, layer)
            kv.append((k, v))
            hidden = self.finish(hidden, q, rows, (k, v), layer)
        return kv, self.first_token(hidden)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (part[0, :, None] for part in self._rotary(x, positions[None]))
        first, second = x.chunk(2, -1)
        rotated: torch.Tensor = x * cos + torch.cat([-second, first], -1) * sin
        return rotated


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and what is known of it.

    Attributes:
        ids: Its tokens.
        exact_stop: Where its exact prefix ends.
        reusable: bool [tokens], tokens of chunks that were moved.
        memory: float32 [tokens], what probes found out about them.
        full: KV of a full prefill.
        stored: The same with that of the stored chunks in their place.
        expected: Logprobs after a full prefill.
    """

    ids: list[int]
    exact_stop: int
    reusable: torch.Tensor
    memory: torch.Tensor
    full: KV
    stored: KV
    expected: torch.Tensor

    def top(self, scores: torch.Tensor, share: float) -> torch.Tensor:
        """Return the share of the reusable tokens with the largest scores, bool [tokens]."""
        count = math.ceil(share * int(self.reusable.sum()))
        chosen = torch.zeros(len(self.ids), dtype=torch.bool)
        chosen[scores.masked_fill(~self.reusable, -1.0).topk(count).indices] = True
        return chosen

    @property
    def deviation(self) -> torch.Tensor:
        """How far V of the check layer is from the stored one, float32 [tokens]."""
        return (self.full[CHECK][1] - self.stored[CHECK][1]).square().sum((1, 2))


@torch.inference_mode()
def blend(network: Network, prompt: Prompt, early: torch.Tensor, *, stale: bool = False) -> float:
    """Return the KL of a blended forward whose reusable rows enter the first layer where early says so.

    Args:
        network: The model.
        prompt: What is asked.
        early: bool [tokens].
        stale: Whether rows that the check layer drops get their stored KV back in all layers.
    """
    passes = ~prompt.reusable | early
    passes[: prompt.exact_stop] = False
    rows = passes.nonzero()[:, 0]
    budget = math.ceil(RATIO * int(prompt.reusable.sum()))
    kv = [(k.clone(), v.clone()) for k, v in prompt.stored]
    hidden = network.embed(prompt.ids)[rows]
    for layer in range(len(network.layers)):
        q, k, v = network.project(hidden, layer)
        kv[layer][0][rows], kv[layer][1][rows] = k, v
        if layer == CHECK:
            scores = (v - prompt.stored[layer][1][rows]).square().sum((1, 2))
            scores[~prompt.reusable[rows]] = torch.inf
            kept = scores.topk(budget + int((~prompt.reusable[rows]).sum())).indices.sort().values
            if stale:
                gone = torch.ones(len(rows), dtype=torch.bool)
                gone[kept] = False
                for below in range(layer + 1):
                    for own, old in zip(kv[below], prompt.stored[below], strict=True):
                        own[rows[gone]] = old[rows[gone]]
            rows, hidden, q = rows[kept], hidden[kept], q[kept]
        hidden = network.finish(hidden, q, rows, kv[layer], layer)
    got = network.first_token(hidden)
    return float((prompt.expected.exp() * (prompt.expected - got)).sum())


@torch.inference_mode()
def make_prompts(network: Network, folder: Path, count: int) -> list[Prompt]:
    """Build and probe the demo's chunks, and put prompts together."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    system, question = tokenizer.encode(SYSTEM), tokenizer.encode(QUESTION)
    chunks = [tokens_of(tokenizer, next(cut(render(name), tokenizer))) for name in MODULES]
    built = [network.prefill(system + chunk)[0] for chunk in chunks]
    texts = [array("q", text).tolist() for text in made_up_texts(len(tokenizer))]
    memories = []
    for chunk, kv in zip(chunks, built, strict=True):
        stored = kv[CHECK][1][len(system) :]
        probes = [network.prefill([*system, *text, *chunk], CHECK + 1)[0] for text in texts]
        found = [(probe[CHECK][1][-len(chunk) :] - stored).square().sum((1, 2)) for probe in probes]
        memories.append(torch.stack(found).amax(0))
    draw = random.Random(1)
    return [
        _make_prompt(network, system, chunks, built, memories, order, question)
        for order in (draw.sample(range(len(chunks)), CHUNKS) for _ in range(count))
    ]


def _make_prompt(
    network: Network,
    system: list[int],
    chunks: list[list[int]],
    built: list[KV],
    memories: list[torch.Tensor],
    order: list[int],
    question: list[int],
) -> Prompt:
    ids = [*system, *(token for number in order for token in chunks[number]), *question]
    full, expected = network.prefill(ids)
    stored = [(k.clone(), v.clone()) for k, v in full]
    reusable, memory = torch.zeros(len(ids), dtype=torch.bool), torch.zeros(len(ids))
    exact_stop = start = len(system) + len(chunks[order[0]])
    for number in order[1:]:
        stop = start + len(chunks[number])
        reusable[start:stop], memory[start:stop] = True, memories[number]
        for own, kv in zip(stored, built[number], strict=True):
            for target, source in zip(own, kv, strict=True):
                target[start:stop] = source[len(system) :]
        start = stop
    return Prompt(ids, exact_stop, reusable, memory, full, stored, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    share = POLICIES["funnel"].early_share
    assert share is not None, "the funnel trusts a memory"
    material = prepare(FOLDER, Recipe(readers_share=0.0), print)
    network = Network(material.model)
    found: dict[str, list[float]] = {"hkvd": [], "stale": [], "funnel": [], "true": []}
    for prompt in make_prompts(network, material.model, args.prompts):
        every = prompt.reusable
        found["hkvd"].append(blend(network, prompt, every))
        found["stale"].append(blend(network, prompt, every, stale=True))
        found["funnel"].append(blend(network, prompt, prompt.top(prompt.memory, share)))
        found["true"].append(blend(network, prompt, prompt.top(prompt.deviation, share)))
        print(
            json.dumps({name: round(values[-1], 4) for name, values in found.items()}), flush=True
        )
    print("mean", json.dumps({name: round(statistics.mean(v), 4) for name, v in found.items()}))


if __name__ == "__main__":
    main()

"""The engine against CacheBlend written down once more, in plain float64, for one small model.

Slow and simple on purpose: no batches, no pool, no pages. A request is [system][a][b][c][question];
each chunk's KV comes from prefilling [system][chunk] alone. `a` stands where it was built, so its KV
is exact; `b` and `c` are moved and blended. Whatever the engine does with slots, rows, windows and
stages, its logits must be these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, rag_prompt, random_tokens
from safetensors.torch import load_file
from tiny_models import NUM_LAYERS, make_model

from sgl_blend.kernels.query_attention import query_attention
from sgl_blend.policies import EXACT, POLICIES, keep_schedule

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 60 + 9 * i) for i in range(3)]
QUESTION = random_tokens(99, 20)
HEADS, KV_HEADS, DIM, THETA, EPS = 4, 2, 16, 10000.0, 1e-6
MAX_ASKED = 128
"""A query-aware policy asks the last so many rows of a long question (docs/reference/policies.md)."""
TOLERANCE = 2e-4
"""On log-probabilities; the engine computes in float32."""


@dataclass
class Layer:
    """What one layer of the reference computed for its rows."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


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
        self, policy: str, ratio: float, check: int, question: Sequence[int] = QUESTION
    ) -> torch.Tensor:
        """Return the log-probabilities of the first answer token."""
        tokens = [*SYSTEM, *(token for chunk in CHUNKS for token in chunk), *question]
        num_asked = min(len(question), MAX_ASKED)
        moved, stored = self.stored(len(SYSTEM) + len(CHUNKS[0]))
        schedule = keep_schedule(policy, ratio, len(moved), NUM_LAYERS - check - 1)
        truth = self.prefill(tokens)
        reused = stored
        if POLICIES[policy].true_kv:  # scored by what is stored, answered with what is true
            reused = [Layer(one.q, one.k[moved], one.v[moved]) for one in truth]
        hidden = self.weights["embed_tokens.weight"][tokens]
        rows = torch.arange(len(tokens))
        kept = moved
        lengths = [len(CHUNKS[1]), len(CHUNKS[2])]
        if POLICIES[policy].skips_full_layers:
            kept = moved[POLICIES[policy].select(None, lengths, schedule[0])]
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
                scores = self.scores(policy, old, new, k, kept, truth, stored, check, num_asked)
                single = None if scores is None else scores.float()
                chosen = kept[POLICIES[policy].select(single, lengths, count)]
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

    def scores(
        self,
        policy: str,
        old: Layer,
        new: Layer,
        k: torch.Tensor,
        kept: torch.Tensor,
        truth: list[Layer],
        stored: list[Layer],
        check: int,
        num_asked: int,
    ) -> torch.Tensor | None:
        name = policy.removeprefix(EXACT)
        if name in ("hkvd", "gradual", "hybrid"):
            return (new.v - old.v).square().sum((1, 2))
        if name == "hkvd-k":
            return (new.k - old.k).square().sum((1, 2))
        if name == "query-aware":
            first = k.shape[0] - num_asked
            return query_attention(new.q[-num_asked:], k, first, scale=1 / math.sqrt(DIM))[kept]
        if name == "oracle":
            total = torch.zeros(len(kept), dtype=torch.float64)
            for true, copy in zip(truth[check + 1 :], stored[check + 1 :], strict=True):
                deviation = (true.v[kept] - copy.v).square().sum((1, 2))
                total += deviation / deviation.mean()
            return total
        return None


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, dim] as complex numbers."""
    frequencies = THETA ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    turn = torch.polar(
        torch.ones(len(positions), DIM // 2, dtype=torch.float64),
        torch.outer(positions.double(), frequencies),
    )
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.mark.parametrize("check_layer", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_blends_as_written_down(
    start_engine: StartEngine, model_folder: Path, policy: str, check_layer: int
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=check_layer)
    reference = Reference(make_model("llama", model_folder))
    for ratio in (0.1, 0.4, 0.8):
        prompt = rag_prompt(
            SYSTEM,
            CHUNKS,
            QUESTION,
            params={"sgl_blend_policy": policy, "sgl_blend_ratio": ratio},
        )
        answer = engine.ask(prompt)[0]

        want = reference.blend(policy, ratio, check_layer)

        assert answer.report["chunk_hits"] == 3
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"ratio {ratio}"


# Several steps, and beside requests that blend what is not true: chunks 1 and 2 are moved in all.
@pytest.mark.parametrize("chunked", [-1, 64])
@pytest.mark.parametrize("policy", [name for name in POLICIES if POLICIES[name].true_kv])
def test_dropping_rows_of_true_kv_is_a_full_prefill(
    start_engine: StartEngine, model_folder: Path, policy: str, chunked: int
) -> None:
    engine = start_engine(
        blend_on_miss="build", blend_eval=True, blend_check_layer=1, chunked_prefill_size=chunked
    )
    want = Reference(make_model("llama", model_folder)).blend("all", 1.0, 1)
    params = [
        {"sgl_blend_policy": name, "sgl_blend_ratio": 0.3} for name in (policy, "hkvd", policy)
    ]
    prompts = [rag_prompt(SYSTEM, CHUNKS, QUESTION, params=one) for one in params]

    answers, _ = engine.call(_ask_at_once, prompts)

    for answer in (answers[0], answers[2]):
        assert answer.report["reused_tokens"] > 0
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE


def test_oracle_gives_every_layer_the_same_say(
    start_engine: StartEngine, model_folder: Path
) -> None:
    # Layers deviate on scales of their own. Only some budgets tell whether that was made up for.
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    reference = Reference(make_model("llama", model_folder))
    moved, stored = reference.stored(len(SYSTEM) + len(CHUNKS[0]))
    truth = reference.prefill([*SYSTEM, *(token for chunk in CHUNKS for token in chunk), *QUESTION])
    layers = [
        (true.v[moved] - copy.v).square().sum((1, 2))
        for true, copy in zip(truth[2:], stored[2:], strict=True)
    ]
    even, raw = sum(one / one.mean() for one in layers), sum(layers)
    assert isinstance(even, torch.Tensor)
    assert isinstance(raw, torch.Tensor)
    budgets = [
        budget
        for budget in range(1, len(moved))
        if set(even.topk(budget).indices.tolist()) != set(raw.topk(budget).indices.tolist())
    ]
    assert budgets, "this model's layers deviate alike"
    for budget in budgets[:4]:
        ratio = budget / len(moved)
        params = {"sgl_blend_policy": "oracle", "sgl_blend_ratio": ratio}

        answer = engine.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION, params=params))[0]

        want = reference.blend("oracle", ratio, 1)
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"budget {budget}"


def test_a_long_question_asks_with_its_last_rows(
    start_engine: StartEngine, model_folder: Path
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    reference = Reference(make_model("llama", model_folder))
    question = random_tokens(98, MAX_ASKED + 70)
    for ratio in (0.1, 0.4):
        params = {"sgl_blend_policy": "query-aware", "sgl_blend_ratio": ratio}

        answer = engine.ask(rag_prompt(SYSTEM, CHUNKS, question, params=params))[0]

        want = reference.blend("query-aware", ratio, 1, question)
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"ratio {ratio}"


def _ask_at_once(driver: Driver, prompts: list[Prompt]) -> tuple[list[Answer], int]:
    """Return the answers and how many batches it took."""
    driver.ask(rag_prompt(SYSTEM, CHUNKS, QUESTION))  # builds
    driver.settle()
    before = driver.num_batches
    return driver.ask(*prompts), driver.num_batches - before


def test_policies_that_drop_rows_in_different_layers_share_a_batch(
    start_engine: StartEngine, model_folder: Path
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    reference = Reference(make_model("llama", model_folder))
    policies = ["query-aware", "first-k", "gradual", "hkvd-k", "edge", "query-aware", "hybrid"]
    prompts = [
        rag_prompt(
            SYSTEM,
            CHUNKS,
            QUESTION,
            params={"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3 + 0.01 * number},
        )
        for number, policy in enumerate(policies)
    ]

    answers, num_batches = engine.call(_ask_at_once, prompts)

    assert num_batches == 1
    for number, (policy, answer) in enumerate(zip(policies, answers, strict=True)):
        want = reference.blend(policy, 0.3 + 0.01 * number, 1)
        got = torch.tensor(answer.logprobs[0], dtype=torch.float64)
        assert float((got - want).abs().max()) <= TOLERANCE, f"{number}: {policy}"

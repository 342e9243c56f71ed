"""Ways to make a full prefill's answer go through the sparse path, so that law L1 can fail there.

At ratio 1 no row is dropped: all layers are stock, and selection, compaction and ragged attention never
run. Two things can be compared with full prefill although they run:

    true KV        rows are dropped, but what is stored for them is what a full prefill gives them
    all rows kept  every layer that may select does, and every row that it may drop goes on

The functions here run in the worker process (harness.Engine.call).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from harness import Answer, Driver, Prompt, largest_difference

TOLERANCE = 1e-4
"""Law L1's bound on logits in float32 (docs/laws.md)."""

_REFERENCE = "reference"
"""Client salt of the full prefills; blended requests have others."""
Ask = Callable[[Driver, list[Prompt]], list[Answer]]

_NOISE = 3.0
"""How far wrong KV is from the true; larger than anything that rounding does to a score."""


@dataclass
class Comparison:
    """Answers of blended requests, and of full prefills of the same tokens."""

    blended: list[Answer]
    full: list[Answer]
    reductions: list[tuple[int, int]] = field(default_factory=list)
    """Rows of the batch before and after every selection of the blended forwards."""

    @property
    def num_dropped(self) -> int:
        return sum(before - after for before, after in self.reductions)


def assert_same(got: Answer, want: Answer, tolerance: float = TOLERANCE) -> None:
    assert got.output_ids == want.output_ids
    for row, (a, b) in enumerate(zip(got.logprobs, want.logprobs, strict=True)):
        difference = largest_difference(a, b)
        assert difference <= tolerance, f"output token {row} differs by {difference}"


def assert_drops_and_is_full_prefill(got: Comparison, tolerance: float = TOLERANCE) -> None:
    """Accept L1 for requests whose dropped rows have true KV."""
    assert got.num_dropped > 0
    for blended, full in zip(got.blended, got.full, strict=True):
        assert blended.report["fallback"] is None
        assert blended.report["reused_tokens"] > 0
        assert_same(blended, full, tolerance)


def assert_keeps_all_and_is_full_prefill(got: Comparison, tolerance: float = TOLERANCE) -> None:
    """Accept L1 for requests that went through the sparse path with all their rows."""
    assert got.reductions, "no layer selected"
    assert got.num_dropped == 0
    for blended, full in zip(got.blended, got.full, strict=True):
        assert blended.report["fallback"] is None
        assert_same(blended, full, tolerance)


def on_true_kv(
    driver: Driver,
    prompts: Sequence[Prompt],
    ask: Ask | None = None,
    wrong: Sequence[int] = (),
    nan_layer: int | None = None,
) -> Comparison:
    """Blend prompts whose chunks hold what a full prefill of the very prompt gives their tokens.

    Keys in 8 bit lose more than the law allows when they are moved away and back. So there they are
    stored as they are at their new place, and moved by nothing.

    Args:
        driver: The worker's; its cache is flushed before and after.
        prompts: Requests that share no chunk: a chunk has one KV. Those without chunks are asked too.
        ask: How they are asked; by default all at once.
        wrong: Positions of the first prompt whose stored KV is far from the true one.
        nan_layer: Layer in which nothing that is stored of a moved chunk is a number.
    """
    begin_anew(driver)
    states = [build_chunks(driver, prompt, probed=not wrong) for prompt in prompts]
    full = [prefill_in_full(driver, prompt) for prompt in prompts]
    for prompt, state in zip(prompts, states, strict=True):
        if state is not None:
            store_kv_of(driver, prompt, state, wrong if prompt is prompts[0] else (), nan_layer)
    in_place = _nothing_moved() if _is_fp8(driver) else nullcontext()
    with in_place, _watched_reductions() as reductions:
        blended = (ask or _ask_at_once)(driver, list(prompts))
    driver.settle()
    driver.flush()
    return Comparison(blended, full, reductions)


def on_all_rows(
    driver: Driver,
    prompts: Sequence[Prompt],
    ask: Ask | None = None,
) -> Comparison:
    """Blend prompts on chunks as they are built, but drop no row anywhere; arguments as above."""
    begin_anew(driver)
    for prompt in prompts:
        build_chunks(driver, prompt, probed=True)
    full = [prefill_in_full(driver, prompt) for prompt in prompts]
    with _all_rows_kept(), _watched_reductions() as reductions:
        blended = (ask or _ask_at_once)(driver, list(prompts))
    driver.settle()
    driver.flush()
    return Comparison(blended, full, reductions)


def begin_anew(driver: Driver) -> None:
    """Empty the cache, and let no slot hold what an earlier request has left there."""
    driver.settle()
    driver.flush()
    pool = driver.scheduler.tp_worker.model_runner.token_to_kv_pool
    for layer in range(driver.scheduler.model_config.num_hidden_layers):
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
            buffer.copy_(_NOISE * torch.randn(buffer.shape))


def _ask_at_once(driver: Driver, prompts: list[Prompt]) -> list[Answer]:
    return driver.ask(*prompts)


def build_chunks(driver: Driver, prompt: Prompt, *, probed: bool) -> Any:
    """Let a request's chunks be built and return its state; None for a request without chunks.

    It is asked at ratio 1, which stores no KV that another ratio could find. If not probed,
    what a policy remembers is measured later, against the KV that is stored then.
    """
    if not prompt.chunk_at:
        return None
    params = {**prompt.params, "sgl_blend_ratio": 1.0}
    if not probed:
        params["sgl_blend_policy"] = "hkvd"
    req = driver.submit(replace(prompt, params=params, max_new_tokens=1))
    state = req.sgl_blend
    driver.run_until(req.finished)
    driver.settle()
    return state


def prefill_in_full(driver: Driver, prompt: Prompt) -> Answer:
    plain = replace(prompt, segments=[prompt.tokens], chunk_at=[], params={}, salt=_REFERENCE)
    return driver.ask(plain)[0]


def store_kv_of(
    driver: Driver,
    prompt: Prompt,
    state: Any,
    wrong: Sequence[int] = (),
    nan_layer: int | None = None,
) -> None:
    """Overwrite the stored KV of a request's chunks with what a prompt's full prefill gave them.

    Args:
        driver: The worker's.
        prompt: Was prefilled in full, and holds the chunks where the request does.
        state: Of the request.
        wrong: As in on_true_kv, and nan_layer too.
        nan_layer: See there.
    """
    from sgl_blend.engine.kv_scales import layer_scales
    from sgl_blend.engine.models import text_model
    from sgl_blend.engine.tree import match_prefix

    tree = driver.scheduler.tree_cache
    runner = driver.scheduler.tp_worker.model_runner
    scales = layer_scales(runner)
    pool = runner.token_to_kv_pool
    rotary = text_model(runner).model.layers[0].self_attn.rotary_emb
    true_slots = match_prefix(
        tree, array("q", prompt.tokens), salt=_REFERENCE, extra_key=prompt.adapter
    ).slots
    for key, span in zip(state.keys, state.spans, strict=True):
        found = match_prefix(tree, key.path, salt=key.salt, extra_key=key.extra_key)
        stored = found.slots[key.prefix_length :]
        there = true_slots[span.start : span.start + len(stored)]
        assert len(stored) > 0, "a chunk is not stored"
        assert len(there) == len(stored), "the full prefill is not stored"
        offsets = torch.arange(len(stored), device=stored.device)
        moved = span.start if _is_fp8(driver) else key.prefix_length
        turn = _turn(rotary, span.start + offsets, moved + offsets)
        noise = torch.zeros(len(stored), 1, 1, device=stored.device)
        for position in wrong:
            if span.start <= position < span.start + len(stored):
                noise[position - span.start] = _NOISE
        for layer in range(driver.scheduler.model_config.num_hidden_layers):
            k_pool, v_pool = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
            k = _rotated(k_pool[there], turn, neox=rotary.is_neox_style).float()
            v = v_pool[there].float()
            lost = torch.nan if layer == nan_layer and span.start > key.prefix_length else 0.0
            _put(k_pool, stored, k + noise / scales[layer].k * torch.randn_like(k) + lost)
            _put(v_pool, stored, v + noise / scales[layer].v * torch.randn_like(v) + lost)


def _put(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    values = values.to(pool.dtype)
    if pool.dtype.itemsize == 1:  # torch has no such assignment in 8 bit
        pool, values = pool.view(torch.uint8), values.view(torch.uint8)
    pool[slots] = values


def _is_fp8(driver: Driver) -> bool:
    runner = driver.scheduler.tp_worker.model_runner
    return bool(runner.token_to_kv_pool.get_key_buffer(0).dtype.itemsize == 1)


@contextmanager
def _nothing_moved() -> Iterator[None]:
    from sgl_blend.fusion.rotation import Rotation

    def between(rotation: Rotation, old: torch.Tensor, _: torch.Tensor) -> Any:
        return rotation.none(old.numel())

    with patch.object(Rotation, "between", between):
        yield


def _turn(rotary: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return unit complex numbers [n, rotary_dim / 2] that take keys from old to new positions.

    From the model's own table, but written down apart from kernels/delta_rope.py: what is wrong there
    must not cancel out here.
    """
    cos, sin = rotary.cos_sin_cache.double().chunk(2, dim=-1)
    table = torch.complex(cos, sin)
    turn = table[new] / table[old]
    return turn / turn.abs()


def _rotated(k: torch.Tensor, turn: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Rotate keys [n, heads, dim] in float64; the result has their dtype."""
    half = turn.shape[-1]
    rotary, rest = k[..., : 2 * half].double(), k[..., 2 * half :]
    x, y = (
        (rotary[..., :half], rotary[..., half:]) if neox else (rotary[..., ::2], rotary[..., 1::2])
    )
    z = torch.complex(x, y) * turn[:, None]
    parts = [z.real, z.imag] if neox else [torch.stack([z.real, z.imag], -1).flatten(-2)]
    return torch.cat([*(part.to(k.dtype) for part in parts), rest], dim=-1)


@contextmanager
def _watched_reductions() -> Iterator[list[tuple[int, int]]]:
    """Note how many rows every selection finds and leaves."""
    from sgl_blend.fusion.attention import BlendAttention

    seen: list[tuple[int, int]] = []
    original = BlendAttention._reduce

    def reduce(backend: Any, *args: Any) -> None:
        before = int(backend._batch.positions.shape[0])
        original(backend, *args)
        seen.append((before, int(backend._batch.positions.shape[0])))

    with patch.object(BlendAttention, "_reduce", reduce):
        yield seen


class _Eager(int):
    """A count of rows that claims to be less than any other, so that rows are selected for it."""

    def __lt__(self, other: object) -> bool:
        return True


@contextmanager
def _all_rows_kept() -> Iterator[None]:
    """Let every request with chunks select in all layers that may, and keep all its rows."""
    from sgl_blend.fusion.fusor import Fusor
    from sgl_blend.fusion.plan import LayerSplit, StepPlan
    from sgl_blend.policies import POLICIES

    original = Fusor._plan

    def plan(fusor: Fusor, *args: Any) -> Any:
        drops_any = property(lambda step: step.num_candidates)
        with patch.object(StepPlan, "num_dropped", drops_any):
            return original(fusor, *args)

    def num_early(step: StepPlan) -> int:
        policy = POLICIES[step.policy]
        is_eager = policy.skips_full_layers or policy.trusts_memory
        return _Eager(step.num_candidates) if is_eager else step.num_candidates

    def schedule(step: StepPlan, layers: LayerSplit) -> list[int]:
        is_over = POLICIES[step.policy].skips_full_layers  # before the first layer, and for good
        count = step.num_candidates if is_over else _Eager(step.num_candidates)
        return [count] * layers.above

    with (
        patch.object(Fusor, "_plan", plan),
        patch.object(StepPlan, "schedule", schedule),
        patch.object(StepPlan, "num_early", property(num_early)),
    ):
        yield

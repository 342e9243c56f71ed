"""Whether a model may be blended, and how cheaply: rotation, ratio 1, divergence by setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch

from sgl_blend.config import BlendConfig
from sgl_blend.errors import CommandError, UnsupportedError
from sgl_blend.evaluation.distributions import kl_divergence
from sgl_blend.evaluation.evaluate import NUM_TOP, Settings, Watch, evaluate, read_shape
from sgl_blend.evaluation.items import Item
from sgl_blend.evaluation.prompts import Prompt, Templates, load_encoder, make_prompt
from sgl_blend.evaluation.runner import Answer, BlendEngine
from sgl_blend.evaluation.scores import Row
from sgl_blend.profile import FORMAT, Profile
from sgl_blend.rope import check_rotation

EXACT_KL = 1e-6
"""Ratio 1 may differ from a full prefill by this much, in nats, where arithmetic is exact enough."""

_NUM_DOCUMENTS = 5
_NUM_PROMPTS = 16
_STRIDES = (1, 3, 5, 7)
"""Odd numbers: documents taken in such steps are all different as long as there are eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is tried on which prompts.

    Attributes:
        model_path: Folder or name of the model.
        max_kl: Mean KL from full prefill, in nats, that is acceptable.
        items: Prompts; their answers are not looked at.
        templates: How they become text.
        policies: Policies to try.
        ratios: Ratios to try.
        check_layers: Check layers to try; one engine is started for each.
        engine_args: Further keyword arguments of ``sglang.Engine``.
    """

    model_path: str
    max_kl: float
    items: Sequence[Item]
    templates: Templates
    policies: Sequence[str] = ("hkvd", "gradual")
    ratios: Sequence[float] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    check_layers: Sequence[int] = (1, 2)
    engine_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exactness:
    """How the engine treats what must be exact.

    Attributes:
        rotation_errors: Relative error of a moved key, by distance in tokens.
        dtype: The model's.
        noise_kl: Largest KL between two full prefills of a prompt, alone and in a batch, in nats.
        ratio_one_kl: Largest KL of ratio 1 from full prefill, in nats.
        architecture: Digest of the model's configuration.
    """

    rotation_errors: dict[int, float]
    dtype: str
    noise_kl: float
    ratio_one_kl: float
    architecture: str

    @property
    def bound(self) -> float:
        """Return what ratio_one_kl may be: exact, or the noise of the model's own arithmetic."""
        return EXACT_KL if self.dtype == "float32" else max(EXACT_KL, 2 * self.noise_kl)

    def why_not(self) -> str | None:
        """Return why the model must not be blended, or None."""
        try:
            check_rotation(self.rotation_errors, getattr(torch, self.dtype))
        except UnsupportedError as err:
            return str(err).removeprefix("enable_blend: ")
        if not self.ratio_one_kl <= self.bound:
            return (
                f"with every token recomputed the answer is {self.ratio_one_kl:.1e} nats from full "
                f"prefill, more than {self.bound:.1e}; this model must not be blended"
            )
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out.

    Attributes:
        exactness: Of the engine.
        rows: All settings that were tried, full prefill first; empty if exactness fails.
        default: The server's default among them.
        cheapest: The setting with the least work whose KL is acceptable, or None.
        refusal: Why the model must not be blended, or None.
    """

    exactness: Exactness
    rows: Sequence[Row]
    default: Row | None
    cheapest: Row | None
    refusal: str | None

    def profile(self, max_kl: float) -> Profile:
        """Return the settings to serve with.

        Raises:
            ValueError: There are none.
        """
        row = self.cheapest
        if row is None:
            raise ValueError("no setting is acceptable, so there is no profile")
        return Profile(
            format=FORMAT,
            architecture=self.exactness.architecture,
            settings={
                "blend_policy": row.policy,
                "blend_recompute_ratio": row.ratio,
                "blend_check_layer": row.check_layer,
                "blend_build_prefix": row.build_prefix,
            },
            measured={
                "kl": row.kl,
                "max_kl": max_kl,
                "top1": row.top1,
                "layer_rows_share": row.layer_rows_share,
                "prompts": row.n,
                "dtype": self.exactness.dtype,
            },
        )


def bundled_items() -> list[Item]:
    """Return the prompts that come with the package: documents in many orders, and questions."""
    text = json.loads(files("sgl_blend.evaluation").joinpath("prompts.json").read_text())
    documents, questions = text["documents"], text["questions"]

    def order(number: int) -> Iterator[str]:
        stride = _STRIDES[(number + number // len(documents)) % len(_STRIDES)]
        for place in range(_NUM_DOCUMENTS):
            yield documents[(number + place * stride) % len(documents)]

    return [
        Item(
            system=text["system"],
            chunks=tuple(order(number)),
            question=questions[number % len(questions)],
            answers=("not scored",),
        )
        for number in range(_NUM_PROMPTS)
    ]


def verify(plan: Plan, watch: Watch | None = None) -> Verdict:
    """Find out whether a model may be blended.

    Raises:
        BlendError: The model cannot be read, the engine does not start, or a value is wrong.
    """
    if not plan.max_kl > 0:
        raise CommandError(f"max_kl must be above 0, got {plan.max_kl}")
    defaults = BlendConfig()
    settings = Settings(
        model_path=plan.model_path,
        policies=list(dict.fromkeys([defaults.blend_policy, *plan.policies])),
        ratios=sorted({defaults.blend_recompute_ratio, *plan.ratios}),
        check_layers=sorted({defaults.blend_check_layer, *plan.check_layers}),
        build_prefixes=[defaults.blend_build_prefix],
        templates=plan.templates,
        max_new_tokens=1,
        engine_args=plan.engine_args,
        judge_answers=False,
    )
    settings.check()
    exactness = measure_exactness(plan, settings)
    refusal = exactness.why_not()
    if refusal is not None:
        return Verdict(exactness, [], None, None, refusal)
    rows = evaluate(settings, plan.items, watch).rows
    default = next(
        row
        for row in rows
        if (row.policy, row.ratio, row.check_layer)
        == (defaults.blend_policy, defaults.blend_recompute_ratio, defaults.blend_check_layer)
    )
    cheapest = find_cheapest(rows, plan.max_kl)
    if cheapest is None:
        refusal = (
            f"no setting comes within {plan.max_kl:g} nats of full prefill; this model must not be "
            "blended"
        )
    return Verdict(exactness, rows, default, cheapest, refusal)


def find_cheapest(rows: Sequence[Row], max_kl: float) -> Row | None:
    """Return the blended setting that computes least among those within max_kl, or None."""
    good = [
        row
        for row in rows
        if row.check_layer is not None and row.kl <= max_kl and row.layer_rows_share is not None
    ]
    return min(good, key=lambda row: (row.layer_rows_share, row.kl), default=None)


def measure_exactness(plan: Plan, settings: Settings) -> Exactness:
    """Ask the engine what must not depend on blending at all."""
    shape = read_shape(settings)
    encode = load_encoder(plan.model_path)
    prompts = [make_prompt(item, plan.templates, encode) for item in plan.items]
    num_top = min(NUM_TOP, shape.vocab_size)
    with BlendEngine(
        plan.model_path,
        check_layer=settings.check_layers[0],
        build_prefix=settings.build_prefixes[0],
        engine_args=plan.engine_args,
    ) as engine:
        info = engine.server_info()
        together = engine.ask_full(prompts, max_new_tokens=1, num_top=num_top)
        alone = [
            answer
            for prompt in prompts
            for answer in engine.ask_full([prompt], max_new_tokens=1, num_top=num_top)
        ]
        exact = _ask_ratio_one(engine, prompts, together)
    return Exactness(
        rotation_errors={int(delta): error for delta, error in info["rotation_errors"].items()},
        dtype=info["dtype"],
        noise_kl=_largest_kl(together, alone, shape.vocab_size),
        ratio_one_kl=_largest_kl(together, exact, shape.vocab_size),
        architecture=info["architecture"],
    )


def _ask_ratio_one(
    engine: BlendEngine, prompts: Sequence[Prompt], full: Sequence[Answer]
) -> list[Answer]:
    """Answer every prompt at ratio 1, in batches with prompts that are blended.

    Alone, a request at ratio 1 drops no row and never enters the blended layers; beside one that
    does, it goes through them with it.
    """
    answers = []
    for number, prompt in enumerate(prompts):
        other = prompts[(number + 1) % len(prompts)]
        pair = engine.ask(
            [prompt, other],
            "hkvd",
            [1.0, 0.15],
            max_new_tokens=1,
            reference_ids=[
                full[number].first.token_ids,
                full[(number + 1) % len(prompts)].first.token_ids,
            ],
        )
        answers.append(pair[0])
    return answers


def _largest_kl(full: Sequence[Answer], other: Sequence[Answer], vocab_size: int) -> float:
    """Return the largest KL over the prompts, of the tokens that both sides tell about."""
    known = []
    for one, two in zip(full, other, strict=True):
        told = set(two.first.token_ids)  # two full prefills may name different rare tokens
        shared = [token for token in one.first.token_ids if token in told]
        known.append(kl_divergence(one.first.only(shared), two.first.only(shared), vocab_size))
    return max(known)

"""Whether a model may be blended, and how cheaply: rotation, exactness, divergence by setting."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from sgl_blend.commands.common.console import Progress
from sgl_blend.commands.evaluation.distributions import kl_divergence
from sgl_blend.commands.evaluation.evaluate import NUM_TOP, Settings, ask_items, read_shape
from sgl_blend.commands.evaluation.items import Item
from sgl_blend.commands.evaluation.judge import (
    Bounds,
    Judgement,
    cannot_tell,
    choose,
    is_default,
    is_no_weaker,
    split,
)
from sgl_blend.commands.evaluation.prompts import (
    Prompt,
    Templates,
    load_encoder,
    make_prompt,
    unknown_share,
)
from sgl_blend.commands.evaluation.runner import Answer, BlendEngine
from sgl_blend.commands.evaluation.scores import Row
from sgl_blend.errors import UnsupportedError
from sgl_blend.fusion.rotation import check_rotation
from sgl_blend.policies import EXACT, MOVED, POLICIES
from sgl_blend.settings.config import BlendConfig
from sgl_blend.settings.preset import FORMAT, PACKAGE, Profile, Quality

EXACT_KL = 1e-6
"""What must be exact may differ from a full prefill by this much, in nats, in float32."""

_PLAIN = "none"
_NUM_EXACT = 16
"""What is exact for so many prompts is exact; the others only judge quality."""
_MOST_UNKNOWN = 0.05
"""Of prompts of which the model can read less than the rest nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is tried on which prompts.

    Attributes:
        model_path: Folder or name of the model.
        bounds: What a setting may lose.
        items: Prompts; their answers are not looked at.
        data: Name of the file they are from, or profile.PACKAGE.
        digest: SHA-256 of that file.
        templates: How they become text.
        policies: Policies to try.
        ratios: Ratios to try.
        check_layers: Check layers to try; one engine is started for each.
        engine_args: Further keyword arguments of ``sglang.Engine``.
    """

    model_path: str
    bounds: Bounds
    items: Sequence[Item]
    data: str
    digest: str
    templates: Templates
    policies: Sequence[str] = ("hkvd", "funnel", "gradual")
    ratios: Sequence[float] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    check_layers: Sequence[int] = (1, 2)
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own_data(self) -> bool:
        """Whether the prompts are the user's, not the package's."""
        return self.data != PACKAGE

    def settings(self) -> Settings:
        """Return what is asked: every setting that may be chosen, the default and plain reuse.

        By the package's prompts nothing weaker than the default may be chosen.
        """
        defaults = BlendConfig()
        least_ratio, least_layer = defaults.blend_recompute_ratio, defaults.blend_check_layer
        ratios = {least_ratio, *self.ratios}
        layers = {least_layer, *self.check_layers}
        policies = [_PLAIN, defaults.blend_policy, *self.policies]
        if not self.is_own_data:
            policies = [
                name
                for name in policies
                if name == defaults.blend_policy or not POLICIES[name].trusts_memory
            ]
            ratios = {ratio for ratio in ratios if ratio >= least_ratio}
            layers = {layer for layer in layers if layer >= least_layer}
        return Settings(
            model_path=self.model_path,
            policies=list(dict.fromkeys(policies)),
            ratios=sorted(ratios),
            check_layers=sorted(layers),
            build_prefixes=[defaults.blend_build_prefix],
            templates=self.templates,
            max_new_tokens=1,
            engine_args=self.engine_args,
            judge_answers=False,
        )

    def quality(self, reason: str | None) -> Quality:
        """Name the prompts, and why they judge nothing."""
        return Quality(
            judged=reason is None,
            data=self.data,
            digest=self.digest,
            prompts=len(self.items),
            reason=reason,
        )


@dataclass(frozen=True, slots=True)
class Exactness:
    """How the engine treats what must be exact.

    Attributes:
        rotation_errors: Relative error of a moved key, by distance in tokens.
        dtype: The model's.
        kv_dtype: Of the KV pool.
        noise_kl: Largest KL between two full prefills of a prompt, alone and in a batch, in nats.
        ratio_one_kl: Largest KL of ratio 1 from full prefill, in nats.
        true_kv_kl: Largest KL from full prefill where rows are dropped whose KV is the true one.
        moved_kl: Mean KL from full prefill where the keys of such rows were moved away and back.
        architecture: Digest of the model's configuration.
    """

    rotation_errors: dict[int, float]
    dtype: str
    kv_dtype: str
    noise_kl: float
    ratio_one_kl: float
    true_kv_kl: float
    moved_kl: float
    architecture: str

    @property
    def bound(self) -> float:
        """Return what the KL may be: exact, or the noise of the model's own arithmetic."""
        is_exact = self.dtype == self.kv_dtype == "float32"
        return EXACT_KL if is_exact else max(EXACT_KL, 2 * self.noise_kl)

    def why_not(self) -> str | None:
        """Return why the model must not be blended, or None."""
        try:
            check_rotation(self.rotation_errors, getattr(torch, self.dtype))
        except UnsupportedError as err:
            return str(err).removeprefix("enable_blend: ")
        for what, kl in (
            ("every token recomputed", self.ratio_one_kl),
            ("rows dropped whose KV is the true one", self.true_kv_kl),
        ):
            if not kl <= self.bound:
                return (
                    f"with {what} the answer is {kl:.1e} nats from full prefill, more than "
                    f"{self.bound:.1e}; this model must not be blended"
                )
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out.

    Attributes:
        plan: What was tried.
        exactness: Of the engine.
        judgement: The setting to serve with, or why there is none.
        rows: All settings that were tried, on all prompts, full prefill first; empty if none was.
    """

    plan: Plan
    exactness: Exactness
    judgement: Judgement
    rows: Sequence[Row] = ()

    @property
    def default(self) -> Row | None:
        """The server's default on all prompts."""
        return next((row for row in self.rows if is_default(row)), None)

    @property
    def plain(self) -> Row | None:
        """Plain reuse on all prompts, with the fewest layers computed."""
        return next((row for row in self.rows if row.policy == _PLAIN), None)

    def profile(self) -> Profile:
        """Return the settings to serve with: the defaults if nothing was judged.

        Raises:
            ValueError: The model must not be blended.
        """
        if self.judgement.refusal is not None:
            raise ValueError("no setting is acceptable, so there is no profile")
        defaults, row = BlendConfig(), self.judgement.chosen
        way = (
            (defaults.blend_policy, defaults.blend_recompute_ratio, defaults.blend_check_layer)
            if row is None
            else (row.policy, row.ratio, row.check_layer)
        )
        return Profile(
            format=FORMAT,
            architecture=self.exactness.architecture,
            settings={
                **dict(
                    zip(
                        ("blend_policy", "blend_recompute_ratio", "blend_check_layer"),
                        way,
                        strict=True,
                    )
                ),
                "blend_build_prefix": defaults.blend_build_prefix,
            },
            measured={"dtype": self.exactness.dtype, **self._measured(row)},
            quality=self.plan.quality(self.judgement.not_judged),
        )

    def _measured(self, row: Row | None) -> dict[str, object]:
        if row is None:
            return {}
        bounds = self.plan.bounds
        return {
            "kl": row.kl,
            "kl_ci95": row.kl_ci95,
            "max_kl": bounds.max_kl,
            "top1": row.top1,
            "min_top1": bounds.min_top1,
            "layer_rows_share": row.layer_rows_share,
            "confirmed_by": row.n,
        }


def verify(plan: Plan, watch: Progress | None = None) -> Verdict:
    """Find out whether a model may be blended.

    Raises:
        BlendError: The model cannot be read, the engine does not start, or a value is wrong.
    """
    plan.bounds.check()
    settings = plan.settings()
    settings.check()
    # Files are sorted in some way; each part of the prompts shall be like the whole.
    items = random.Random(0).sample(plan.items, len(plan.items))
    exactness = measure_exactness(plan, settings, items[:_NUM_EXACT])
    refusal = exactness.why_not()
    if refusal is not None:
        return Verdict(plan, exactness, Judgement(refusal=refusal))
    if len(items) < plan.bounds.num_prompts:
        too_few = (
            f"{len(items)} prompts are too few to show {plan.bounds.min_top1:.0%} same first token; "
            f"give at least {plan.bounds.num_prompts} with --data"
        )
        return Verdict(plan, exactness, Judgement(not_judged=too_few))
    unknown = unknown_share(plan.model_path, items[:_NUM_EXACT], plan.templates)
    if unknown > _MOST_UNKNOWN:
        strange = (
            f"the model's tokenizer knows no token for {unknown:.0%} of these prompts; give --data "
            "with questions that the model is asked"
        )
        return Verdict(plan, exactness, Judgement(not_judged=strange))
    scores = ask_items(settings, items, watch)
    rows = scores.rows()
    num_first = split(len(items))
    parts = scores.rows(slice(num_first)), scores.rows(slice(num_first, None))
    return Verdict(plan, exactness, judge(plan, rows, *parts), rows)


def judge(
    plan: Plan, rows: Sequence[Row], first: Sequence[Row], second: Sequence[Row]
) -> Judgement:
    """Choose among the settings, if the prompts can tell them apart.

    Args:
        plan: What was tried.
        rows: Every setting on all prompts, full prefill first.
        first: The same on the prompts that bring settings into an order.
        second: The same on the prompts that confirm.
    """
    plain = next(row for row in rows if row.policy == _PLAIN)
    default = next(row for row in rows if is_default(row))
    why = cannot_tell(plain, plan.bounds)
    if why is not None:
        more = "questions that need several chunks" if plan.is_own_data else "questions of your own"
        return Judgement(not_judged=f"{why}; give --data with {more}")
    eligible = [
        number
        for number, row in enumerate(rows)
        if row.check_layer is not None
        and row.policy != _PLAIN
        and row.layer_rows_share is not None
        and (plan.is_own_data or is_no_weaker(row, default))
    ]
    judgement = choose([first[n] for n in eligible], [second[n] for n in eligible], plan.bounds)
    if judgement.refusal is None or plan.is_own_data:
        return judgement
    return Judgement(
        refusal=f"on the package's prompts (--data takes your own) {judgement.refusal}"
    )


def measure_exactness(plan: Plan, settings: Settings, items: Sequence[Item]) -> Exactness:
    """Ask the engine what must not depend on blending at all."""
    shape = read_shape(settings)
    encode = load_encoder(plan.model_path)
    prompts = [make_prompt(item, plan.templates, encode) for item in items]
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
        one = _ask_ratio_one(engine, prompts, together)
        exact = [
            _ask_exact(engine, prompts, together, EXACT + policy)
            for policy in settings.policies
            if EXACT + policy in POLICIES
        ]
        moved = _ask_exact(engine, prompts, together, MOVED)
    return Exactness(
        rotation_errors={int(delta): error for delta, error in info["rotation_errors"].items()},
        dtype=info["dtype"],
        kv_dtype=info["kv_dtype"],
        noise_kl=max(_kls(together, alone, shape.vocab_size)),
        ratio_one_kl=max(_kls(together, one, shape.vocab_size)),
        true_kv_kl=max(max(_kls(together, answers, shape.vocab_size)) for answers in exact),
        moved_kl=mean(_kls(together, moved, shape.vocab_size)),
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
            BlendConfig().blend_policy,
            [1.0, BlendConfig().blend_recompute_ratio],
            max_new_tokens=1,
            reference_ids=[
                full[number].first.token_ids,
                full[(number + 1) % len(prompts)].first.token_ids,
            ],
        )
        answers.append(pair[0])
    return answers


def _ask_exact(
    engine: BlendEngine, prompts: Sequence[Prompt], full: Sequence[Answer], policy: str
) -> list[Answer]:
    """Answer all prompts with rows dropped whose KV is the true one.

    So selection, compaction and scattered attention are held against full prefill for requests that
    go through them on their own account.
    """
    return engine.ask(
        prompts,
        policy,
        [BlendConfig().blend_recompute_ratio] * len(prompts),
        max_new_tokens=1,
        reference_ids=[answer.first.token_ids for answer in full],
    )


def _kls(full: Sequence[Answer], other: Sequence[Answer], vocab_size: int) -> list[float]:
    """Return the KL of each prompt, over the tokens that both sides tell about."""
    known = []
    for one, two in zip(full, other, strict=True):
        told = set(two.first.token_ids)  # two full prefills may name different rare tokens
        shared = [token for token in one.first.token_ids if token in told]
        known.append(kl_divergence(one.first.only(shared), two.first.only(shared), vocab_size))
    return known

"""Ask the same items in every variant, and set each variant against full prefill."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from sgl_blend.commands.common.console import Progress
from sgl_blend.commands.evaluation.items import Item
from sgl_blend.commands.evaluation.prompts import Prompt, Templates, load_encoder, make_prompt
from sgl_blend.commands.evaluation.report import Report, make_report
from sgl_blend.commands.evaluation.runner import OWN_ARGS, Answer, BlendEngine, blend_settings
from sgl_blend.commands.evaluation.scores import FULL, Row, Score, Variant, make_row, score_answer
from sgl_blend.errors import CommandError
from sgl_blend.policies import POLICIES
from sgl_blend.settings.config import check_policy, check_ratio

NUM_TOP = 1000
"""Most first tokens whose probability is compared; what is left counts as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is evaluated: every policy at every ratio, on a server for every other combination.

    Attributes:
        model_path: Folder or name of the model.
        policies: Names of selection policies.
        ratios: Shares of the reused tokens to recompute; a policy with a ratio of its own keeps it.
        check_layers: Values of ``--blend-check-layer``.
        build_prefixes: Values of ``--blend-build-prefix``.
        templates: How items become text.
        max_new_tokens: Longest answer.
        batch_size: Prompts sent at once.
        seed: Of the bootstrap.
        engine_args: Further keyword arguments of ``sglang.Engine``.
        judge_answers: Compare answers with what is right; otherwise only distributions are compared,
            and accuracy, F1 and Rouge-L are NaN.
    """

    model_path: str
    policies: Sequence[str]
    ratios: Sequence[float]
    check_layers: Sequence[int]
    build_prefixes: Sequence[str]
    templates: Templates = field(default_factory=Templates)
    max_new_tokens: int = 32
    batch_size: int = 16
    seed: int = 0
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    judge_answers: bool = True

    def variants(self) -> list[Variant]:
        """Return every variant once, those of one server together, full prefill not among them."""
        found: dict[Variant, None] = {}
        for check_layer, build_prefix in product(self.check_layers, self.build_prefixes):
            for policy, asked in product(self.policies, self.ratios):
                fixed = POLICIES[policy].fixed_ratio
                ratio = asked if fixed is None else fixed
                found[Variant(policy, ratio, check_layer, build_prefix)] = None
        return list(found)

    def check(self) -> None:
        """Check every value before anything is started.

        Raises:
            BlendError: A policy is unknown, a value out of range, or an engine argument is one that
                the evaluation sets itself.
        """
        for policy in self.policies:
            check_policy("policy", policy, CommandError, evaluation=True)
        for ratio in self.ratios:
            check_ratio("ratio", ratio, CommandError)
        for check_layer, build_prefix in product(self.check_layers, self.build_prefixes):
            blend_settings(check_layer, build_prefix)
        if self.max_new_tokens < 1:
            raise CommandError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if own := [name for name in OWN_ARGS if name in self.engine_args]:
            raise CommandError(f"engine argument {own[0]} is set by the evaluation itself")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the figures need to know of a model."""

    num_layers: int
    vocab_size: int


def evaluate(settings: Settings, items: Sequence[Item], watch: Progress | None = None) -> Report:
    """Answer all items in every variant through the real engine.

    One engine is started for each check layer and build prefix; full prefill is asked once, of the
    first. All variants are asked of a batch of items before the next batch, so that its chunks are
    built once.

    Args:
        settings: What is evaluated.
        items: At least one.
        watch: Is told how it goes on.

    Returns:
        Full prefill first, then every variant in the order of settings.variants().

    Raises:
        BlendError: The settings are wrong, the model cannot be read, or the engine does not start.
    """
    return make_report(settings.model_path, ask_items(settings, items, watch).rows())


@dataclass(frozen=True, slots=True)
class Scores:
    """How every item was answered in every variant, full prefill first.

    Attributes:
        items: What was asked.
        by_variant: Of each variant one score per item, in the order of items.
        num_layers: Layers of the model.
        seed: Of the bootstrap.
    """

    items: Sequence[Item]
    by_variant: Mapping[Variant, Sequence[Score]]
    num_layers: int
    seed: int

    def rows(self, part: slice = slice(None)) -> list[Row]:
        """Return one row per variant over a part of the items."""
        full = self.by_variant[FULL][part]
        return [
            make_row(
                variant,
                self.items[part],
                scores[part],
                full,
                num_layers=self.num_layers,
                seed=self.seed,
            )
            for variant, scores in self.by_variant.items()
        ]


def ask_items(settings: Settings, items: Sequence[Item], watch: Progress | None = None) -> Scores:
    """Do what evaluate does, and return the scores item by item."""
    settings.check()
    shape = read_shape(settings)
    encode = load_encoder(
        str(settings.engine_args.get("tokenizer_path", settings.model_path)),
        trust_remote_code=bool(settings.engine_args.get("trust_remote_code", False)),
    )
    prompts = [make_prompt(item, settings.templates, encode) for item in items]
    run = _Run(settings, items, prompts, shape, watch or _ignore)
    run.ask_all()
    return Scores(items, run.scores, shape.num_layers, settings.seed)


class _Run:
    """The answers so far."""

    def __init__(
        self,
        settings: Settings,
        items: Sequence[Item],
        prompts: Sequence[Prompt],
        shape: ModelShape,
        watch: Progress,
    ) -> None:
        self._settings = settings
        self._items = items
        self._prompts = prompts
        self._shape = shape
        self._watch = watch
        self._full: list[Answer] = []
        self.scores: dict[Variant, list[Score]] = {
            variant: [] for variant in (FULL, *settings.variants())
        }

    def ask_all(self) -> None:
        servers = product(self._settings.check_layers, self._settings.build_prefixes)
        for check_layer, build_prefix in dict.fromkeys(servers):
            name = f"check layer {check_layer}, build prefix {build_prefix}"
            self._watch(f"{name}: starting the engine", 0)
            variants = [
                variant
                for variant in self.scores
                if (variant.check_layer, variant.build_prefix) == (check_layer, build_prefix)
            ]
            with BlendEngine(
                self._settings.model_path,
                check_layer=check_layer,
                build_prefix=build_prefix,
                engine_args=self._settings.engine_args,
            ) as engine:
                self._watch(name, 0)
                for batch in self._batches():
                    self._ask_batch(engine, batch, variants, name)

    def _ask_batch(
        self, engine: BlendEngine, batch: slice, variants: Sequence[Variant], name: str
    ) -> None:
        prompts = self._prompts[batch]
        max_new_tokens = self._settings.max_new_tokens
        if len(self._full) < len(self._prompts):
            num_top = min(NUM_TOP, self._shape.vocab_size)
            answers = engine.ask_full(prompts, max_new_tokens=max_new_tokens, num_top=num_top)
            self._full += answers
            self._score(FULL, batch, answers)
            self._watch(name, len(prompts))
        reference_ids = [answer.first.token_ids for answer in self._full[batch]]
        for variant in variants:
            answers = engine.ask(
                prompts,
                variant.policy,
                [variant.ratio] * len(prompts),
                max_new_tokens=max_new_tokens,
                reference_ids=reference_ids,
            )
            self._score(variant, batch, answers)
            self._watch(name, len(prompts))

    def _score(self, variant: Variant, batch: slice, answers: Sequence[Answer]) -> None:
        self.scores[variant] += [
            score_answer(
                item, answer, full, self._shape.vocab_size, judge=self._settings.judge_answers
            )
            for item, answer, full in zip(
                self._items[batch], answers, self._full[batch], strict=True
            )
        ]

    def _batches(self) -> Iterator[slice]:
        size = self._settings.batch_size
        for start in range(0, len(self._prompts), size):
            yield slice(start, start + size)


def read_shape(settings: Settings) -> ModelShape:
    """Read the model's config, and check the check layers against it.

    Raises:
        CommandError: There is no model, or it has no such check layer.
    """
    shape = read_model_shape(settings.model_path, settings.engine_args)
    for check_layer in settings.check_layers:
        if check_layer >= shape.num_layers - 1:
            raise CommandError(
                f"check layer {check_layer} must be below the last of the model's "
                f"{shape.num_layers} layers"
            )
    return shape


def read_model_shape(model_path: str, engine_args: Mapping[str, Any]) -> ModelShape:
    """Read a model's config.

    Raises:
        CommandError: There is no model.
    """
    from transformers import AutoConfig

    if model_path.startswith(("/", ".")) and not Path(model_path).is_dir():
        raise CommandError(f"there is no model folder {model_path}")
    try:
        config = AutoConfig.from_pretrained(
            model_path, trust_remote_code=bool(engine_args.get("trust_remote_code", False))
        ).get_text_config()
    except (OSError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise CommandError(f"no model in {model_path}: {reason}") from None
    return ModelShape(num_layers=int(config.num_hidden_layers), vocab_size=int(config.vocab_size))


def _ignore(what: str, answered: int) -> None:
    """Watch nothing."""

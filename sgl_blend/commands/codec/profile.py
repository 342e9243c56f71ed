"""Make a codec profile: scales, transforms, sizes and losses, through the real engine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import torch

from sgl_blend.commands.codec.coded_engine import CodedEngine, EngineSettings
from sgl_blend.commands.common.bootstrap import Interval, mean_interval
from sgl_blend.commands.common.console import Progress
from sgl_blend.commands.evaluation.answers import exact_match
from sgl_blend.commands.evaluation.distributions import kl_divergence
from sgl_blend.commands.evaluation.evaluate import NUM_TOP, read_model_shape
from sgl_blend.commands.evaluation.items import Item
from sgl_blend.commands.evaluation.prompts import Prompt, Templates, load_encoder, make_prompt
from sgl_blend.commands.evaluation.runner import Answer
from sgl_blend.errors import CommandError
from sgl_blend.storage.codec.coded_pages import pack_coded
from sgl_blend.storage.codec.coder import Coder, Rotation
from sgl_blend.storage.codec.collector import CollectedPage, read_collected
from sgl_blend.storage.codec.levels import (
    LEVELS,
    PROFILE_VERSION,
    CodecProfile,
    Entropy,
    LevelFigures,
    Transform,
    blank_profile,
    write_profile,
)
from sgl_blend.storage.codec.quantiser import make_unit_code
from sgl_blend.storage.codec.statistics import (
    choose_transform,
    count_bins,
    measure_scales,
    probabilities,
)
from sgl_blend.storage.container import PageFormat, PageLabel

MOST_PAGES = 1024
MOST_BYTES = 1 << 30
LEAST_PAGES = 16
_ROUNDING = 1e-9
LEAST_FROM_STORE = 0.9
"""Share of the chunks that must have come from the store, or the level was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        model_path: Folder or name of the model.
        items: Prompts.
        data: Their name.
        max_loss: Budget of a level.
        levels: Names of levels, from the finest to the coarsest.
        entropy: "zstd" or "arithmetic".
        page_size: Tokens of a page.
        templates: How items become text.
        engine_args: Further keyword arguments of ``sglang.Engine``.
    """

    model_path: str
    items: Sequence[Item]
    data: str
    max_loss: float
    levels: Sequence[str]
    entropy: str = "zstd"
    page_size: int = 64
    templates: Templates = field(default_factory=Templates)
    engine_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One level as it was measured.

    Attributes:
        level: Its name.
        bits: Per element, headers included.
        clipped: Share of elements beyond the outermost bin.
        anchor_share: Share of the (layer, K/V) that are coded as differences.
        what: "accuracy", or "same first token" for prompts without answers.
        value: Of the level.
        loss: Of that, against lossless storage.
        loss_ci95: Its 95 % interval, prompt by prompt.
        kl: Mean KL of the first token against lossless storage, in nats.
        is_within: Whether the loss is within the budget.
    """

    level: str
    bits: float
    clipped: float
    anchor_share: float
    what: str
    value: float
    loss: float
    loss_ci95: Interval
    kl: float
    is_within: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A profile and what it rests on."""

    profile: CodecProfile
    rows: Sequence[LevelRow]
    num_prompts: int
    num_pages: int
    lossless: float

    def facts(self) -> dict[str, Any]:
        """Return every figure as JSON values."""
        told: dict[str, Any] = msgspec.to_builtins(
            {
                "data": self.profile.data,
                "prompts": self.num_prompts,
                "pages": self.num_pages,
                "max_loss": self.profile.max_loss,
                "entropy": Entropy(self.profile.entropy).name.lower(),
                "lossless": self.lossless,
                "levels": list(self.rows),
            }
        )
        return told


def make_profile(plan: Plan, watch: Progress) -> Outcome:
    """Measure a model.

    Args:
        plan: What is measured.
        watch: Is told how it goes on.

    Raises:
        BlendError: The model cannot be read, the engine does not start, or prompts hold too few chunks.
    """
    encode = load_encoder(plan.model_path)
    prompts = [make_prompt(item, plan.templates, encode) for item in plan.items]
    settings = EngineSettings(plan.model_path, plan.page_size, plan.engine_args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        pages = collect_pages(settings, prompts, path, watch)
        bare, sizes = measure(plan, pages)
        run = LevelRun(plan, settings, prompts, watch)
        run.ask_lossless()
        kept, rows = {}, []
        for level, figures in sizes.items():
            write_profile(msgspec.structs.replace(bare, levels={level: figures}), path)
            row = run.ask_level(level, figures, path)
            rows.append(row)
            if row.is_within:
                kept[level] = msgspec.structs.replace(figures, accuracy_lost=row.loss, kl=row.kl)
    profile = msgspec.structs.replace(bare, levels=kept)
    return Outcome(profile, rows, len(prompts), len(pages), run.lossless)


def collect_pages(
    settings: EngineSettings, prompts: Sequence[Prompt], path: Path, watch: Progress
) -> list[CollectedPage]:
    """Build the chunks of prompts, and return pages of their KV.

    Raises:
        CommandError: There are too few.
    """
    write_profile(blank_profile(), path)
    pages: list[CollectedPage] = []
    with CodedEngine(settings, {"blend_store_profile": str(path)}) as engine:
        engine.build(
            prompts, watch, lambda: len(list(engine.folder.glob("sgb2-collect-*"))) >= MOST_PAGES
        )
        held = 0
        for file in sorted(engine.folder.glob("sgb2-collect-*")):
            page = read_collected(file.read_bytes())
            if page is not None:
                pages.append(page)
                held += page.units.numel() * 4
            if len(pages) == MOST_PAGES or (held > MOST_BYTES and len(pages) >= LEAST_PAGES):
                break
    if len(pages) < LEAST_PAGES:
        raise CommandError(
            f"the prompts fill {len(pages)} pages of {settings.page_size} tokens with chunks, "
            f"{LEAST_PAGES} are needed; give more prompts or a smaller --page-size"
        )
    return pages


def measure(
    plan: Plan, pages: Sequence[CollectedPage]
) -> tuple[CodecProfile, dict[str, LevelFigures]]:
    """Return a profile without levels, and the sizes of each level, losses unknown.

    Scales and distributions come from every second page, sizes from the others.
    """
    learned, held_out = pages[::2], pages[1::2]
    num_units, _, heads, dim = learned[0].units.shape
    units = [[page.units[index] for page in learned] for index in range(num_units)]
    entropy = Entropy[plan.entropy.upper()]
    bare = CodecProfile(
        PROFILE_VERSION,
        learned[0].weights,
        num_units // 2,
        heads,
        dim,
        plan.data,
        len(plan.items),
        plan.max_loss,
        int(entropy),
        [measure_scales(unit) for unit in units],
        {},
    )
    return bare, {
        name: _measure_level(bare, name, units, held_out, entropy) for name in plan.levels
    }


def _measure_level(
    bare: CodecProfile,
    name: str,
    units: Sequence[Sequence[torch.Tensor]],
    held_out: Sequence[CollectedPage],
    entropy: Entropy,
) -> LevelFigures:
    level = LEVELS[name]
    transforms, tables = [], []
    for index, unit in enumerate(units):
        transform, _ = choose_transform(bare, level, index, unit)
        transforms.append(int(transform))
        if entropy is Entropy.ARITHMETIC:
            code = make_unit_code(bare, level, index, transform, slice(None))
            tables.append(probabilities(count_bins(code, unit)[0]))
    figures = LevelFigures(transforms, 0.0, 0.0, 0.0, 0.0, b"".join(tables))
    bits, clipped = measure_size(
        msgspec.structs.replace(bare, levels={name: figures}), name, held_out
    )
    return msgspec.structs.replace(figures, bits_per_element=bits, clipped=clipped)


def measure_size(
    profile: CodecProfile, level: str, pages: Sequence[CollectedPage]
) -> tuple[float, float]:
    """Return bits per element, headers included, and the share of clipped elements."""
    tokens = pages[0].units.shape[1]
    form = PageFormat(pages[0].dtype, profile.layers, tokens, profile.heads, profile.dim)
    still = torch.cat(
        [torch.ones(tokens, profile.dim // 2), torch.zeros(tokens, profile.dim // 2)], 1
    )
    coder = Coder(profile, level, form, Rotation(still, neox=True))
    label = PageLabel(
        f"sgb2-{level}-{0:032x}", form, profile.weights, "0" * 16, level, profile.digest()
    )
    dtype = getattr(torch, form.dtype)
    size = clipped = 0
    for page in pages:
        values = page.units.view(profile.layers, 2, *page.units.shape[1:]).transpose(0, 1)
        octets = values.to(dtype).contiguous().view(-1).view(torch.uint8).numpy()
        data, beyond = pack_coded(octets.data, label, coder, 0)
        size += len(data)
        clipped += beyond
    elements = len(pages) * pages[0].units.numel()
    return 8 * size / elements, clipped / elements


class LevelRun:
    """Asks the same prompts with their chunks stored in each way.

    Args:
        plan: What is measured.
        settings: Of all engines.
        prompts: Of the plan's items.
        watch: Is told how it goes on.

    Attributes:
        lossless: Accuracy, or share of same first tokens, with chunks that lost nothing.
    """

    def __init__(
        self, plan: Plan, settings: EngineSettings, prompts: Sequence[Prompt], watch: Progress
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._prompts = prompts
        self._watch = watch
        self._judges = all(item.answers for item in plan.items)
        self._vocab_size = read_model_shape(plan.model_path, plan.engine_args).vocab_size
        self._ids: list[tuple[int, ...]] = []
        self._base: list[Answer] = []
        self.lossless = math.nan

    def ask_lossless(self) -> None:
        """Ask with chunks that lost nothing."""
        with CodedEngine(self._settings, {}) as engine:
            full = engine.ask_full(self._prompts, min(NUM_TOP, self._vocab_size))
            self._ids = [answer.first.token_ids for answer in full]
            engine.build(self._prompts, self._watch)
            self._base = engine.ask_stored(self._prompts, self._ids, self._watch)
        self.lossless = _mean(self._values(self._base))

    def ask_level(self, level: str, figures: LevelFigures, path: Path) -> LevelRow:
        """Ask with chunks at a level.

        Raises:
            CommandError: They did not come from the store.
        """
        blend = {"blend_store_profile": str(path), "blend_store_levels": level}
        with CodedEngine(self._settings, blend) as engine:
            engine.build(self._prompts, self._watch)
            answers = engine.ask_stored(self._prompts, self._ids, self._watch)
        _check_source(level, answers)
        # A prompt that no chunk came back for says nothing of the level.
        tells = [level in answer.report["chunk_levels"] for answer in answers]
        pairs = zip(self._base, answers, strict=True)
        return judge_level(
            level,
            figures,
            list(compress(self._values(self._base), tells)),
            list(compress(self._values(answers), tells)),
            list(
                compress(
                    [kl_divergence(a.first, b.first, self._vocab_size) for a, b in pairs], tells
                )
            ),
            what="accuracy" if self._judges else "same first token",
            max_loss=self._plan.max_loss,
        )

    def _values(self, answers: Sequence[Answer]) -> list[float]:
        if self._judges:
            pairs = zip(answers, self._plan.items, strict=True)
            return [float(exact_match(answer.text, item.answers)) for answer, item in pairs]
        pairs_of = zip(answers, self._base, strict=True)
        return [float(answer.first.chosen == base.first.chosen) for answer, base in pairs_of]


def judge_level(
    level: str,
    figures: LevelFigures,
    base: Sequence[float],
    values: Sequence[float],
    kl: Sequence[float],
    *,
    what: str,
    max_loss: float,
) -> LevelRow:
    """Compare a level with lossless storage, prompt by prompt.

    Args:
        level: Its name.
        figures: How it is coded.
        base: 1 for each prompt that is right with lossless storage, else 0.
        values: The same with the level.
        kl: Of each first token, in nats.
        what: Name of these values.
        max_loss: The budget.
    """
    losses = [b - v for b, v in zip(base, values, strict=True)]
    loss = _mean(losses)
    return LevelRow(
        level=level,
        bits=figures.bits_per_element,
        clipped=figures.clipped,
        anchor_share=_mean([t == Transform.ANCHORS for t in figures.transforms]),
        what=what,
        value=_mean(values),
        loss=loss,
        loss_ci95=mean_interval(losses, seed=0),
        kl=_mean(kl),
        is_within=loss <= max_loss + _ROUNDING,
    )


def _check_source(level: str, answers: Sequence[Answer]) -> None:
    """Refuse figures of chunks that came from elsewhere."""
    came = [name for answer in answers for name in answer.report["chunk_levels"]]
    hits = sum(answer.report["chunk_hits"] for answer in answers)
    share = hits / max(1, hits + sum(answer.report["chunk_misses"] for answer in answers))
    if level not in came:
        raise CommandError(
            f"no chunk came from the store at {level}; are they shorter than a page?"
        )
    if share < LEAST_FROM_STORE:
        raise CommandError(f"only {share:.0%} of the chunks came back from the store at {level}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

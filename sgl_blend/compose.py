"""A loaded scheduler becomes a runtime: it is checked, measured and wired."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from sgl_blend.compose_finding import make_finding, make_learner
from sgl_blend.compose_fusion import Fusion, make_fusion
from sgl_blend.engine.adapters import Adapters
from sgl_blend.engine.compatibility import (
    check_server_args,
)
from sgl_blend.engine.facts import ServerFacts, read_facts
from sgl_blend.engine.models import (
    longest_prompt,
)
from sgl_blend.engine.objects import Scheduler
from sgl_blend.engine.prefetch import prepare_storage
from sgl_blend.engine.rounds import vocab_size
from sgl_blend.engine.tiers import has_host_tier, host_token_bytes, trial_loads
from sgl_blend.engine.tp_group import TPGroup, this_group
from sgl_blend.engine.weights import weights_digest
from sgl_blend.errors import ConfigError, UnsupportedError
from sgl_blend.metrics import BlendMetrics, CanaryMetrics, FindingMetrics, StorageMetrics
from sgl_blend.protocol.request import parse_overrides
from sgl_blend.protocol.separator import Separator, find_separator, seam_warning
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.fair_share import FairShare
from sgl_blend.radix_ext.namespaces import architecture
from sgl_blend.radix_ext.probation import Probation
from sgl_blend.scheduler.admission import Admission
from sgl_blend.scheduler.build_budget import BUILD_SHARE, PROBE_SHARE, BuildBudget, ServedTime
from sgl_blend.scheduler.build_steps import StepPlanner
from sgl_blend.scheduler.builds import ChunkBuilder, step_tokens
from sgl_blend.scheduler.canary import Canary
from sgl_blend.scheduler.intake import Intake
from sgl_blend.scheduler.level_choice import LevelChoice
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.loading_controller import LoadingController
from sgl_blend.scheduler.lookup import Lookups
from sgl_blend.scheduler.pieces import Pieces
from sgl_blend.scheduler.probes import Memories, ProbeSteps
from sgl_blend.scheduler.rounds import BackgroundJob, Rounds
from sgl_blend.scheduler.runtime import BlendRuntime
from sgl_blend.scheduler.storage_tier import StorageTier
from sgl_blend.scheduler.switch import BlendSwitch
from sgl_blend.settings.config import BlendConfig
from sgl_blend.settings.preset import PRESETS, check_architecture, load_profile, quality_of
from sgl_blend.storage.codec.coder import Rotation as StoredRotation
from sgl_blend.storage.codec.collector import COLLECT
from sgl_blend.storage.codec.levels import read_levels
from sgl_blend.storage.codec.stored_levels import StoredLevels
from sgl_blend.tuning.cost_model import CostModel
from sgl_blend.tuning.links import TimedLoad, fit_speed
from sgl_blend.tuning.loading import ModelTimes

logger = logging.getLogger(__name__)


def compose(config: BlendConfig, scheduler: Scheduler) -> BlendRuntime:
    """Check the loaded model and put the parts together.

    Raises:
        BlendError: The model, its KV pool or the separator cannot serve blending.
    """
    facts = read_facts(scheduler)
    check_server_args(facts.args)  # once more: a front end of its own may skip the first
    model_architecture = architecture(facts.architecture)
    quality = _quality(config, model_architecture)
    tp_group = this_group()
    fusion = make_fusion(config, scheduler, facts, tp_group)
    separator = _separator(config, facts)
    model = LoadedModel(
        f"{model_architecture} {facts.dtypes}",
        lambda: weights_digest(facts.runner),
        config,
        tp_group,
        quality=quality,
    )
    levels = _level_choice(config, fusion, facts, model, tp_group)
    store = ChunkStore(facts.tree, facts.page_size, with_rounded=levels is not None)
    probation = Probation(facts.tree)
    shares = FairShare(store, facts.capacity, lambda: probation.num_tokens)
    build_first = config.blend_on_miss == "build"
    tokens = step_tokens(scheduler, build_first=build_first)
    served, adapters = ServedTime(), Adapters(scheduler)
    finding = make_finding(config, facts, store, tp_group)
    finder = None if finding is None else finding.finder

    def make_builder(kind: str, on_built: Sequence[Callable[[ChunkKey], None]]) -> ChunkBuilder:
        return ChunkBuilder(
            scheduler,
            store,
            tp_group,
            StepPlanner(store, tokens, model),
            adapters,
            kind=kind,
            budget=BuildBudget(served, BUILD_SHARE),
            on_built=on_built,
        )

    on_built = [store.remember, shares.built, *([] if finder is None else [finder.built])]
    builder = make_builder("build", on_built)
    longest = longest_prompt(facts.runner) - 1  # SGLang serves no longer ones
    memories = Memories(store, vocab_size(scheduler), fusion.memory_tokens, longest)
    prober = ChunkBuilder(
        scheduler,
        store,
        tp_group,
        ProbeSteps(store, tokens, model, memories),
        adapters,
        kind="probe",
        budget=BuildBudget(served, PROBE_SHARE),
    )
    publish: dict[str, Any] = {
        "publish": facts.publishes and tp_group.is_first,
        "labels": {"model_name": facts.model_name},
    }
    switch, canary = BlendSwitch(), None
    pieces = Pieces(scheduler, store, model, tp_group, num_layers=fusion.fusor.layers.total)
    learner = make_learner(config, facts, finding, partial(make_builder, "learn"), on_built)
    learned = [] if learner is None else [learner.builder]
    jobs: list[BackgroundJob] = [pieces, builder, *learned, prober]
    if config.blend_canary_rate > 0:
        canary = Canary(
            scheduler,
            store,
            switch,
            CanaryMetrics(**publish),
            tp_group,
            adapters,
            step_tokens=builder.step_tokens,
            own=parse_overrides(None, config),
            rate=config.blend_canary_rate,
            max_kl=config.blend_canary_max_kl,
        )
        jobs.append(canary)
    rounds = Rounds(scheduler, tp_group, jobs, served)
    switch.when_turned_off(rounds.forget)
    lookups = Lookups(store, with_exact_namespace=not build_first)
    prepare_storage(facts.tree)
    controller = _loading_controller(fusion, facts, tp_group)
    storage = StorageTier(
        scheduler,
        facts.tree,
        store,
        lookups,
        model,
        controller,
        pieces,
        StorageMetrics(**publish),
        levels,
    )
    logger.info("sgl-blend: quality %s", quality)
    return BlendRuntime(
        intake=Intake(
            config,
            model,
            separator_id=None if separator is None else separator.token_id,
            bos_token_id=facts.bos_token_id,
            switch=switch,
            longest=longest,
            page_size=facts.page_size,
            finder=finder,
            pretends=adapters.pretends,
        ),
        admission=Admission(
            store,
            builder,
            prober,
            memories,
            shares,
            lookups,
            storage,
            controller,
            capacity=facts.capacity,
            cost_model=fusion.cost_model,
            build_first=build_first,
            model=model,
            sizes=fusion.sizes,
        ),
        storage=storage,
        levels=levels,
        rounds=rounds,
        builder=builder,
        prober=prober,
        memories=memories,
        canary=canary,
        model=model,
        fusor=fusion.fusor,
        metrics=BlendMetrics(**publish),
        finding_metrics=FindingMetrics(
            publish=publish["publish"] and finding is not None, labels=publish["labels"]
        ),
        shares=shares,
        probation=probation,
        finder=finder,
        learner=learner,
        scheduler=scheduler,
        tree=facts.tree,
        description={
            **msgspec.to_builtins(config),
            "separator": None if separator is None else separator.text,
            "separator_id": None if separator is None else separator.token_id,
            "architecture": model_architecture,
            **fusion.described,
        },
    )


def _separator(config: BlendConfig, facts: ServerFacts) -> Separator | None:
    separator = find_separator(facts.tokenizer, config.blend_separator)
    if (warning := seam_warning(facts.tokenizer, separator)) is not None:
        logger.warning("sgl-blend: %s", warning)
    logger.info("sgl-blend: separator %r", None if separator is None else separator.text)
    return separator


def _stored_levels(
    config: BlendConfig, fusion: Fusion, model: LoadedModel, tp_group: TPGroup
) -> StoredLevels | None:
    """Read at which levels chunks are stored; None: nothing is lost."""
    if (path := config.blend_store_profile) is None:
        return None
    if config.blend_on_miss == "build":
        logger.warning("sgl-blend: chunks are stored losslessly, as --blend-on-miss build asks")
        return None
    if tp_group.num_ranks > 1:
        raise UnsupportedError("--blend-store-profile is not supported with --tp-size yet")
    profile, names = read_levels(path, config.store_levels, may_be_blank=config.blend_eval)
    embedding = fusion.rotation.embedding
    rotation = StoredRotation(embedding.table.float().cpu(), embedding.neox)
    if profile.is_blank:
        return StoredLevels([COLLECT], profile, rotation)
    model.settle()
    if profile.weights != model.weights:
        raise ConfigError(
            f"--blend-store-profile {path} was measured on other weights; "
            "run sgl-blend codec profile for this model"
        )
    return StoredLevels(names, profile, rotation)


def _model_times(times: CostModel, fusion: Fusion, token_bytes: int) -> ModelTimes:
    layers = fusion.fusor.layers
    return ModelTimes(
        layers.total,
        layers.check,
        token_bytes // layers.total,
        times.layer_s,
        times.copy_s,
        step_s=times.step_s,
    )


def _level_choice(
    config: BlendConfig,
    fusion: Fusion,
    facts: ServerFacts,
    model: LoadedModel,
    tp_group: TPGroup,
) -> LevelChoice | None:
    """Return what chooses the levels of chunks; None: nothing is lost."""
    levels = _stored_levels(config, fusion, model, tp_group)
    if levels is None or not has_host_tier(facts.tree):
        return None
    assert fusion.times is not None, "measured for a profile"
    if (half_bins := levels.half_bins()) is not None:
        fusion.fusor.half_bins = half_bins.to(fusion.rotation.embedding.table.device)
    token_bytes = host_token_bytes(facts.tree)
    return LevelChoice(levels, _model_times(fusion.times, fusion, token_bytes), token_bytes)


def _loading_controller(
    fusion: Fusion, facts: ServerFacts, tp_group: TPGroup
) -> LoadingController | None:
    """Measure how fast host memory is; None where everything that is found is loaded."""
    if fusion.cost_model is None or not has_host_tier(facts.tree):
        return None
    token_bytes = host_token_bytes(facts.tree)
    times = _model_times(fusion.cost_model, fusion, token_bytes)
    trial = [TimedLoad(*load) for load in trial_loads(facts.tree)]
    return LoadingController(times, fit_speed(trial), token_bytes, tp_group)


def _quality(config: BlendConfig, model_architecture: str) -> str:
    """Check the profile against the model, and say by what the model's answers were judged.

    Raises:
        ConfigError: The profile is another model's.
    """
    preset, profile = config.blend_preset, None
    if preset is not None and preset not in PRESETS:
        profile = load_profile(preset)
        check_architecture(profile, preset, model_architecture)
    return quality_of(profile, msgspec.to_builtins(config))

"""Composition root: the hooks, and what they are made of.

SGLang logs and swallows whatever goes wrong while it loads plugins and applies their hooks. A server
asked to blend would then serve unblended and nobody would know. So every way to ask for blending
first checks that all hooks are in place, and where even that check could not be installed the flags
and keyword arguments do not exist and SGLang refuses them itself.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from sgl_blend.engine import adapter as sglang
from sgl_blend.engine.compatibility import (
    check_layers,
    check_model,
    check_runner,
    check_server_args,
)
from sgl_blend.engine.forward import decoder_layers, layer_pools
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.engine.tree_branch import eviction_targets, reset_targets
from sgl_blend.errors import ConfigError, UnsupportedError
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.plan import LayerSplit
from sgl_blend.fusion.rotation import check_rotation, read_rotation, rotation_errors
from sgl_blend.metrics import BlendMetrics, CanaryMetrics
from sgl_blend.protocol.gate import RequestGate, check_preferred
from sgl_blend.protocol.separator import Separator, find_separator, seam_warning
from sgl_blend.radix_ext.chunk_store import ChunkStore
from sgl_blend.radix_ext.fair_share import FairShare
from sgl_blend.radix_ext.namespaces import ModelFingerprint, architecture, fingerprint
from sgl_blend.scheduler import hooks
from sgl_blend.scheduler.admission import Admission
from sgl_blend.scheduler.builds import ChunkBuilder
from sgl_blend.scheduler.canary import Canary
from sgl_blend.scheduler.intake import Intake
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.runtime import BlendRuntime
from sgl_blend.settings.config import BlendConfig, add_flags, settings_from_flags
from sgl_blend.settings.preset import check_architecture, load_profile, quality_of
from sgl_blend.tuning.cost_model import CostModel, measure
from sgl_blend.tuning.kernel_choice import choose_kernel
from sgl_blend.tuning.trial import run_trial

logger = logging.getLogger(__name__)

_GATE = "_sgl_blend_gate"


def register() -> None:
    """Register all hooks; SGLang's entry point group ``sglang.srt.plugins`` calls this."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, hook in _hook_table():
        HookRegistry.register(target, hook, HookType(kind))
    Engine.server_args_class = staticmethod(make_server_args(Engine.server_args_class))


def _hook_table() -> list[tuple[str, str, Callable[..., Any]]]:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    args = "sglang.srt.server_args.ServerArgs"
    tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    completions = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
    return [
        (f"{args}.add_cli_args", "after", _after_add_cli_args),
        (f"{args}.from_cli_args", "after", _after_from_cli_args),
        (f"{args}.check_server_args", "after", _after_check_server_args),
        (f"{tokenizer}._create_tokenized_object", "after", _after_create_tokenized_object),
        (f"{completions}._get_echo_text", "after", _after_get_echo_text),
        (f"{completions}._prepare_echo_prompts", "after", _after_prepare_echo_prompts),
        (f"{scheduler}.__init__", "after", _after_scheduler_init),
        (
            f"{scheduler}.handle_generate_request",
            "around",
            hooks.around_handle_generate_request,
        ),
        (f"{scheduler}.get_new_batch_prefill", "around", hooks.around_get_new_batch_prefill),
        (f"{scheduler}.process_batch_result", "after", hooks.after_process_batch_result),
        (
            f"{scheduler}.process_input_requests",
            "around",
            hooks.around_process_input_requests,
        ),
        (f"{scheduler}.flush_cache", "around", hooks.around_flush_cache),
        (f"{scheduler}.get_internal_state", "after", hooks.after_get_internal_state),
        ("sglang.srt.managers.schedule_batch.Req.__init__", "after", hooks.after_req_init),
        (f"{adder}.add_one_req", "around", hooks.around_add_one_req),
        (f"{adder}.preempt_to_schedule", "around", hooks.around_preempt_to_schedule),
        (f"{adder}.add_chunked_req", "after", hooks.after_add_chunked_req),
        (
            "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
            "around",
            hooks.around_forward_raw,
        ),
        *((target, "before", hooks.before_evict) for target in eviction_targets()),
        *((target, "before", hooks.before_reset) for target in reset_targets()),
        ("sglang.srt.mem_cache.common.release_kv_cache", "before", hooks.before_release_kv_cache),
        (
            "sglang.srt.managers.scheduler_components.weight_updater."
            "SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
            "after",
            hooks.after_weight_update,
        ),
    ]


def hook_targets() -> list[str]:
    """Return the functions of SGLang that must be hooked."""
    return [target for target, _, _ in _hook_table()]


def check_hooks(*, allow_untested: bool) -> sglang.Features:
    """Raise unless every hook is in place and SGLang is of a version that was tested.

    Raises:
        UnsupportedError: SGLang did not apply some of them, and the message names them; or its
            version is unknown.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(hook_targets()) - HookRegistry._patched)
    if missing:
        raise UnsupportedError(
            f"enable_blend: SGLang did not apply the hook on {', '.join(missing)}; "
            "this version is not supported, or another plugin is in the way"
        )
    return sglang.check_version(allow_untested=allow_untested)


# --- settings -----------------------------------------------------------------------------------


def _after_add_cli_args(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    add_flags(parser)


def _after_from_cli_args(result: Any, cls: type[Any], args: Any, *rest: Any, **kwargs: Any) -> None:
    try:
        config = BlendConfig.from_settings(settings_from_flags(args))
        if not config.enable_blend:
            config = BlendConfig.from_env()
        config = config.with_profile()
    except ConfigError as err:
        raise SystemExit(f"error: {err}") from None
    config.attach(result)


def make_server_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SGLang's ServerArgs so that Engine takes our keyword arguments too."""
    names = [field.name for field in msgspec.structs.fields(BlendConfig)]

    def server_args(**kwargs: Any) -> Any:
        settings = {name: kwargs.pop(name) for name in names if name in kwargs}
        config = BlendConfig.from_settings(settings) if settings else BlendConfig.from_env()
        config = config.with_profile()
        if config.enable_blend:
            check_hooks(allow_untested=config.blend_allow_untested)
        made = stock(**kwargs)
        config.attach(made)
        return made

    return server_args


def _after_check_server_args(result: None, server_args: Any, *args: Any, **kwargs: Any) -> None:
    config = BlendConfig.of(server_args)
    if config.enable_blend:
        check_hooks(allow_untested=config.blend_allow_untested)
        check_server_args(server_args)
        check_preferred(server_args.preferred_sampling_params, config)


# --- the tokenizer process ----------------------------------------------------------------------


def _after_create_tokenized_object(tokenized: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    gate = _gate_of(manager)
    if gate is not None:
        gate.check(tokenized)


def _after_get_echo_text(
    text: str, serving: Any, request: Any, *args: Any, **kwargs: Any
) -> str | None:
    gate = _gate_of(serving.tokenizer_manager)
    return None if gate is None else gate.without_separators(text, request.custom_params)


def _after_prepare_echo_prompts(
    texts: list[str], serving: Any, request: Any, *args: Any, **kwargs: Any
) -> list[str] | None:
    gate = _gate_of(serving.tokenizer_manager)
    if gate is None:
        return None
    return [gate.without_separators(text, request.custom_params) for text in texts]


def _gate_of(manager: Any) -> RequestGate | None:
    try:
        gate: RequestGate | None = getattr(manager, _GATE)
    except AttributeError:
        gate = _make_gate(manager)
        setattr(manager, _GATE, gate)
    return gate


def _make_gate(manager: Any) -> RequestGate | None:
    config = BlendConfig.of(manager.server_args)
    if not config.enable_blend:
        return None
    return RequestGate(
        config,
        find_separator(manager.tokenizer, config.blend_separator),
        vocab_size=manager.model_config.vocab_size,
        num_replicas=manager.server_args.dp_size,
    )


# --- the scheduler process ----------------------------------------------------------------------


def _after_scheduler_init(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    config = BlendConfig.of(scheduler.server_args)
    if not config.enable_blend:
        return
    found = check_hooks(allow_untested=config.blend_allow_untested)
    hooks.attach_runtime(_compose(config, scheduler), scheduler)
    log = logger.info if found.version in sglang.TESTED_VERSIONS else logger.warning
    log("sgl-blend: probed %s", found)


def _compose(config: BlendConfig, scheduler: Any) -> BlendRuntime:
    """Check the loaded model and put the parts together.

    Raises:
        BlendError: The model, its KV pool or the separator cannot serve blending.
    """
    check_server_args(scheduler.server_args)  # once more: a front end of its own may skip the first
    runner = scheduler.tp_worker.model_runner
    check_model(runner.model)
    check_runner(runner, config.blend_check_layer)
    layers = decoder_layers(runner.model)
    check_layers(layers)
    rotation = read_rotation(layers)
    errors = rotation_errors(rotation, runner.dtype, runner.model_config.context_len)
    if not config.blend_eval:  # an evaluation is to see how wrong it is
        check_rotation(errors, runner.dtype)
    model_architecture = architecture(runner.model_config.hf_config.to_dict())
    quality = _quality(config, model_architecture)
    separator = find_separator(scheduler.tokenizer, config.blend_separator)
    if (warning := seam_warning(scheduler.tokenizer, separator)) is not None:
        logger.warning("sgl-blend: %s", warning)
    tree = scheduler.tree_cache
    store = ChunkStore(tree, scheduler.page_size)
    tp_group = TPGroup(sglang.rank_group())
    model = LoadedModel(_model_fingerprint(scheduler), config, tp_group, quality=quality)
    split = LayerSplit(config.blend_check_layer, len(layers))
    pools = layer_pools(runner)
    heads = layers[-1].self_attn.attn.tp_q_head_num
    kernel = choose_kernel(config.blend_attention, pools, heads, runner.dtype, tp_group)
    fusor = Fusor(runner, rotation, split, pools, kernel, tp_group)
    run_trial(fusor, scheduler, config)
    cost_model = None
    if config.blend_when == "faster" and config.blend_on_miss != "build":
        cost_model = CostModel(
            measure(runner, layers[-1], pools, kernel, rotation, tp_group), split
        )
    shares = FairShare(store, scheduler.max_total_num_tokens)
    build_first = config.blend_on_miss == "build"
    builder = ChunkBuilder(scheduler, store, shares, tp_group, build_first=build_first)
    canary = _make_canary(config, scheduler, store, builder, tp_group)
    runtime = BlendRuntime(
        intake=Intake(
            config,
            model,
            separator_id=None if separator is None else separator.token_id,
            bos_token_id=_bos_token_id(scheduler),
            canary=canary,
        ),
        admission=Admission(
            store,
            builder,
            shares,
            cost_model=cost_model,
            layers=split,
            refund_limit=_batch_budget(scheduler) if config.blend_refund_budget else 0,
            build_first=build_first,
            model=model,
        ),
        builder=builder,
        canary=canary,
        model=model,
        fusor=fusor,
        metrics=BlendMetrics(**_publishing(scheduler, tp_group)),
        shares=shares,
        scheduler=scheduler,
        description={
            **_describe(config, separator),
            "architecture": model_architecture,
            "attention": kernel.name,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "least_rows": None
            if cost_model is None
            else cost_model.least_rows(config.blend_recompute_ratio),
            "rotation_errors": {str(delta): error for delta, error in errors.items()},
        },
    )
    logger.info(
        "sgl-blend: on with %d hooks, %s, separator %r",
        len(_hook_table()),
        config,
        None if separator is None else separator.text,
    )
    logger.info("sgl-blend: quality %s", quality)
    return runtime


def _quality(config: BlendConfig, model_architecture: str) -> str:
    """Check the profile against the model, and say by what the model's answers were judged.

    Raises:
        ConfigError: The profile is another model's.
    """
    profile = None
    if config.blend_profile is not None:
        profile = load_profile(config.blend_profile)
        check_architecture(profile, config.blend_profile, model_architecture)
    return quality_of(profile, msgspec.to_builtins(config))


def _make_canary(
    config: BlendConfig,
    scheduler: Any,
    store: ChunkStore,
    builder: ChunkBuilder,
    tp_group: TPGroup,
) -> Canary | None:
    if config.blend_canary_rate == 0:
        return None
    return Canary(
        scheduler,
        store,
        builder,
        CanaryMetrics(**_publishing(scheduler, tp_group)),
        tp_group,
        rate=config.blend_canary_rate,
        max_kl=config.blend_canary_max_kl,
    )


def _publishing(scheduler: Any, tp_group: TPGroup) -> dict[str, Any]:
    """Return where figures go: to Prometheus too, if the server publishes its own."""
    args = scheduler.server_args
    return {
        "publish": bool(args.enable_metrics) and tp_group.is_first,
        "labels": {"model_name": str(args.served_model_name)},
    }


def _describe(config: BlendConfig, separator: Separator | None) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(config),
        "separator": None if separator is None else separator.text,
        "separator_id": None if separator is None else separator.token_id,
    }


def _batch_budget(scheduler: Any) -> int:
    """Return how many tokens SGLang prefills in one batch."""
    chunked: int | None = scheduler.chunked_prefill_size
    return int(scheduler.max_prefill_tokens if chunked is None else chunked)


def _bos_token_id(scheduler: Any) -> int | None:
    bos: int | None = getattr(scheduler.model_config.hf_config, "bos_token_id", None)
    return bos


def _model_fingerprint(scheduler: Any) -> ModelFingerprint:
    """Digest what decides the meaning of KV bytes: weights' origin, architecture and dtypes."""
    config = scheduler.model_config
    args = scheduler.server_args
    return fingerprint(
        "\n".join(
            str(part)
            for part in (
                args.model_path,
                args.revision,
                args.load_format,
                args.quantization,
                config.dtype,
                scheduler.tp_worker.model_runner.kv_cache_dtype,
                config.hf_config.to_json_string(use_diff=False),
            )
        )
    )

"""The plugin: which hook goes where, and the ways to ask for blending.

SGLang logs and swallows whatever goes wrong while it loads plugins and applies their hooks. A server
asked to blend would then serve unblended and nobody would know. So every way to ask for blending
first checks that all hooks are in place, and where even that check could not be installed the flags
and keyword arguments do not exist and SGLang refuses them itself.
"""

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from sgl_blend.compose import compose
from sgl_blend.engine.adapters import give_back_aborted, give_back_failed
from sgl_blend.engine.compatibility import check_configuration, check_server_args
from sgl_blend.engine.facts import (
    current_settings,
    load_tokenizer,
    num_replicas,
    preferred_sampling,
    settings_of,
    tokenizer_of,
    vocab_size_of,
)
from sgl_blend.engine.hook_points import (
    check_hooks,
    hook_targets,
    register_hooks,
    wrap_engine_settings,
)
from sgl_blend.engine.objects import (
    Aborted,
    Answers,
    Completions,
    HiCacheController,
    HostPool,
    Received,
    Scheduler,
    ServerArgs,
    Stock,
    StorageConfig,
    TokenizerManager,
)
from sgl_blend.engine.requests import echo_params, manager_of, mend_returned_prompts
from sgl_blend.engine.versions import TESTED_VERSIONS
from sgl_blend.errors import BlendError, ConfigError, UnsupportedError
from sgl_blend.protocol.gate import RequestGate, check_preferred
from sgl_blend.protocol.separator import find_separator
from sgl_blend.scheduler import hooks
from sgl_blend.settings.config import FORMER_NAMES, BlendConfig, add_flags, settings_from_flags
from sgl_blend.storage.codec.levels import read_levels

logger = logging.getLogger(__name__)

_GATE = "_sgl_blend_gate"
_FROM_FLAGS = "_sgl_blend_from_flags"
"""On server arguments that a command line made: who reads it wants a sentence, not a traceback."""


def register() -> None:
    """Register all hooks; SGLang's entry point group ``sglang.srt.plugins`` calls this."""
    register_hooks(
        {
            "flags": _after_flags,
            "flag values": _after_flag_values,
            "settings": _after_settings,
            "tokenized": _after_tokenized,
            "answers": _before_answers,
            "failed requests": _before_failed_requests,
            "aborted request": _before_aborted_request,
            "echoed text": _after_echoed_text,
            "echoed prompts": _after_echoed_prompts,
            "scheduler": _around_scheduler_init,
            "tree settings": hooks.after_tree_settings,
            "arrival": hooks.around_handle_generate_request,
            "request": hooks.after_req_init,
            "round": hooks.around_get_new_batch_prefill,
            "admission": hooks.around_add_one_req,
            "preemption": hooks.around_preempt_to_schedule,
            "next step": hooks.around_add_chunked_req,
            "forward": hooks.around_forward_raw,
            "result": hooks.after_process_batch_result,
            "release": hooks.before_release_kv_cache,
            "orders": hooks.around_process_input_requests,
            "flush": hooks.around_flush_cache,
            "new weights": hooks.after_weight_update,
            "storage backend": _around_create_backend,
            "attached storage": _after_attach_storage,
            "state": hooks.after_get_internal_state,
            "storing": hooks.around_insert,
            "eviction": hooks.around_evict,
            "reset": hooks.before_reset,
            "prefetch": hooks.around_prefetch,
            "progress": hooks.around_prefetch_progress,
            "write to storage": hooks.around_write_to_storage,
        }
    )
    wrap_engine_settings(make_server_args)


# --- settings -----------------------------------------------------------------------------------


def _after_flags(
    result: object, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any
) -> None:
    add_flags(parser)


def _after_flag_values(
    result: ServerArgs, cls: type, args: argparse.Namespace, *rest: Any, **kwargs: Any
) -> None:
    try:
        config = BlendConfig.resolve(settings_from_flags(args))
        if not config.enable_blend:
            config = BlendConfig.from_env()
    except ConfigError as err:
        raise SystemExit(f"error: {err}") from None
    config.attach(result)
    setattr(result, _FROM_FLAGS, True)


def make_server_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SGLang's ServerArgs so that Engine takes our keyword arguments too."""
    names = [*(field.name for field in msgspec.structs.fields(BlendConfig)), *FORMER_NAMES]

    def server_args(**kwargs: Any) -> Any:
        settings = {name: kwargs.pop(name) for name in names if name in kwargs}
        config = BlendConfig.resolve(settings) if settings else BlendConfig.from_env()
        if config.enable_blend:
            check_hooks(allow_untested=config.blend_allow_untested)
        made = stock(**kwargs)
        config.attach(made)
        return made

    return server_args


def _after_settings(result: None, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    config = BlendConfig.of(server_args)
    if not config.enable_blend:
        return
    try:
        check_hooks(allow_untested=config.blend_allow_untested)
        check_server_args(server_args)
        check_configuration(server_args, config.blend_check_layer)
        check_preferred(preferred_sampling(server_args), config)
        _check_what_is_named(config, server_args)
    except BlendError as err:
        if getattr(server_args, _FROM_FLAGS, False):
            raise SystemExit(f"error: {err}") from None
        raise


def _check_what_is_named(config: BlendConfig, server_args: ServerArgs) -> None:
    """Refuse a separator and files that cannot be used before a model is loaded for minutes."""
    if config.blend_store_key_file is not None:
        _read_key(config.blend_store_key_file)
    if config.blend_store_profile is not None:
        read_levels(config.blend_store_profile, config.store_levels, may_be_blank=config.blend_eval)
    if config.blend_separator is not None:
        try:
            tokenizer = load_tokenizer(server_args)
        except (OSError, ValueError):
            return  # SGLang says itself what is wrong with it
        find_separator(tokenizer, config.blend_separator)


# --- the tokenizer process ----------------------------------------------------------------------


def _after_tokenized(
    received: Received, manager: TokenizerManager, *args: Any, **kwargs: Any
) -> None:
    gate = _gate_of(manager)
    if gate is not None:
        gate.check(received)


def _before_failed_requests(
    manager: TokenizerManager, rids: Iterable[str], *args: Any, **kwargs: Any
) -> None:
    if _gate_of(manager) is not None:
        give_back_failed(manager, rids)


def _before_aborted_request(
    manager: TokenizerManager, abort: Aborted, *args: Any, **kwargs: Any
) -> None:
    if _gate_of(manager) is not None:
        give_back_aborted(manager, abort)


def _before_answers(manager: TokenizerManager, answers: Answers, *args: Any, **kwargs: Any) -> None:
    gate = _gate_of(manager)
    if gate is not None:
        mend_returned_prompts(manager, answers, gate.without_separator_ids)


def _after_echoed_text(
    text: str, serving: Completions, request: object, *args: Any, **kwargs: Any
) -> str | None:
    gate = _gate_of(manager_of(serving))
    return None if gate is None else gate.without_separators(text, echo_params(request))


def _after_echoed_prompts(
    texts: list[str], serving: Completions, request: object, *args: Any, **kwargs: Any
) -> list[str] | None:
    gate = _gate_of(manager_of(serving))
    if gate is None:
        return None
    return [gate.without_separators(text, echo_params(request)) for text in texts]


def _gate_of(manager: TokenizerManager) -> RequestGate | None:
    try:
        gate: RequestGate | None = getattr(manager, _GATE)
    except AttributeError:
        gate = _make_gate(manager)
        setattr(manager, _GATE, gate)
    return gate


def _make_gate(manager: TokenizerManager) -> RequestGate | None:
    args = settings_of(manager)
    config = BlendConfig.of(args)
    if not config.enable_blend:
        return None
    return RequestGate(
        config,
        find_separator(tokenizer_of(manager), config.blend_separator),
        vocab_size=vocab_size_of(manager),
        num_replicas=num_replicas(args),
    )


# --- the scheduler process ----------------------------------------------------------------------


def _around_scheduler_init(
    orig: Stock, scheduler: Scheduler, server_args: ServerArgs, *args: Any, **kwargs: Any
) -> None:
    config = BlendConfig.of(server_args)
    if not config.enable_blend:
        orig(scheduler, server_args, *args, **kwargs)
        return
    with hooks.trees_rank():
        orig(scheduler, server_args, *args, **kwargs)
    found = check_hooks(allow_untested=config.blend_allow_untested)
    hooks.attach_runtime(compose(config, scheduler), scheduler)
    logger.info("sgl-blend: on with %d hooks, %s", len(hook_targets()), config)
    log = logger.info if found.version in TESTED_VERSIONS else logger.warning
    log("sgl-blend: probed %s", found)


def _around_create_backend(
    orig: Stock,
    factory: type,
    backend: str,
    storage_config: StorageConfig,
    pool: HostPool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    config = BlendConfig.of(current_settings())
    if not config.enable_blend:
        return orig(factory, backend, storage_config, pool, *args, **kwargs)
    with _packages_of_storage():
        from sgl_blend.engine.storage import make_storage
    path = config.blend_store_key_file
    return make_storage(
        lambda *inner: orig(factory, *inner, *args, **kwargs),
        backend,
        storage_config,
        pool,
        key=None if path is None else _read_key(path),
        unchecked=config.blend_store_unchecked,
    )


def _after_attach_storage(
    result: object, controller: HiCacheController, *args: Any, **kwargs: Any
) -> None:
    if BlendConfig.of(current_settings()).enable_blend:
        from sgl_blend.engine.storage import use_host_pool

        use_host_pool(controller)


def _read_key(path: str) -> Any:
    with _packages_of_storage():
        import cryptography  # noqa: F401 - encrypts pages

        from sgl_blend.storage.names import read_key_file
    return read_key_file(path)


@contextmanager
def _packages_of_storage() -> Iterator[None]:
    """Say which packages are missing; only servers that store KV need them."""
    try:
        yield
    except ImportError as err:
        raise UnsupportedError(
            f"--hicache-storage-backend: {err}; run pip install 'sgl-blend[storage]'"
        ) from err

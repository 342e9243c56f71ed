"""The functions of SGLang that are hooked, by names of ours, and whether the hooks are in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_blend.engine.adapters import abort_targets, failure_targets
from sgl_blend.engine.prefetch import prefetch_targets, progress_targets, write_targets
from sgl_blend.engine.storage import attach_targets
from sgl_blend.engine.tree_branch import eviction_targets, insert_targets, reset_targets
from sgl_blend.engine.versions import Features, check_version
from sgl_blend.errors import UnsupportedError

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_ARGS = "sglang.srt.server_args.ServerArgs"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_COMPLETIONS = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"

Hook = Callable[..., Any]


def hook_points() -> dict[str, list[tuple[str, str]]]:
    """Return per name the functions of SGLang, each with when a hook runs: before, after or around."""
    points = {
        "flags": (f"{_ARGS}.add_cli_args", "after"),
        "flag values": (f"{_ARGS}.from_cli_args", "after"),
        "settings": (f"{_ARGS}.check_server_args", "after"),
        "tokenized": (f"{_TOKENIZER}._create_tokenized_object", "after"),
        "answers": (f"{_TOKENIZER}._handle_batch_output", "before"),
        "echoed text": (f"{_COMPLETIONS}._get_echo_text", "after"),
        "echoed prompts": (f"{_COMPLETIONS}._prepare_echo_prompts", "after"),
        "scheduler": (f"{_SCHEDULER}.__init__", "around"),
        "tree settings": (
            "sglang.srt.mem_cache.cache_init_params.CacheInitParams.__init__",
            "after",
        ),
        "arrival": (f"{_SCHEDULER}.handle_generate_request", "around"),
        "request": ("sglang.srt.managers.schedule_batch.Req.__init__", "after"),
        "round": (f"{_SCHEDULER}.get_new_batch_prefill", "around"),
        "admission": (f"{_ADDER}.add_one_req", "around"),
        "preemption": (f"{_ADDER}.preempt_to_schedule", "around"),
        "next step": (f"{_ADDER}.add_chunked_req", "around"),
        "forward": ("sglang.srt.model_executor.model_runner.ModelRunner._forward_raw", "around"),
        "result": (f"{_SCHEDULER}.process_batch_result", "after"),
        "release": ("sglang.srt.mem_cache.common.release_kv_cache", "before"),
        "orders": (f"{_SCHEDULER}.process_input_requests", "around"),
        "flush": (f"{_SCHEDULER}.flush_cache", "around"),
        "new weights": (
            "sglang.srt.managers.scheduler_components.weight_updater."
            "SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
            "after",
        ),
        "storage backend": (
            "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
            "around",
        ),
        "state": (f"{_SCHEDULER}.get_internal_state", "after"),
    }
    return {
        **{name: [point] for name, point in points.items()},
        "attached storage": [(target, "after") for target in attach_targets()],
        "failed requests": [(target, "before") for target in failure_targets()],
        "aborted request": [(target, "before") for target in abort_targets()],
        "storing": [(target, "around") for target in insert_targets()],
        "eviction": [(target, "around") for target in eviction_targets()],
        "reset": [(target, "before") for target in reset_targets()],
        "prefetch": [(target, "around") for target in prefetch_targets()],
        "progress": [(target, "around") for target in progress_targets()],
        "write to storage": [(target, "around") for target in write_targets()],
    }


def hook_targets() -> list[str]:
    """Return the functions of SGLang that must be hooked."""
    return [target for points in hook_points().values() for target, _ in points]


def register_hooks(hooks: Mapping[str, Hook]) -> None:
    """Register a hook for every name of hook_points."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    points = hook_points()
    assert hooks.keys() == points.keys(), hooks.keys() ^ points.keys()
    for name, hook in hooks.items():
        for target, kind in points[name]:
            HookRegistry.register(target, hook, HookType(kind))


def wrap_engine_settings(wrap: Callable[[Hook], Hook]) -> None:
    """Wrap what makes the settings of SGLang's Engine out of keyword arguments."""
    from sglang.srt.entrypoints.engine import Engine

    Engine.server_args_class = staticmethod(wrap(Engine.server_args_class))


def check_hooks(*, allow_untested: bool) -> Features:
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
    return check_version(allow_untested=allow_untested)

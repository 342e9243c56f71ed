"""What a loaded server is made of, read once where the plugin is put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_blend.engine.objects import (
    ModelRunner,
    Scheduler,
    ServerArgs,
    TokenizerManager,
    Tree,
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of one scheduler that never change.

    Attributes:
        args: The server's settings.
        tree: Its radix tree.
        runner: Its model runner.
        tokenizer: The model's tokenizer, of transformers; None if the server has none.
        page_size: Tokens of a page of the tree.
        capacity: Tokens of the KV pool.
        most_requests: That run at the same time.
        bos_token_id: What prompts of the model begin with; None if with nothing.
        architecture: The model's configuration, as a dict.
        dtypes: A text that differs where the same architecture and weights give KV other bytes.
        publishes: Whether the server publishes Prometheus metrics.
        model_name: Name of the model in them.
    """

    args: ServerArgs
    tree: Tree
    runner: ModelRunner
    tokenizer: Any
    page_size: int
    capacity: int
    most_requests: int
    bos_token_id: int | None
    architecture: dict[str, Any]
    dtypes: str
    publishes: bool
    model_name: str


def read_facts(scheduler: Scheduler) -> ServerFacts:
    """Read a scheduler whose model is loaded."""
    args, config = scheduler.server_args, scheduler.model_config
    runner: ModelRunner = scheduler.tp_worker.model_runner
    parts = (args.quantization, config.dtype, runner.kv_cache_dtype)
    return ServerFacts(
        args=args,
        tree=scheduler.tree_cache,
        runner=runner,
        tokenizer=scheduler.tokenizer,
        page_size=scheduler.page_size,
        capacity=scheduler.max_total_num_tokens,
        most_requests=scheduler.max_running_requests,
        bos_token_id=getattr(config.hf_text_config, "bos_token_id", None),
        architecture=runner.model_config.hf_config.to_dict(),
        dtypes=" ".join(str(part) for part in parts),
        publishes=bool(args.enable_metrics),
        model_name=str(args.served_model_name or args.model_path),
    )


def settings_of(owner: Scheduler | TokenizerManager) -> ServerArgs:
    """Return the settings of the server that a scheduler or a tokenizer process belongs to."""
    return owner.server_args


def current_settings() -> ServerArgs:
    """Return the settings of the server that this process belongs to."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # 0.5.17
        from sglang.srt.server_args import get_global_server_args as get_server_args
    args: ServerArgs = get_server_args()
    return args


def preferred_sampling(args: ServerArgs) -> object:
    """Return what --preferred-sampling-params adds to every request, parsed or as JSON."""
    preferred: object = args.preferred_sampling_params
    return preferred


def load_tokenizer(args: ServerArgs) -> Any:
    """Load the tokenizer of a server that is about to start, of transformers; None if it has none.

    Raises:
        OSError, ValueError: It cannot be loaded; SGLang will say so itself.
    """
    if args.skip_tokenizer_init:
        return None
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        args.tokenizer_path or args.model_path,
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
    )


def num_replicas(args: ServerArgs) -> int:
    """Return how many data-parallel schedulers a server has."""
    return args.dp_size


def tokenizer_of(manager: TokenizerManager) -> Any:
    """Return the tokenizer of a tokenizer process, of transformers; None if it has none."""
    return manager.tokenizer


def vocab_size_of(manager: TokenizerManager) -> int:
    """Return how many token ids a tokenizer process's model has."""
    return int(manager.model_config.vocab_size)

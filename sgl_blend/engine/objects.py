"""The objects of SGLang that cross the wall, and what this folder touches of them.

Outside of `engine/` they are handles: they are kept, compared by identity and handed back, and no
attribute of theirs is named. tests/test_engine_wall.py holds that. A class here is what SGLang's class
of the same name is to us, in every supported version.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any, NewType, Protocol

import torch

Verdict = NewType("Verdict", object)
"""SGLang's AddReqResult: what its scheduler does after it tried to admit a request."""

Handle = NewType("Handle", object)
"""How a radix tree names a node: a Python object or a number, by its kind."""


class Tree(Protocol):
    """The radix tree of one scheduler, of any kind that SGLang has."""

    token_to_kv_pool_allocator: Any
    path_device_indices: Callable[..., torch.Tensor]  # where a match names no slots
    is_eagle: bool
    match_prefix: Callable[..., Any]
    inc_lock_ref: Callable[..., Any]
    dec_lock_ref: Callable[..., Any]
    insert: Callable[..., Any]
    cache_controller: Any  # with a host tier
    load_back: Callable[..., Any]
    ready_to_load_host_cache: Callable[..., int]
    check_hicache_events: Callable[..., None]
    page_size: int
    tree_core: Any  # with storage, which 0.5.17 does not have; so are the following
    prefetch_threshold: int
    hicache_storage_pass_prefix_keys: bool
    storage_prefetch_retries: Any
    ongoing_backup: dict[int, Any]
    is_root: Callable[..., bool]
    is_backuped: Callable[..., bool]
    get_last_hash_value: Callable[..., str | None]
    get_prefix_hash_values: Callable[..., list[str]]
    prefetch_from_storage: Callable[..., Any]
    has_ongoing_prefetch: Callable[..., bool]
    ongoing_prefetch: dict[Any, Any]
    pop_prefetch_loaded_tokens: Callable[..., int]
    release_aborted_request: Callable[..., None]
    evictable_size: Callable[..., int]
    protected_size: Callable[..., int]


class TreeSettings(Protocol):
    """How a tree is to be made: SGLang's CacheInitParams."""

    eviction_policy: str


class InsertParams(Protocol):
    """What a tree is asked to store."""

    key: Any
    priority: int
    chunked: bool  # before 0.5.23
    inserted_len: int


class EvictParams(Protocol):
    """How much a tree is asked to evict."""

    num_tokens: int


class Req(Protocol):
    """A request in the scheduler."""

    rid: str
    origin_input_ids: array[int]
    cache_salt: str | None
    extra_key: str | None
    lora_id: str | None
    tokenizer: Any
    full_untruncated_fill_ids: array[int]
    sampling_params: Any
    cached_tokens: int
    customized_info: dict[str, Any] | None
    to_finish: Any
    finished_reason: Any
    finished_output: bool | None
    stream: bool
    time_stats: Any
    multimodal_inputs: Any
    input_embeds: Any
    positional_embed_overrides: Any
    multi_item_delimiter_indices: Any
    return_logprob: bool
    logprob_start_len: int
    prefix_indices: Any
    prefix_len: int
    extend_range: Any
    extend_end: int
    last_node: Any
    last_host_node: Any
    best_match_node: Any
    host_hit_length: int
    req_pool_idx: Any
    kv: Any
    finished: Callable[..., bool]
    init_next_round_input: Callable[..., None]


class Received(Protocol):
    """A TokenizedGenerateReqInput: a request on its way from the tokenizer process."""

    rid: str
    input_ids: array[int] | None
    extra_key: str | None
    sampling_params: Any
    session_params: Any
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Any
    mm_inputs: Any


class RequestHandle(Protocol):
    """What the tree knows a request by, since 0.5.21."""

    rid: str


class ScheduleBatch(Protocol):
    """The requests of one forward, as the scheduler keeps them."""

    reqs: list[Req]
    forward_mode: Any
    batch_is_full: bool
    is_empty: Callable[..., bool]
    filter_batch: Callable[..., None]


class PrefillAdder(Protocol):
    """Puts the prefill batch of one scheduling round together."""

    tree_cache: Tree
    can_run_list: list[Req]
    preempt_list: list[Req]
    running_batch: ScheduleBatch | None
    new_chunked_req: Any
    rem_input_tokens: int
    rem_chunk_tokens: int | None
    rem_total_tokens: int
    cur_rem_tokens: int
    chunked_req_limit: int | None  # since 0.5.21
    page_size: int
    budget_state: Callable[..., Verdict]


class ForwardBatch(Protocol):
    """The tensors of one forward."""

    rids: list[str]
    forward_mode: Any
    split_index: int
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    extend_num_tokens: int
    extend_seq_lens: torch.Tensor
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_start_loc: torch.Tensor
    extend_logprob_start_lens_cpu: list[int] | None
    input_embeds: Any
    replace_embeds: Any
    mm_inputs: list[Any] | None
    hidden_states: torch.Tensor
    residual: Any  # a tensor after the first layer
    residual_stream: Any  # since 0.5.21


class ModelOutput(Protocol):
    """A ModelRunnerOutput: the logits of one forward."""

    logits_output: Any
    can_run_graph: bool


class ModelRunner(Protocol):
    """The model on one rank, with its KV pool."""

    model: Any
    model_config: Any
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    token_to_kv_pool: Any
    req_to_token_pool: Any
    attn_backend: Any
    sliding_window_size: Any
    page_size: int
    _prepare_eager_forward_batch: Callable[..., None]
    forward_split_prefill: Callable[..., Any]


class AttentionBackend(Protocol):
    """The server's own way to attend."""

    token_to_kv_pool: Any
    req_to_token_pool: Any
    forward: Callable[..., torch.Tensor]


class AttentionLayer(Protocol):
    """A RadixAttention: what attention must know of one layer."""

    layer_id: int
    tp_q_head_num: int
    qk_head_dim: int
    scaling: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_scale_float: float | None
    v_scale_float: float | None


class DecoderLayer(Protocol):
    """One layer of a model."""

    self_attn: Any
    post_attention_layernorm: torch.nn.Module
    children: Callable[[], Iterator[torch.nn.Module]]
    modules: Callable[[], Iterator[torch.nn.Module]]


class ServerArgs(Protocol):
    """The settings of a server."""

    model_path: str
    tokenizer_path: str | None
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    revision: str | None
    quantization: Any
    enable_metrics: bool
    served_model_name: str
    preferred_sampling_params: Any
    dp_size: int


class TokenizerManager(Protocol):
    """The tokenizer process's side of a server."""

    server_args: ServerArgs
    model_config: Any
    tokenizer: Any
    rid_to_state: dict[str, Any]
    lora_registry: Any


class Aborted(Protocol):
    """What the scheduler says of a request that it dropped from its queue."""

    rid: str


class Answers(Protocol):
    """What the scheduler sends back to the tokenizer process: a step of some requests."""

    rids: list[str]


class Completions(Protocol):
    """What serves /v1/completions."""

    tokenizer_manager: TokenizerManager


class Scheduler(Protocol):
    """The scheduler of one rank."""

    server_args: ServerArgs
    model_config: Any
    tokenizer: Any
    tp_worker: Any
    _engine_paused: bool
    tree_cache: Tree
    token_to_kv_pool_allocator: Any
    page_size: int
    max_total_num_tokens: int
    max_running_requests: int
    chunked_prefill_size: int | None
    is_mixed_chunk: bool
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool
    spec_algorithm: Any
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    last_batch: ScheduleBatch | None
    chunked_req: Req | None
    flush_wrapper: Any
    weight_updater: Any
    _prefill_decode_interval_remaining: int  # since 0.5.21
    process_batch_result: Callable[..., None]
    get_num_allocatable_reqs: Callable[..., int]
    _add_request_to_queue: Callable[..., None]


Stock = Callable[..., Any]
"""A function of SGLang that a hook stands around."""

Call = tuple[Sequence[Any], dict[str, Any]]
"""Arguments of a call of SGLang's that go on as they came."""


class StorageConfig(Protocol):
    """What a storage backend is told of its server: SGLang's HiCacheStorageConfig."""

    tp_rank: int
    tp_size: int


class PrefetchOperation(Protocol):
    """Pages on their way from storage."""

    is_terminated: Callable[[], bool]


class HiCacheController(Protocol):
    """Moves KV between device, host and storage."""

    storage_backend: Any
    storage_stop_event: Event
    page_get_func: Callable[..., int]
    page_set_func: Callable[..., bool]
    _page_set_zero_copy: Callable[..., bool]


class HostPool(Protocol):
    """KV in host memory: SGLang's HostKVCache."""

    kv_buffer: torch.Tensor

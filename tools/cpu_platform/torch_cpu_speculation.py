"""n-gram speculation on a plain CPU: what SGLang calls from ``sgl_kernel`` or Triton, in torch.

SGLang drafts from a tree of what requests said before, and the model verifies a draft in one forward.
Its tree is C++ and runs anywhere. Five functions around it exist for accelerators and for AMX alone.
Sampling with a temperature is verified greedily, as on SGLang's own CPU engine.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def register() -> None:
    """Have SGLang's n-gram worker use this; its entry point group ``sglang.srt.plugins`` calls it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", _before_worker),
        ("sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu", _overlap),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _before_worker(orig: Callable[..., Any], algorithm: Any, *args: Any, **kwargs: Any) -> Any:
    if algorithm.is_ngram() and _is_ours():
        _serve_ngram()
    return orig(algorithm, *args, **kwargs)


def _overlap(orig: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Leave the overlap schedule on: its streams do nothing on a CPU, its order is a GPU's."""
    return None if _is_ours() else orig(*args, **kwargs)


def _is_ours() -> bool:
    from sglang.srt.platforms import current_platform

    return (
        getattr(current_platform, "device_name", None) == "cpu"
        and current_platform.is_out_of_tree()
    )


def _serve_ngram() -> None:
    kernels = ModuleType("sgl_kernel.speculative")
    vars(kernels)["reconstruct_indices_from_tree_mask"] = tree_of_mask
    # Only while the worker is imported: whoever asks for sgl_kernel later must not find one.
    names = {"sgl_kernel": ModuleType("sgl_kernel"), "sgl_kernel.speculative": kernels}
    sys.modules.update(names)
    try:
        worker = import_module("sglang.srt.speculative.ngram_worker")
    finally:
        for name in names:
            del sys.modules[name]
    vars(worker)["reconstruct_indices_from_tree_mask_func"] = tree_of_mask  # SGLang 0.5.23
    for name in _MODULES:
        if find_spec(name) is not None:
            vars(import_module(name)).update(_FUNCTIONS, _is_cpu=True)
    # KV moves with torch, and no kernel of Triton's is warmed for it; the pool does not exist yet.
    environ = import_module("sglang.srt.environ")
    environ.envs.SGLANG_NATIVE_MOVE_KV_CACHE.set(True)
    pools = import_module("sglang.srt.mem_cache.memory_pool")
    pools.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
    _let_tree_compile()
    _verify_with_masks()


def _let_tree_compile() -> None:
    """Include what SGLang 0.5.17 forgets, and what its tree needs with recent compilers."""
    package = import_module("sglang").__path__[0]
    header = Path(package) / "kernels" / "jit" / "csrc" / "ngram_corpus" / "result.h"
    if header.is_file() and "<cstddef>" not in header.read_text():
        os.environ.setdefault("CXX", "c++ -include cstddef")


def tree_of_mask(
    mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    num_requests: int,
    num_drafts: int,
) -> None:
    """Fill positions and links of the drafts' trees.

    Args:
        mask: Bool, of num_requests trees, each [num_drafts, num_drafts]; [i, j] says that node j is an
            ancestor of node i, or that node.
        seq_lens: Tokens before the drafts, [num_requests].
        positions: Filled, [num_requests * num_drafts]; a node stands as much later as it is deep.
        index: Filled, [num_requests, num_drafts]; a node's place among all.
        next_token: Filled, same shape; a node's first child, or -1.
        next_sibling: Filled, same shape; the next child of a node's parent, or -1.
        num_requests: Requests.
        num_drafts: Nodes of each tree.
    """
    before = mask.view(num_requests, num_drafts, num_drafts).tril(-1)
    order = torch.arange(num_drafts)
    depth = before.sum(-1)
    positions.copy_((seq_lens[:, None] + depth).flatten())
    index.copy_(torch.arange(num_requests * num_drafts).view(num_requests, num_drafts))
    parents = torch.where(depth > 0, (before * order).amax(-1), -1).tolist()
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for request, parent_of in enumerate(parents):
        first_child: dict[int, int] = {}
        for node in reversed(range(1, num_drafts)):
            parent = parent_of[node]
            next_sibling[request, node] = first_child.get(parent, -1)
            first_child[parent] = node
        for parent, child in first_child.items():
            if parent >= 0:
                next_token[request, parent] = child


def accept_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow each tree from its root for as long as a child is the token that the model wants there.

    The names are those of SGLang's call. predicts, accept_index (-1 where nothing was accepted) and
    accept_token_num (without the root) are filled.
    """
    wanted = target_predict.tolist()
    for request, tokens in enumerate(candidates.tolist()):
        node, path = 0, [0]
        while node >= 0 and len(path) < accept_index.shape[1]:
            child = int(retrive_next_token[request, node])
            while child >= 0 and tokens[child] != wanted[request][node]:
                child = int(retrive_next_sibling[request, child])
            node = child
            if node >= 0:
                path.append(node)
        places = retrive_index[request, path]
        accept_index[request, : len(path)] = places.to(accept_index.dtype)
        predicts[places] = target_predict[request, path].to(predicts.dtype)
        accept_token_num[request] = len(path) - 1


def read_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of positions start..end of each request, one request after another."""
    rows = _rows_of_ranges(req_pool_indices, req_to_token, start_offset, end_offset)
    slots = torch.cat(rows)
    out_cache_loc[: len(slots)] = slots


def write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Give positions start..end of each request their slots, which follow one another."""
    rows = _rows_of_ranges(req_pool_indices, req_to_token, start_offset, end_offset)
    parts = torch.split(out_cache_loc, [len(row) for row in rows])
    for row, slots in zip(rows, parts, strict=True):
        row.copy_(slots)


def _rows_of_ranges(
    requests: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> list[torch.Tensor]:
    ranges = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    return [req_to_token[request, first:last] for request, first, last in ranges]


def slots_of_drafts(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Return the slots of each request's drafts, [batch_size * draft_token_num]."""
    slots = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    read_slots(
        req_pool_indices, req_to_token, start_offset, end_offset, slots, req_to_token.shape[1]
    )
    return slots


def slots_of_accepted(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Write the slots of accepted drafts, one after another, and leave the rest as it is."""
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


_MODULES = (
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.spec_utils",
    "sglang.srt.mem_cache.allocation",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.kernels.ops.speculative.spec_tree",
)
"""Modules of SGLang, in one version or another, that call ``sgl_kernel`` on a CPU."""

_FUNCTIONS: dict[str, Any] = {
    "sgl_verify_tree_greedy_cpu": accept_greedily,
    "assign_extend_cache_locs_cpu": read_slots,
    "assign_req_to_token_pool_cpu": write_slots,
    "fill_accept_out_cache_loc_cpu": slots_of_accepted,
}
"""What they call."""


def _verify_with_masks() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if not batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, batch, save_kv_cache)
        return _attend_to_trees(self, q, k, v, layer, batch)

    TorchNativeAttnBackend.forward_extend = forward_extend


def _attend_to_trees(
    backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any
) -> torch.Tensor:
    """Let each draft attend to all tokens before and to its ancestors."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, drafts = backend.token_to_kv_pool, batch.spec_info.draft_token_num
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    results, read = [], 0
    for request, (row, length) in enumerate(
        zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    ):
        seen = length + drafts
        mask = batch.spec_info.custom_mask[read : read + drafts * seen].view(drafts, seen)
        read += drafts * seen
        slots = backend.req_to_token_pool.req_to_token[row, :seen]
        mine = queries[request * drafts : (request + 1) * drafts]
        result = scaled_dot_product_attention(
            mine.movedim(0, 1)[None],
            keys[slots].movedim(0, 1)[None].to(mine.dtype),
            values[slots].movedim(0, 1)[None].to(mine.dtype),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        results.append(result[0].movedim(0, 1))
    return torch.cat(results).reshape(len(q), -1)

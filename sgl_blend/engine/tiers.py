"""HiCache: KV that left the device and waits in host memory, and its way back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sgl_blend.engine.objects import Handle, ModelRunner, PrefillAdder, Req, Tree
from sgl_blend.engine.requests import fill_ids, prefix_length
from sgl_blend.engine.tree import prefix_match, prefix_tokens, tree_key

_TRIAL_TOKENS = 4096
MIN_PAGE_TOKENS = 16
"""With a storage backend. Smaller pages are mostly header, and one call of the store each."""


def storage_keys_hold_namespaces() -> bool:
    """Tell whether SGLang's hash of a page stands for the tenant too, as from 0.5.21 on."""
    from sglang.srt.mem_cache import utils

    return hasattr(utils, "get_storage_hash_str")


@dataclass(frozen=True, slots=True)
class HostMatch:
    """The stored part of a path, its end in host memory.

    Attributes:
        node: The tree's handle of the last node.
        device_tokens: Tokens from the beginning that are on the device.
        host_tokens: Tokens after them that are in host memory alone.
    """

    node: Handle
    device_tokens: int
    host_tokens: int


def has_host_tier(tree: Tree) -> bool:
    """Tell whether what a tree evicts goes to host memory."""
    return getattr(tree, "cache_controller", None) is not None


def free_host_tokens(tree: Tree) -> int:
    """Return how many tokens host memory has room for beside what it holds."""
    return int(tree.cache_controller.mem_pool_host.available_size())


def holds_on_host(tree: Tree) -> bool:
    """Tell whether anything is stored in host memory."""
    pool = tree.cache_controller.mem_pool_host
    return bool(pool.available_size() < pool.size)


def match_host(
    tree: Tree, token_ids: array[int], *, salt: str | None, extra_key: str | None
) -> HostMatch:
    """Find the longest prefix of token_ids on the device or in host memory; it counts as used."""
    result = prefix_match(tree, tree_key(token_ids, salt=salt, extra_key=extra_key))
    return HostMatch(result.best_match_node, prefix_tokens(result), result.host_hit_length)


def load_back(tree: Tree, found: HostMatch) -> bool:
    """Bring KV back to the device before the next forward; return whether there was room.

    The tree names its new slots from now on. The copy begins with the next batch of a prefill, and
    each layer of that forward waits for its own part. Until then the KV is locked.
    """
    if found.host_tokens == 0:
        return False
    loaded = tree.load_back(found.node)
    return loaded is not None and loaded is not False


def tokens_to_spare(adder: PrefillAdder, req: Req) -> int:
    """Return how many tokens the pool can take beside a request that is not admitted yet."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    needed = len(fill_ids(req)) - prefix_length(req) + adder.page_size
    to_come = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
    return int(min(adder.rem_total_tokens - to_come, adder.cur_rem_tokens)) - needed


def own_node(req: Req) -> Handle:
    """Return the node at which the stored prefix of a request ends."""
    return Handle(req.last_node)


def trial_loads(tree: Tree) -> list[tuple[int, float]]:
    """Load some pages of nothing from host memory, twice each; the pool must be unused.

    Returns:
        Bytes and seconds of each load: of one page, and of as many as tell the bandwidth.
    """
    controller = tree.cache_controller
    host_pool, allocator = controller.mem_pool_host, tree.token_to_kv_pool_allocator
    most = min(allocator.available_size(), host_pool.available_size()) // (2 * tree.page_size)
    found = []
    for pages in (1, max(2, min(most, _TRIAL_TOKENS // tree.page_size))) * 3:
        on_host = host_pool.alloc(pages * tree.page_size)
        begun = time.perf_counter()
        on_device = controller.load(host_indices=on_host)
        controller.start_loading()
        controller.ack_load_queue.pop().finish_event.synchronize()
        seconds = time.perf_counter() - begun
        found.append((len(on_host) * host_pool.size_per_token, seconds))
        host_pool.free(on_host)
        allocator.free(on_device)
    return found[2:]  # the first of each warmed up


def host_token_bytes(tree: Tree) -> int:
    """Return the bytes of KV of one token in all layers, on this rank."""
    return int(tree.cache_controller.mem_pool_host.size_per_token)


def finished_loads(tree: Tree) -> Iterator[tuple[int, float]]:
    """Return bytes and seconds of loads that are over, and that the tree is about to hear of."""
    for load in tree.cache_controller.ack_load_queue:
        if getattr(load, "timing_enabled", False) and load.finish_event.query():
            seconds = load.start_event.elapsed_time(load.finish_event) / 1e3
            yield load.num_tokens * host_token_bytes(tree), seconds


def copies_in_flight(tree: Tree) -> bool:
    """Tell whether KV is being copied to host memory or from there; it is locked until then."""
    return bool(
        getattr(tree, "ongoing_write_through", None) or getattr(tree, "ongoing_load_back", None)
    )


def finish_loads(tree: Tree) -> None:
    """Bring back what waits for a batch, if anything does, and wait for it.

    For a round in which no batch came and nothing runs. What waits is locked, and could keep the very
    request out that it is for.
    """
    if not has_host_tier(tree) or not tree.cache_controller.load_queue:
        return
    index = tree.ready_to_load_host_cache()
    tree.cache_controller.layer_done_counter.events[index].finish_event.synchronize()


def finish_copies(tree: Tree) -> None:
    """Wait for all copies to host memory and from there, and let the tree see that they are over.

    SGLang takes no order while one is in flight. All ranks must come here together.
    """
    if not has_host_tier(tree):
        return
    finish_loads(tree)
    tree.check_hicache_events()  # begins what was only noted
    controller = tree.cache_controller
    for copy in (*controller.ack_write_queue, *controller.ack_load_queue):
        copy.finish_event.synchronize()
    tree.check_hicache_events()


class LayerLoads:
    """Loads that run beside a forward: layer after layer its KV comes into place.

    Args:
        counter: SGLang's LayerDoneCounter, which knows what the present forward reads.
    """

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    def wait(self, layer: int) -> None:
        """Let the current stream wait until a layer's KV is in place; on a CPU the caller waits."""
        self._counter.wait_until(layer)

    def wait_for_all(self) -> None:
        """Let the current stream wait until all KV is in place."""
        self._counter.wait_until(self._counter.num_layers - 1)


def loads_beside(runner: ModelRunner) -> LayerLoads | None:
    """Return the loads that the present forward must wait for; None if there are none."""
    counter = getattr(runner.token_to_kv_pool, "layer_transfer_counter", None)
    if counter is None or counter.consumer_index < 0:
        return None
    return LayerLoads(counter)

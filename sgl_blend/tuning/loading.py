"""How long a prefill takes that loads some of its chunks: the formulas of the loading controller.

Pure functions over measured times, after CacheBlend (arXiv 2405.16444 §5.1). A step of a prefill
computes U tokens and reuses N, of which n come over the host link (latency a, bandwidth B). With b
bytes of KV per token and layer, L layers, check layer c, recompute ratio r and t(x) seconds of one
layer for x rows:

    arrival of layer i    A_i = a + (i + 1) n b / B                  (0 if nothing is loaded)
    end of layer i        F_i = max(F_(i-1), [i >= c] (A_i + copy)) + t(rows_i)
    rows of layer i       N + U for i <= c, ceil(r N) + U above
    seconds of the step   s + F_(L-1), s for what no row adds to

The first chunk of a prompt may stand behind the very text that it was built after. Then its KV is
exact: it is brought, and no row of it is computed.

A store hands over whole chunks, one after the other. Blending is causal, so a step ends before each
chunk that is awaited: T = max(arrival of the chunk, end of the step before) + seconds of the step.
Where many short steps cost more than they hide, one step waits for all chunks.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from sgl_blend.tuning.links import LinkSpeed


class Place(StrEnum):
    """Where the KV of a chunk lies."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    TEXT = "text"
    """Nowhere: its tokens are computed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prompt.

    Attributes:
        num_tokens: At least 1.
        place: The nearest one that holds all of it.
        num_stored_bytes: That a store sends for it; 0 elsewhere.
        is_exact: Whether none of its tokens are recomputed, as for a prompt's exact prefix.
    """

    num_tokens: int
    place: Place
    num_stored_bytes: int = 0
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be prefilled after the exact prefix.

    Attributes:
        chunks: In the order of the prompt.
        num_plain: Tokens of no chunk, computed anyway; counted in the last step, as a question is.
    """

    chunks: tuple[Chunk, ...]
    num_plain: int


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """What a forward takes on this machine.

    Attributes:
        num_layers: L.
        check_layer: c; the layers up to it see every row, unless ``early_share`` is less.
        kv_bytes: b, KV of one token in one layer, in bytes.
        layer_s: t, seconds of one layer by its number of rows; never falls.
        copy_s: Seconds to copy and rotate one layer's KV, by its number of reused tokens.
        early_share: Share of the reused tokens that enter the first layer; below 1 for policies
            that trust a memory. Then every layer waits for its KV.
        step_s: s, seconds of a forward besides its layers, however few rows it has.
    """

    num_layers: int
    check_layer: int
    kv_bytes: int
    layer_s: Callable[[int], float]
    copy_s: Callable[[int], float] = lambda rows: 0.0
    early_share: float = 1.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Links:
    """How KV comes to the device.

    Attributes:
        host: From host memory to the device.
        storage: From the store to host memory, or None where there is none.
        storage_queue_s: Seconds until the store is done with what was asked of it before.
    """

    host: LinkSpeed
    storage: LinkSpeed | None = None
    storage_queue_s: float = 0.0


class Step(msgspec.Struct, frozen=True, gc=False):
    """A part of the prompt that is prefilled at once.

    Attributes:
        num_computed: U, tokens without stored KV.
        num_reused: N, tokens with stored KV.
        num_loaded: Those of them that come over the host link.
        start_s: The step cannot start before; 0 unless it awaits a chunk of the store.
    """

    num_computed: int
    num_reused: int = 0
    num_loaded: int = 0
    start_s: float = 0.0


def num_recomputed(ratio: float, num_reused: int) -> int:
    """Return ceil(ratio * num_reused), as the policies count it."""
    return min(num_reused, math.ceil(ratio * num_reused - 1e-9))


def step_seconds(step: Step, ratio: float, times: ModelTimes, host: LinkSpeed) -> float:
    """Return s + F_(L-1), the seconds of a step from the moment at which it may start.

    Arrivals and layers before and after the check layer are straight lines. So the layer that waits
    last is the first that waits at all, the check layer or the last one.
    """
    reused, computed = step.num_reused, step.num_computed
    if reused + computed == 0:
        return 0.0
    layers, check = times.num_layers, times.check_layer
    kept = num_recomputed(ratio, reused)
    drops_early = times.early_share < 1.0
    early = max(kept, num_recomputed(times.early_share, reused)) if drops_early else reused
    whole_s = times.layer_s(early + computed)
    above_s = times.layer_s(kept + computed)
    num_above = layers - 1 - check
    ended = (check + 1) * whole_s + num_above * above_s
    if reused == 0:
        return times.step_s + ended
    ready = times.copy_s(reused)
    per_layer = 0.0
    if step.num_loaded:
        ready += host.latency_s
        per_layer = step.num_loaded * times.kv_bytes / host.bytes_per_s
    ended = max(ended, ready + (check + 1) * per_layer + whole_s + num_above * above_s)
    if drops_early:
        ended = max(ended, ready + per_layer + (check + 1) * whole_s + num_above * above_s)
    if num_above:
        ended = max(ended, ready + layers * per_layer + above_s)
    return times.step_s + ended


def seconds_of(steps: Sequence[Step], ratio: float, times: ModelTimes, host: LinkSpeed) -> float:
    """Return when the last of some steps ends: each waits for the one before and for its start."""
    ended = 0.0
    for step in steps:
        ended = max(ended, step.start_s) + step_seconds(step, ratio, times, host)
    return ended


def hiding_ratio(step: Step, times: ModelTimes, layer_load_s: float) -> float:
    """Return r_load, the largest ratio at which a layer is computed while the next one is loaded.

    CacheBlend §5.1: max r with t(ceil(r N) + U) <= n b / B; 0 if there is none.

    Args:
        step: The whole of what is prefilled.
        times: Of the model.
        layer_load_s: n b / B, seconds to load one layer's share of the KV.
    """
    low, high = 0, step.num_reused
    if high == 0 or times.layer_s(step.num_computed) > layer_load_s:
        return 0.0
    while low < high:
        middle = (low + high + 1) // 2
        if times.layer_s(middle + step.num_computed) <= layer_load_s:
            low = middle
        else:
            high = middle - 1
    return low / step.num_reused


def steps_of(
    prompt: Prompt, loaded: Collection[int], links: Links, *, stepwise: bool
) -> list[Step]:
    """Cut a prompt into the steps of its prefill.

    A store handles its orders in the order of the prompt, so chunk j arrives after
    S_j = max(S_(j-1), queue) + a_s + size_j / B_s.

    Args:
        prompt: With ``loaded`` chunks in host memory or in the store.
        loaded: Indices of the chunks to load.
        links: With a storage link, if a chunk of the store is loaded.
        stepwise: Whether a step ends before each awaited chunk; else there is one step.
    """
    steps = []
    computed = reused = brought = 0
    start, arrived = 0.0, links.storage_queue_s
    for index, chunk in enumerate(prompt.chunks):
        if index in loaded:
            if chunk.place is Place.STORAGE:
                if stepwise and computed + reused:
                    steps.append(Step(computed, reused, brought, start))
                    computed = reused = brought = 0
                assert links.storage is not None, "a chunk lies in a store of unknown speed"
                arrived = start = arrived + links.storage.seconds(chunk.num_stored_bytes)
            brought += chunk.num_tokens
        if index not in loaded and chunk.place is not Place.DEVICE:
            computed += chunk.num_tokens
        elif not chunk.is_exact:
            reused += chunk.num_tokens
    steps.append(Step(computed + prompt.num_plain, reused, brought, start))
    return steps

"""Requests: on their way from the tokenizer process, and in the scheduler."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from sgl_blend.engine.adapters import class_with_adapter, give_adapter
from sgl_blend.engine.objects import (
    Answers,
    Completions,
    Received,
    Req,
    RequestHandle,
    Scheduler,
    TokenizerManager,
    Tree,
)
from sgl_blend.engine.tree import TreeMatch
from sgl_blend.engine.versions import features

_MENDED = "sgl_blend_mended"
"""Attribute of SGLang's ReqState: the prompt that it gives back was changed."""


def salt_of(request: Received) -> str | None:
    """Return the namespace that a client's request names.

    Args:
        request: On its way to the scheduler.
    """
    name = "cache_salt" if features().keys_have_salt else "extra_key"
    salt: str | None = getattr(request, name, None)
    return salt


def set_salt(request: Received | Req, salt: str | None) -> None:
    """Move a TokenizedGenerateReqInput to another namespace."""
    setattr(request, "cache_salt" if features().keys_have_salt else "extra_key", salt)


def namespace_of(req: Req) -> tuple[str | None, str | None]:
    """Return the salt of a request in the scheduler, and what else sets it apart from others."""
    if features().keys_have_salt:
        return req.cache_salt, req.extra_key
    return req.extra_key, None


def request_class(request: Received) -> str | None:
    """Return what sets a TokenizedGenerateReqInput apart from others beside its salt."""
    return class_with_adapter(request) if features().keys_have_salt else None


def new_silent_request(
    rid: str,
    token_ids: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    scheduler: Scheduler,
    priority: int | None,
    adapter: str | None = None,
) -> Req:
    """Make a request that prefills token_ids into a namespace, ends at once and is never streamed.

    The class (extra_key) of a request with an adapter holds the adapter's id. The request
    stands in one batch with clients' requests, with the overlap schedule at least for a moment. So it
    has what SGLang gives those: the penalties of one look at the tokenizer of each.
    """
    from sglang.srt.managers.schedule_batch import Req as SGLangReq
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    sampling.normalize(None)
    namespace = (
        {"extra_key": extra_key, "cache_salt": salt}
        if features().keys_have_salt
        else {"extra_key": salt}
    )
    req: Req = SGLangReq(
        rid,
        "",
        token_ids,
        sampling,
        vocab_size=scheduler.model_config.vocab_size,
        priority=priority,
        eos_token_ids=set(),
        **namespace,
    )
    req.tokenizer = scheduler.tokenizer
    req.logprob_start_len = -1  # of no row: SGLang reads it also where a neighbour wants logprobs
    give_adapter(req, adapter)
    # It waits since now. SGLang's drainer of adapters makes room for who has waited for long.
    req.time_stats.wait_queue_entry_time = time.perf_counter()
    req.finished_output = True  # for SGLang its end is streamed already
    # A retracted request has no token and is streamed all the same, unless it streams in intervals.
    req.stream = True
    req.sampling_params.stream_interval = 2
    return req


# --- on the way ---------------------------------------------------------------------------------


def received_rid(received: Received) -> str:
    """Return the id of a request on its way."""
    return received.rid


def received_ids(received: Received) -> array[int] | None:
    """Return the prompt of a request on its way; None if it brings embeddings instead."""
    return received.input_ids


def brings_images(received: Received) -> bool:
    """Tell whether a request on its way has images, whose places in the prompt are fixed."""
    return received.mm_inputs is not None


def take_out(received: Received, token_id: int) -> None:
    """Take all tokens of one id out of a prompt with images, and tell SGLang where these stand now.

    The places that a client named for log-probabilities stay as they are, as without images.
    """
    ids, images = received.input_ids, received.mm_inputs
    # Where SGLang could not read an image, an error stands there, and the request ends with it.
    items = getattr(images, "mm_items", None)
    if ids is None or items is None or token_id not in ids:
        return
    gone = [place for place, one in enumerate(ids) if one == token_id]
    received.input_ids = array(ids.typecode, (one for one in ids if one != token_id))
    for item in items:
        if item.offsets is not None:
            item.offsets = [
                tuple(place - bisect_left(gone, place) for place in ends) for ends in item.offsets
            ]
    # The prompt stands there once more, before and after images are marked in it.
    for name in ("input_ids", "padded_input_ids"):
        twin = getattr(images, name, None)
        if twin is not None and len(twin) == len(ids):
            kept = [one for one, before in zip(twin, ids, strict=True) if before != token_id]
            setattr(images, name, kept)


def set_received_ids(received: Received, token_ids: array[int]) -> None:
    """Give a request on its way another prompt."""
    received.input_ids = token_ids


def received_class(received: Received) -> str | None:
    """Return the extra key as the client set it, whatever it is in this version."""
    return received.extra_key


def custom_params(received: Received) -> Any:
    """Return what a client put into custom_params; nobody has checked it."""
    return received.sampling_params.custom_params


def manager_of(serving: Completions) -> TokenizerManager:
    """Return the tokenizer process's side of what serves completions."""
    return serving.tokenizer_manager


def echo_params(request: Any) -> Any:
    """Return what a completion's client put into custom_params; nobody has checked it."""
    return request.custom_params


def mend_returned_prompts(
    manager: TokenizerManager, answers: Answers, mend: Callable[[list[int], Any], list[int]]
) -> None:
    """Change the prompts that clients get back with their answers (return_prompt_token_ids).

    Args:
        manager: The tokenizer process's side.
        answers: What the scheduler has just sent.
        mend: Takes a prompt and the custom_params of its request; its result is not changed again.
    """
    for rid in answers.rids:
        state = manager.rid_to_state.get(rid)
        if state is None or state.prompt_token_ids is None or hasattr(state, _MENDED):
            continue
        sampling = state.obj.sampling_params
        params = sampling.get("custom_params") if isinstance(sampling, dict) else None
        state.prompt_token_ids = mend(state.prompt_token_ids, params)
        setattr(state, _MENDED, True)


# --- in the scheduler ---------------------------------------------------------------------------


def rid_of(req: Req) -> str:
    """Return a request's id."""
    return req.rid


def rid_of_handle(handle: RequestHandle) -> str:
    """Return the id of the request that the tree knows by a handle."""
    return handle.rid


def is_health_check(req: Req) -> bool:
    """Tell whether SGLang asks itself whether it lives."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)


def prompt_ids(req: Req) -> array[int]:
    """Return the prompt, with the earlier turns of a session."""
    return req.origin_input_ids


def has_finished(req: Req) -> bool:
    """Tell whether a request has ended, in whatever way."""
    return bool(req.finished())


def is_being_aborted(req: Req) -> bool:
    """Tell whether SGLang is about to end a request."""
    return req.to_finish is not None


def brings_embeddings(req: Req) -> bool:
    """Tell whether more than token ids decides what a request's rows are."""
    return (
        req.multimodal_inputs is not None
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.multi_item_delimiter_indices is not None
        or getattr(req, "token_indices_to_pool", None) is not None
    )


def is_beam(req: Req) -> bool:
    """Tell whether a request belongs to a beam search."""
    return getattr(req, "beam_group", None) is not None


def logprobs_from(req: Req) -> int | None:
    """Return from which token of the prompt on logprobs are wanted; None if none are."""
    return req.logprob_start_len if req.return_logprob and req.logprob_start_len >= 0 else None


def tell_client(req: Req, name: str, value: dict[str, Any]) -> None:
    """Let a request's answers carry a dict in meta_info; it may still be changed in place."""
    if req.customized_info is None:
        req.customized_info = {name: [value]}


def count_cached(req: Req, num_tokens: int) -> None:
    """Count tokens as cached; clients read their number in the usage of an answer."""
    req.cached_tokens += num_tokens


def match_again(req: Req, tree: Tree) -> None:
    """Match a request against the tree, as SGLang does before it admits one."""
    req.init_next_round_input(tree)


def fill_ids(req: Req) -> array[int]:
    """Return prompt and generated tokens, as the scheduler prefills them."""
    tokens: array[int] = req.full_untruncated_fill_ids
    return tokens


def prefix_length(req: Req) -> int:
    """Return how many tokens the radix tree gives the request."""
    return len(req.prefix_indices) if features().match_has_slots else int(req.prefix_len)


def host_hit_length(req: Req) -> int:
    """Return how many tokens after its prefix SGLang finds in host memory."""
    return int(req.host_hit_length)


def set_prefix(req: Req, found: TreeMatch) -> None:
    """Give a request that is not admitted yet another prefix of the tree."""
    if features().match_has_slots:
        req.prefix_indices = found.slots
    else:
        req.prefix_len = len(found)
    req.last_node = req.last_host_node = req.best_match_node = found.node
    req.host_hit_length = 0
    owner: Any = req.kv if features().kv_has_owner else req
    owner.cache_protected_len = len(found)


def step_range(req: Req) -> tuple[int, int]:
    """Return the positions [start, stop) of the prefill step that was admitted."""
    if features().extend_is_range:
        return req.extend_range.start, req.extend_range.end
    return req.prefix_len, req.extend_end


def holds_kv(req: Req) -> bool:
    """Tell whether a request owns slots of the pool."""
    if features().kv_has_owner:
        return bool(req.kv.holds_kv)
    return req.req_pool_idx is not None


def was_aborted(req: Req) -> bool:
    """Tell whether a finished request was ended from outside."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(req.finished_reason, FINISH_ABORT)

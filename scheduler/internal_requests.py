"""Requests of the server's own: ordinary ones to SGLang, invisible to clients."""

from __future__ import annotations

import secrets
import sys
from array import array
from typing import Any

from sgl_blend.engine import adapter as sglang
from sgl_blend.engine.tp_group import TPGroup


def secret_rid_prefix(kind: str, tp_group: TPGroup) -> str:
    """Return how ids of internal requests begin: clients choose ids too, and must not meet these."""
    (secret,) = tp_group.agree([float(secrets.randbits(52))])
    return f"sgl-blend-{kind}-{int(secret):013x}-"


def new_internal_request(
    scheduler: Any, rid: str, token_ids: array[int], *, salt: str | None, extra_key: str | None
) -> Any:
    """Make a request that prefills token_ids into a namespace, ends at once and is never streamed.

    Args:
        scheduler: SGLang's Scheduler.
        rid: Request id that no client can guess.
        token_ids: Its prompt.
        salt: Cache salt of the namespace; None for the one without.
        extra_key: SGLang's request class.

    Returns:
        SGLang's Req, in no queue yet.
    """
    req = sglang.new_prefill_request(
        rid,
        token_ids,
        salt=salt,
        extra_key=extra_key,
        vocab_size=scheduler.model_config.vocab_size,
        priority=_lowest_priority(scheduler),
    )
    req.sgl_blend_internal = True
    req.finished_output = True  # for SGLang its end is streamed already
    # A retracted request has no token and is streamed all the same, unless it streams in intervals.
    req.stream = True
    req.sampling_params.stream_interval = 2
    return req


def step_length(scheduler: Any, limit: int) -> int:
    """Return how many tokens one internal request may prefill, so that chunked prefill never cuts it.

    A request that SGLang cuts occupies its only place for such requests: nobody else may be cut, and
    whatever wants the server idle (a flush, new weights) finds it busy until the last piece is done.
    So long work is cut by us, into requests that each end with their one step.

    Args:
        scheduler: SGLang's Scheduler.
        limit: Longest step wanted, in tokens.

    Returns:
        A number of whole pages that depends on the server's settings alone.
    """
    chunk: int | None = scheduler.chunked_prefill_size
    page: int = scheduler.page_size
    if chunk is not None:
        # Half of the prefill chunk is left to the decoding requests of a mixed batch.
        limit = min(limit, chunk // 2 if scheduler.is_mixed_chunk else chunk)
    return max(page, limit // page * page)


def is_internal(req: Any) -> bool:
    """Tell whether a request is the server's own."""
    marked: bool = getattr(req, "sgl_blend_internal", False)
    return marked


def _lowest_priority(scheduler: Any) -> int | None:
    """Return the priority that SGLang itself gives requests without one."""
    if not scheduler.enable_priority_scheduling:
        return None
    return sys.maxsize if scheduler.schedule_low_priority_values_first else -sys.maxsize - 1

"""Requests of the server's own: ordinary ones to SGLang, invisible to clients."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable

from sgl_blend.engine.adapters import adapter_of_class
from sgl_blend.engine.objects import Req, Scheduler, Verdict
from sgl_blend.engine.requests import new_silent_request
from sgl_blend.engine.rounds import lowest_priority
from sgl_blend.engine.tp_group import TPGroup

_MARK = "sgl_blend_internal"
"""Attribute of SGLang's Req: nobody outside waits for it. Its value: whether it is batched apart."""


AddReq = Callable[[Req], Verdict]
"""SGLang's own admission of one request into the batch that is put together."""


def secret_rid_prefix(kind: str, tp_group: TPGroup) -> str:
    """Return how ids of internal requests begin: clients choose ids too, and must not meet these."""
    (secret,) = tp_group.agree([float(secrets.randbits(52))])
    return f"sgl-blend-{kind}-{int(secret):013x}-"


def new_internal_request(
    scheduler: Scheduler,
    rid: str,
    token_ids: array[int],
    *,
    salt: str | None,
    extra_key: str | None,
    apart: bool = True,
) -> Req:
    """Make a request that prefills token_ids into a namespace, ends at once and is never streamed.

    Args:
        scheduler: SGLang's Scheduler.
        rid: Request id that no client can guess.
        token_ids: Its prompt.
        salt: Cache salt of the namespace; None for the one without.
        extra_key: SGLang's request class; the adapter that it names computes the KV.
        apart: Whether no client's request may follow it in its batch.

    Returns:
        SGLang's Req, in no queue yet.
    """
    req = new_silent_request(
        rid,
        token_ids,
        salt=salt,
        extra_key=extra_key,
        scheduler=scheduler,
        priority=lowest_priority(scheduler),
        adapter=adapter_of_class(scheduler, extra_key),
    )
    setattr(req, _MARK, apart)
    return req


def is_internal(req: Req) -> bool:
    """Tell whether a request is the server's own."""
    return hasattr(req, _MARK)


def keeps_apart(req: Req) -> bool:
    """Tell whether no client's request may follow a request in its batch."""
    apart: bool = getattr(req, _MARK, False)
    return apart

"""LoRA adapters: what KV was computed with, and which rows of a batch each applies to.

SGLang gives every loaded adapter an id and appends it to the request class (``extra_key``) of requests
that ask for it. So the class of a chunk holds its adapter. An adapter that is loaded again, from
whatever path, has another id: what an unloaded one computed is never met again.
"""

from __future__ import annotations

from collections.abc import Callable

from sgl_blend.engine.models import runner_of
from sgl_blend.engine.objects import ForwardBatch, ModelRunner, Received, Req, Scheduler

_ID_LENGTH = 32
"""Hexadecimal digits of a UUID."""


def class_with_adapter(received: Received) -> str | None:
    """Return the class that SGLang makes of a request's extra key and its adapter."""
    adapter: str | None = getattr(received, "lora_id", None)
    return received.extra_key if adapter is None else (received.extra_key or "") + adapter


def adapter_of_class(scheduler: Scheduler, extra_key: str | None) -> str | None:
    """Return the id of the loaded adapter that a request class ends with, if there is one."""
    manager = getattr(runner_of(scheduler), "lora_manager", None)
    if manager is None or extra_key is None:
        return None
    adapter = extra_key[-_ID_LENGTH:]
    return adapter if adapter in manager.loras else None


def pretends_adapter(scheduler: Scheduler, received: Received) -> bool:
    """Tell whether a request for the base model has the class of one for an adapter."""
    if getattr(received, "lora_id", None) is not None:
        return False
    return adapter_of_class(scheduler, received.extra_key) is not None


def give_adapter(req: Req, adapter: str | None) -> None:
    """Let a request be computed with an adapter, whose id its class holds already."""
    req.lora_id = adapter


def serves_adapters(runner: ModelRunner) -> bool:
    """Tell whether requests may ask for adapters."""
    return getattr(runner, "lora_manager", None) is not None


RowFollower = Callable[[ForwardBatch], None]


def row_follower(runner: ModelRunner) -> RowFollower | None:
    """Return what tells adapters which rows of a batch are theirs; None without adapters.

    SGLang does so once for a batch. It must be done again for every part of a batch that runs by
    itself, and where rows are taken out.
    """
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return None
    follow: RowFollower = manager.prepare_lora_batch
    return follow

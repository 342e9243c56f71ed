"""LoRA adapters: what KV was computed with, and which rows of a batch each applies to.

SGLang gives every loaded adapter an id and appends it to the request class (``extra_key``) of requests
that ask for it. So the class of a chunk holds its adapter. An adapter that is loaded again, from
whatever path, has another id: what an unloaded one computed is never met again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from sgl_blend.engine.models import runner_of
from sgl_blend.engine.objects import (
    Aborted,
    ForwardBatch,
    ModelRunner,
    Received,
    Req,
    Scheduler,
    TokenizerManager,
)
from sgl_blend.engine.versions import targets_since_0_5_21

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


FitsClass = Callable[[str | None], bool]
"""Takes the class of a request."""


class Adapters:
    """The adapters of a server, as intake and background work see them.

    Args:
        scheduler: SGLang's Scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = getattr(runner_of(scheduler), "lora_manager", None)
        self._used: set[str] = set()
        """Ids that requests were for. KV of one that is gone may still be stored."""

    def pretends(self, received: Received) -> bool:
        """Tell whether a request for the base model has the class of one for an adapter."""
        adapter: str | None = getattr(received, "lora_id", None)
        if adapter is not None:
            self._used.add(adapter)
            return False
        named = received.extra_key
        if named is not None and named[-_ID_LENGTH:] in self._used:
            return True
        return adapter_of_class(self._scheduler, named) is not None

    def is_gone(self, extra_key: str | None) -> bool:
        """Tell whether a class is one of an adapter that was unloaded; nobody asks for it again."""
        if extra_key is None or extra_key[-_ID_LENGTH:] not in self._used:
            return False
        return adapter_of_class(self._scheduler, extra_key) is None

    def fitting(self) -> FitsClass | None:
        """Return what tells whether a request of ours may be tried now; None without adapters.

        A batch holds so many adapters (--max-loras-per-batch), those of running requests included. In a
        round SGLang counts the adapter of each request that it tries, also of one that it does not
        admit. So a request of ours is tried only where its adapter takes no place that a client's
        request needs.
        """
        manager, scheduler = self._manager, self._scheduler
        if manager is None:
            return None
        running = {req.lora_id for req in scheduler.running_batch.reqs if not req.finished()}
        if scheduler.chunked_req is not None:
            running.add(scheduler.chunked_req.lora_id)
        wanted = running | {req.lora_id for req in scheduler.waiting_queue}

        @cache
        def fits(extra_key: str | None) -> bool:
            adapter = adapter_of_class(scheduler, extra_key)
            if adapter in running or self.is_gone(extra_key):
                return True
            return bool(manager.validate_lora_batch({adapter} | wanted))

        return fits


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


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_releases: set[asyncio.Task[None]] = set()
"""Whoever starts a task must keep it until it is done."""


def failure_targets() -> list[str]:
    """Return the method that forgets requests which failed on their way."""
    return targets_since_0_5_21(f"{_MANAGER}._release_req_states_on_failure")


def abort_targets() -> list[str]:
    """Return the method that forgets a request which the scheduler dropped from its queue."""
    return targets_since_0_5_21(f"{_MANAGER}._handle_abort_req")


def give_back_failed(manager: TokenizerManager, rids: Iterable[str]) -> None:
    """Release the adapters of requests that failed before the scheduler had them.

    SGLang 0.5.21 counts such requests as users of their adapters for ever, and whoever unloads one
    waits for its users. A request that we refuse is one of them. Later versions release them.
    """
    states = [manager.rid_to_state[rid] for rid in rids if rid in manager.rid_to_state]
    _give_back(manager, [state for state in states if not state.dispatched])


def give_back_aborted(manager: TokenizerManager, abort: Aborted) -> None:
    """Release the adapter of a request that is dropped from the queue, which 0.5.21 forgets as well."""
    state = manager.rid_to_state.get(abort.rid)
    if state is not None:
        _give_back(manager, [state])


def _give_back(manager: TokenizerManager, states: Iterable[Any]) -> None:
    if hasattr(manager, "_release_lora_once"):
        return
    used = [getattr(state.obj, "lora_id", None) for state in states]
    ids = [adapter for adapter in used if isinstance(adapter, str)]
    if ids:
        task = asyncio.get_running_loop().create_task(manager.lora_registry.release(ids))
        _releases.add(task)
        task.add_done_callback(_releases.discard)

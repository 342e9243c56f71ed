"""Take requests back as SGLang does when the KV pool is short."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from harness import Driver


def retract(driver: Driver, reqs: Sequence[Any]) -> None:
    """Take requests of a launched batch back, and let them wait again."""
    from sglang.srt.managers.schedule_batch import retract_all

    scheduler = driver.scheduler
    wants_args = "server_args" in inspect.signature(retract_all).parameters  # 0.5.17
    retract_all(
        **({"server_args": scheduler.server_args} if wants_args else {}),
        reqs=list(reqs),
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=False,
    )
    for req in reqs:
        scheduler._add_request_to_queue(req)

"""How SGLang spells what an operator orders, and what must not be running then."""

from collections.abc import Callable
from typing import Any

_TRAFFIC = (
    "TokenizedGenerateReqInput",
    "TokenizedEmbeddingReqInput",
    "BatchTokenizedGenerateReqInput",
    "BatchTokenizedEmbeddingReqInput",
    "AbortReq",
)
"""What clients cause; everything else that reaches the scheduler is an operator's order."""


def is_order(received: Any) -> bool:
    """Tell whether what the scheduler received is an order: flush, weights, memory, pause."""
    return type(received).__name__ not in _TRAFFIC


def may_end_weight_update(received: Any) -> bool:
    """Tell whether an order can have changed weights without SGLang's hook for that.

    Weights written from outside (RDMA) count from the end of their session on.
    """
    return type(received).__name__ == "EndWeightUpdateReqInput"


def is_flush_waiting(scheduler: Any) -> bool:
    """Tell whether a flush with a timeout waits for the server to be idle."""
    return scheduler.flush_wrapper._pending is not None


def takes_background_work(scheduler: Any) -> bool:
    """Tell whether work that nobody asked for may run.

    Not while weights or memory are released or in the middle of an update, nor while a flush waits.
    """
    updater = scheduler.weight_updater
    return (
        not updater.offload_tags
        and getattr(updater, "_session", None) is None
        and not is_flush_waiting(scheduler)
    )


def take_out(batch: Any, leaves: Callable[[Any], bool]) -> None:
    """Take requests out of a running batch, in place, before it decodes."""
    kept = [index for index, req in enumerate(batch.reqs) if not leaves(req)]
    if len(kept) < len(batch.reqs):
        batch.filter_batch(keep_indices=kept)
        batch.batch_is_full = False


def put_back_preempted(scheduler: Any, adder: Any) -> None:
    """Put requests back into the waiting queue that were preempted for a batch of nobody.

    SGLang 0.5.21 and older does so only behind a batch that holds something, and loses them else.
    """
    preempted, adder.preempt_list = adder.preempt_list, []
    for req in preempted:
        scheduler._add_request_to_queue(req)

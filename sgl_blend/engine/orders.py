"""How SGLang spells what an operator orders, and what must not be running then."""

from collections.abc import Iterator, Sequence

from sgl_blend.engine.objects import Scheduler

_TRAFFIC = (
    "TokenizedGenerateReqInput",
    "TokenizedEmbeddingReqInput",
    "BatchTokenizedGenerateReqInput",
    "BatchTokenizedEmbeddingReqInput",
    "AbortReq",
    "OpenSessionReqInput",
    "CloseSessionReqInput",
)
"""What clients cause; everything else that reaches the scheduler is an operator's order."""

_NEED_IDLE = (
    "FlushCache",
    "ClearHiCache",
    "AttachHiCacheStorage",
    "DetachHiCacheStorage",
    "ReleaseMemoryOccupation",
    "BeginWeightUpdate",
    "EndWeightUpdate",
    "UpdateWeight",
    "CheckWeights",
)
"""How the names of orders begin that wait for copies and writes."""


def is_order(received: object) -> bool:
    """Tell whether what the scheduler received is an order: flush, weights, memory, pause."""
    return type(received).__name__ not in _TRAFFIC


def needs_idle(received: object) -> bool:
    """Tell whether SGLang carries an order out on an idle server only, or it changes what KV means."""
    return type(received).__name__.startswith(_NEED_IDLE)


def parts_of_orders(all_received: Sequence[object]) -> Iterator[Sequence[object]]:
    """Yield what was received at once, so that an order for an idle server begins a part.

    What came before it may be the pause that makes the server idle.
    """
    begin = 0
    for index, received in enumerate(all_received):
        if index > begin and needs_idle(received):
            yield all_received[begin:index]
            begin = index
    yield all_received[begin:]


def may_update_weights(received: object) -> bool:
    """Tell whether an order can change weights, on this rank or on another one."""
    return type(received).__name__.startswith(("UpdateWeight", "EndWeight", "CheckWeights"))


def may_end_weight_update(received: object) -> bool:
    """Tell whether an order can have changed weights without SGLang's hook for that.

    Weights written from outside (RDMA) count from the end of their session on. The weight checker
    can overwrite all of them.
    """
    name = type(received).__name__
    resets = getattr(received, "action", None) == "reset_tensors"
    return name == "EndWeightUpdateReqInput" or (name == "CheckWeightsReqInput" and resets)


def is_flush_waiting(scheduler: Scheduler) -> bool:
    """Tell whether a flush with a timeout waits for the server to be idle."""
    return scheduler.flush_wrapper._pending is not None


def takes_background_work(scheduler: Scheduler) -> bool:
    """Tell whether work that nobody asked for may run.

    Not while weights or memory are released or in the middle of an update, nor while a flush waits.
    """
    updater = scheduler.weight_updater
    return (
        not updater.offload_tags
        and getattr(updater, "_session", None) is None
        and not is_flush_waiting(scheduler)
    )

"""The functions that SGLang's HookRegistry calls: each finds its runtime, or returns at once.

A hook never holds state. The runtime hangs on the scheduler, its tree and its model runner; where it
does not, blending is off and the stock function runs.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sgl_blend.engine import orders as sglang_orders
from sgl_blend.scheduler.request_state import ATTRIBUTE, RequestState, state_of
from sgl_blend.scheduler.runtime import BlendRuntime

_ARRIVING: ContextVar[tuple[str, RequestState] | None] = ContextVar("arriving", default=None)
"""The request that handle_generate_request is turning into a Req, by rid."""


def attach_runtime(runtime: BlendRuntime, scheduler: Any) -> None:
    """Let the hooks find a scheduler's runtime."""
    for owner in (scheduler, scheduler.tree_cache, scheduler.tp_worker.model_runner):
        setattr(owner, ATTRIBUTE, runtime)


def _runtime_of(owner: Any) -> BlendRuntime | None:
    runtime: BlendRuntime | None = getattr(owner, ATTRIBUTE, None)
    return runtime


def around_handle_generate_request(
    orig: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Read the chunks of an arriving request before SGLang sees its tokens."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, recv_req, *args, **kwargs)
    token = _ARRIVING.set((recv_req.rid, runtime.intake.read(recv_req)))
    try:
        return orig(scheduler, recv_req, *args, **kwargs)
    finally:
        _ARRIVING.reset(token)


def after_req_init(result: None, req: Any, *args: Any, **kwargs: Any) -> None:
    """Put the state of the arriving request on its Req."""
    arriving = _ARRIVING.get()
    if arriving is not None and arriving[0] == req.rid:
        arriving[1].follow(req.origin_input_ids)
        setattr(req, ATTRIBUTE, arriving[1])


def around_get_new_batch_prefill(
    orig: Callable[..., Any], scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Offer background work for one scheduling round."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, running_batch, *args, **kwargs)
    runtime.begin_round(running_batch)
    try:
        return orig(scheduler, running_batch, *args, **kwargs)
    finally:
        runtime.end_round()


def around_add_one_req(
    orig: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plan a request while it is admitted."""
    runtime = _runtime_of(adder.tree_cache)
    if runtime is None:
        return orig(adder, req, *args, **kwargs)
    return runtime.add_one_req(orig, adder, req, (args, kwargs))


def around_preempt_to_schedule(
    orig: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Preempt nobody for a request that cannot be admitted in this round."""
    runtime = _runtime_of(adder.tree_cache)
    if runtime is not None and runtime.waits_for_builds(req):
        return False
    return orig(adder, req, *args, **kwargs)


def after_add_chunked_req(result: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Plan a further step of a chunked prefill."""
    runtime = _runtime_of(adder.tree_cache)
    if runtime is not None:
        runtime.continue_chunked(req, adder)


def around_forward_raw(
    orig: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run forwards that hold blended requests or builds; all others are stock."""
    runtime = _runtime_of(runner)
    if runtime is None or not runtime.has_work or not forward_batch.forward_mode.is_extend():
        return orig(runner, forward_batch, *args, **kwargs)
    return runtime.forward(orig, runner, forward_batch, (args, kwargs))


def after_process_batch_result(
    result: None, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> None:
    """Release plans whose last prefill step is done."""
    runtime = _runtime_of(scheduler)
    if runtime is not None and batch.forward_mode.is_extend():
        runtime.finish_step(batch)


def before_release_kv_cache(req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """Release a plan on every other way out: abort, retraction, preemption."""
    if state_of(req) is not None:
        runtime = _runtime_of(tree_cache)
        if runtime is not None:
            runtime.release(req)


def before_evict(tree: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    """Let tenants below their share keep their chunks."""
    runtime = _runtime_of(tree)
    if runtime is not None:
        runtime.before_evict(params.num_tokens)


def before_reset(tree: Any, *args: Any, **kwargs: Any) -> None:
    """Remember nothing of what the tree held."""
    runtime = _runtime_of(tree)
    if runtime is not None:
        runtime.before_reset()


def around_process_input_requests(
    orig: Callable[..., Any], scheduler: Any, recv_reqs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let no order of an operator meet background work, which clients cannot see."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, recv_reqs, *args, **kwargs)
    orders = [received for received in recv_reqs or () if sglang_orders.is_order(received)]
    if orders or sglang_orders.is_flush_waiting(scheduler):
        runtime.step_aside(scheduler)
    result = orig(scheduler, recv_reqs, *args, **kwargs)
    if any(sglang_orders.may_end_weight_update(order) for order in orders):
        runtime.weights_changed()
    return result


def around_flush_cache(orig: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Let background work, which clients cannot see, not stand in the way of a flush."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, *args, **kwargs)
    runtime.step_aside(scheduler)
    flushed = orig(scheduler, *args, **kwargs)
    if flushed:
        runtime.forget_pending()
    return flushed


def after_weight_update(result: None, updater: Any, *args: Any, **kwargs: Any) -> None:
    """Use nothing of the old weights again."""
    runtime = _runtime_of(updater.scheduler)
    if runtime is not None:
        runtime.weights_changed()


def after_get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Add settings and totals to /server_info."""
    runtime = _runtime_of(scheduler)
    if runtime is not None:
        result.internal_state["sgl_blend"] = runtime.describe()

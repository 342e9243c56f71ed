"""The functions that SGLang's HookRegistry calls: each finds its runtime, or returns at once.

A hook never holds state. The runtime hangs on the scheduler, its tree and its model runner; where it
does not, blending is off and the stock function runs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sgl_blend.engine.admission import close_after_cut
from sgl_blend.engine.eviction import let_ranks_decide
from sgl_blend.engine.models import runner_of
from sgl_blend.engine.objects import (
    EvictParams,
    ForwardBatch,
    Handle,
    InsertParams,
    ModelRunner,
    PrefillAdder,
    Received,
    Req,
    RequestHandle,
    ScheduleBatch,
    Scheduler,
    Stock,
    Tree,
    TreeSettings,
)
from sgl_blend.engine.orders import (
    is_order,
    may_end_weight_update,
    may_update_weights,
    needs_idle,
    parts_of_orders,
)
from sgl_blend.engine.prefetch import with_own_limit
from sgl_blend.engine.requests import prompt_ids, received_rid, rid_of, rid_of_handle
from sgl_blend.engine.rounds import (
    StateReply,
    Updater,
    has_last_batch,
    is_idle_round,
    is_prefill,
    scheduler_of,
    show_state,
)
from sgl_blend.engine.tiers import finish_loads
from sgl_blend.engine.tree import tokens_to_evict, tree_of
from sgl_blend.scheduler.request_state import ATTRIBUTE, RequestState, state_of
from sgl_blend.scheduler.runtime import BlendRuntime

_ARRIVING: ContextVar[tuple[str, RequestState] | None] = ContextVar("arriving", default=None)
"""The request that handle_generate_request is turning into a Req, by rid."""

_TREES_RANK: ContextVar[bool] = ContextVar("trees_rank", default=False)
"""Whether a tree that is made now belongs to a scheduler that blends."""


@contextmanager
def trees_rank() -> Iterator[None]:
    """Let trees that are made meanwhile evict by rank."""
    token = _TREES_RANK.set(True)
    try:
        yield
    finally:
        _TREES_RANK.reset(token)


def after_tree_settings(result: None, settings: TreeSettings, *args: Any, **kwargs: Any) -> None:
    """Let the tree of a scheduler that blends evict by rank."""
    if _TREES_RANK.get():
        let_ranks_decide(settings)


def attach_runtime(runtime: BlendRuntime, scheduler: Scheduler) -> None:
    """Let the hooks find a scheduler's runtime."""
    for owner in (scheduler, tree_of(scheduler), runner_of(scheduler)):
        setattr(owner, ATTRIBUTE, runtime)


def _runtime_of(owner: object) -> BlendRuntime | None:
    runtime: BlendRuntime | None = getattr(owner, ATTRIBUTE, None)
    return runtime


def around_handle_generate_request(
    orig: Stock, scheduler: Scheduler, received: Received, *args: Any, **kwargs: Any
) -> Any:
    """Read the chunks of an arriving request before SGLang sees its tokens."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, received, *args, **kwargs)
    token = _ARRIVING.set((received_rid(received), runtime.intake.read(received)))
    try:
        return orig(scheduler, received, *args, **kwargs)
    finally:
        _ARRIVING.reset(token)


def after_req_init(result: None, req: Req, *args: Any, **kwargs: Any) -> None:
    """Put the state of the arriving request on its Req."""
    arriving = _ARRIVING.get()
    if arriving is not None and arriving[0] == rid_of(req):
        arriving[1].follow(prompt_ids(req))
        setattr(req, ATTRIBUTE, arriving[1])


def around_get_new_batch_prefill(
    orig: Stock, scheduler: Scheduler, running_batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> Any:
    """Offer background work for one scheduling round."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, running_batch, *args, **kwargs)
    clock = runtime.rounds.read_clock(needed=runtime.storage.needs_clock)
    runtime.storage.begin_round(None if clock is None else clock.now_s)
    runtime.rounds.begin(running_batch, clock)
    try:
        plan = orig(scheduler, running_batch, *args, **kwargs)
    finally:
        runtime.rounds.end()
    if is_idle_round(plan):
        finish_loads(tree_of(scheduler))
        if not has_last_batch(scheduler):
            runtime.storage.let_read()
    return plan


def around_add_one_req(
    orig: Stock, adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Plan a request while it is admitted."""
    runtime = _runtime_of(tree_of(adder))
    if runtime is None:
        return orig(adder, req, *args, **kwargs)
    verdict = runtime.add_one_req(orig, adder, req, (args, kwargs))
    close_after_cut(adder)
    return verdict


def around_preempt_to_schedule(
    orig: Stock, adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Preempt nobody for a request that cannot be admitted in this round."""
    runtime = _runtime_of(tree_of(adder))
    if runtime is not None and runtime.waits_for_builds(req):
        return False
    return orig(adder, req, *args, **kwargs)


def around_add_chunked_req(
    orig: Stock, adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Plan a further step of a chunked prefill."""
    runtime = _runtime_of(tree_of(adder))
    if runtime is None:
        return orig(adder, req, *args, **kwargs)
    cut_again = runtime.add_chunked_req(orig, adder, req, (args, kwargs))
    close_after_cut(adder, continues=cut_again is not None)
    return cut_again


def around_forward_raw(
    orig: Stock, runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """Run forwards that hold blended requests or builds; all others are stock."""
    runtime = _runtime_of(runner)
    if runtime is None or not runtime.has_work or not is_prefill(forward_batch):
        return orig(runner, forward_batch, *args, **kwargs)
    return runtime.forward(orig, runner, forward_batch, (args, kwargs))


def after_process_batch_result(
    result: None, scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> None:
    """Release plans whose last prefill step is done."""
    runtime = _runtime_of(scheduler)
    if runtime is not None and is_prefill(batch):
        runtime.finish_step(batch)


def before_release_kv_cache(req: Req, tree_cache: Tree, *args: Any, **kwargs: Any) -> None:
    """Release a plan on every other way out: abort, retraction, preemption."""
    if state_of(req) is not None:
        runtime = _runtime_of(tree_cache)
        if runtime is not None:
            runtime.release(req)


def around_insert(orig: Stock, tree: Tree, params: InsertParams, *args: Any, **kwargs: Any) -> Any:
    """Let blended prompts be evicted first."""
    runtime = _runtime_of(tree)
    if runtime is None:
        return orig(tree, params, *args, **kwargs)
    return runtime.probation.store(lambda: orig(tree, params, *args, **kwargs), params)


def around_evict(orig: Stock, tree: Tree, params: EvictParams, *args: Any, **kwargs: Any) -> Any:
    """Let tenants below their share keep their chunks."""
    runtime = _runtime_of(tree)
    if runtime is None:
        return orig(tree, params, *args, **kwargs)
    runtime.before_evict(tokens_to_evict(params))
    return runtime.probation.evict(lambda: orig(tree, params, *args, **kwargs))


def before_reset(tree: Tree, *args: Any, **kwargs: Any) -> None:
    """Remember nothing of what the tree held."""
    runtime = _runtime_of(tree)
    if runtime is not None:
        runtime.before_reset()


def around_prefetch(orig: Stock, scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any) -> Any:
    """Ask storage for the chunks of an arriving request, not for the prompt that is never stored."""
    runtime, state = _runtime_of(scheduler), state_of(req)
    if runtime is None:
        return orig(scheduler, req, *args, **kwargs)
    if state is None or not state.may_blend:
        with with_own_limit(tree_of(scheduler)):
            return orig(scheduler, req, *args, **kwargs)
    runtime.storage.arrived(req, state)
    return None


def around_prefetch_progress(
    orig: Stock, tree: Tree, handle: RequestHandle, *args: Any, **kwargs: Any
) -> Any:
    """Let a request wait for what comes from storage."""
    runtime = _runtime_of(tree)
    if runtime is not None and runtime.storage.is_waited_for(rid_of_handle(handle)):
        return False
    return orig(tree, handle, *args, **kwargs)


def around_write_to_storage(
    orig: Stock, tree: Tree, node: Handle, *args: Any, **kwargs: Any
) -> Any:
    """Write what another server or a later one could use, and nothing else."""
    runtime = _runtime_of(tree)
    if runtime is not None:
        if not runtime.storage.takes(node):
            return None
        runtime.storage.will_write(node)
    return orig(tree, node, *args, **kwargs)


def around_process_input_requests(
    orig: Stock,
    scheduler: Scheduler,
    all_received: Sequence[object] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let no order of an operator meet background work, which clients cannot see."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, all_received, *args, **kwargs)
    runtime.rounds.let_prefill_follow()
    result = None
    for received in parts_of_orders(all_received or ()):
        carry_out = functools.partial(orig, scheduler, received, *args, **kwargs)
        result = _carry_out(runtime, scheduler, received, carry_out)
    return result


def _carry_out(
    runtime: BlendRuntime,
    scheduler: Scheduler,
    all_received: Sequence[object],
    carry_out: Callable[[], Any],
) -> Any:
    orders = [received for received in all_received if is_order(received)]
    flush_waits = runtime.rounds.flush_waits()
    wants_idle = flush_waits or any(map(needs_idle, orders))
    if orders or flush_waits:
        runtime.step_aside(scheduler, finish_writes=wants_idle)
    if any(map(needs_idle, orders)):
        runtime.storage.leave()
    if orders:
        runtime.rounds.order_came()
    may_update = any(map(may_update_weights, orders))
    with runtime.weight_orders.carried_out(may_update=may_update):
        result = carry_out()
        if any(map(may_end_weight_update, orders)):
            runtime.weight_orders.note()
    return result


def around_flush_cache(orig: Stock, scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """Let background work, which clients cannot see, not stand in the way of a flush."""
    runtime = _runtime_of(scheduler)
    if runtime is None:
        return orig(scheduler, *args, **kwargs)
    runtime.step_aside(scheduler)
    flushed = orig(scheduler, *args, **kwargs)
    if flushed:
        runtime.forget_pending()
    return flushed


def after_weight_update(result: None, updater: Updater, *args: Any, **kwargs: Any) -> None:
    """Use nothing of the old weights again."""
    runtime = _runtime_of(scheduler_of(updater))
    if runtime is not None:
        runtime.weight_orders.note()


def after_get_internal_state(
    result: StateReply, scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Add settings and totals to /server_info."""
    runtime = _runtime_of(scheduler)
    if runtime is not None:
        show_state(result, "sgl_blend", runtime.describe())

"""The scheduler between two forwards: its queue, its running batch and what it holds back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from sgl_blend.engine.admission import num_running
from sgl_blend.engine.objects import ForwardBatch, PrefillAdder, Req, ScheduleBatch, Scheduler


class Updater(Protocol):
    """What changes a scheduler's weights."""

    scheduler: Scheduler


class StateReply(Protocol):
    """What a scheduler answers to /server_info."""

    internal_state: dict[str, Any]


# --- the waiting queue --------------------------------------------------------------------------


def somebody_waits(scheduler: Scheduler) -> bool:
    """Tell whether a request waits to be admitted."""
    return bool(scheduler.waiting_queue)


def is_queued(scheduler: Scheduler, req: Req) -> bool:
    """Tell whether a request waits to be admitted."""
    return any(waiting is req for waiting in scheduler.waiting_queue)


def put_first(scheduler: Scheduler, req: Req) -> None:
    """Put a request before all that wait."""
    scheduler.waiting_queue.insert(0, req)


def put_before(scheduler: Scheduler, req: Req, other: Req) -> None:
    """Put a request right before one that waits; before all if that one does not wait any more."""
    queue = scheduler.waiting_queue
    place = next((index for index, waiting in enumerate(queue) if waiting is other), 0)
    queue.insert(place, req)


def leave_queue(scheduler: Scheduler, req: Req) -> None:
    """Take a request out of the waiting queue, if it is there."""
    scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]


def drop_queued(scheduler: Scheduler, leaves: Callable[[Req], bool]) -> None:
    """Take requests out of the waiting queue for whose end nobody waits."""
    scheduler.waiting_queue = [other for other in scheduler.waiting_queue if not leaves(other)]


def has_cut_request(scheduler: Scheduler) -> bool:
    """Tell whether a request is in the middle of a chunked prefill."""
    return scheduler.chunked_req is not None


def free_rows(scheduler: Scheduler, adder: PrefillAdder) -> int:
    """Return how many requests may join the batch that is put together."""
    return scheduler.get_num_allocatable_reqs(num_running(adder))


# --- batches ------------------------------------------------------------------------------------


def let_prefill_follow(scheduler: Scheduler, is_ours: Callable[[Req], bool]) -> None:
    """Let no request wait for decode rounds because of a batch that nobody asked for.

    With --prefill-decode-interval SGLang prefills nothing for so many rounds after each prefill.
    """
    batch = scheduler.last_batch
    if batch is not None and batch.reqs and all(map(is_ours, batch.reqs)):
        scheduler._prefill_decode_interval_remaining = 0


def requests_of(batch: ScheduleBatch) -> list[Req]:
    """Return the requests of a batch."""
    return batch.reqs


def is_decoding(running_batch: ScheduleBatch) -> bool:
    """Tell whether the batch of running requests holds any."""
    return not running_batch.is_empty()


def is_serving(scheduler: Scheduler) -> bool:
    """Tell whether requests prefill in pieces, decode, or wait where the server is not paused."""
    is_running = has_cut_request(scheduler) or is_decoding(scheduler.running_batch)
    return is_running or (somebody_waits(scheduler) and not scheduler._engine_paused)


def is_idle_round(plan: Any) -> bool:
    """Tell whether a round found nothing to prefill and has nothing to decode."""
    return plan.batch_to_run is None and plan.running_batch.is_empty()


def has_last_batch(scheduler: Scheduler) -> bool:
    """Tell whether a batch ran in the round before; its result may not have been looked at yet."""
    return scheduler.last_batch is not None


def is_prefill(batch: ScheduleBatch | ForwardBatch) -> bool:
    """Tell whether a batch computes prompts; drafts that the model verifies are none."""
    mode = batch.forward_mode
    return bool(mode.is_extend() and not mode.is_target_verify())


def take_out(batch: ScheduleBatch, leaves: Callable[[Req], bool]) -> bool:
    """Take requests out of a running batch, in place, before it decodes; return whether it held any."""
    kept = [index for index, req in enumerate(batch.reqs) if not leaves(req)]
    if len(kept) == len(batch.reqs):
        return False
    batch.filter_batch(keep_indices=kept)
    return True


def expect_room(batch: ScheduleBatch) -> None:
    """Let the next round try whether a request fits beside the running ones.

    SGLang remembers that nothing fits until one of them ends. It does not see requests end that were
    taken out of the batch, or settled between two rounds, and an empty batch would be full for ever.
    """
    batch.batch_is_full = False


def admits_nobody(batch: ScheduleBatch) -> bool:
    """Tell whether SGLang will try nobody in this round, because nothing fitted before."""
    return batch.batch_is_full


def holds_back_tokens(scheduler: Scheduler, is_nobodys: Callable[[Req], bool]) -> bool:
    """Tell whether a prefill has run whose result SGLang's overlap schedule has not looked at.

    It looks at it after the next batch was launched.

    Args:
        scheduler: The scheduler.
        is_nobodys: Tells of a request whether no client waits for it.
    """
    last = scheduler.last_batch
    return (
        bool(getattr(scheduler, "result_queue", None))
        and last is not None
        and is_prefill(last)
        and not all(map(is_nobodys, last.reqs))
    )


def settle_last_batch(scheduler: Scheduler, is_over: Callable[[Req], bool]) -> list[Req]:
    """Look at the result of the last batch now, if nobody waits for any of it.

    Args:
        scheduler: The scheduler, between two rounds.
        is_over: Tells of a request whether nobody waits for what it computes.

    Returns:
        The requests of the batch; none if it was left as it is.
    """
    last = scheduler.last_batch
    if last is None or not last.reqs or not all(map(is_over, last.reqs)):
        return []
    reqs = list(last.reqs)
    results = getattr(scheduler, "result_queue", None)
    while results:
        scheduler.process_batch_result(*results.popleft())
    scheduler.last_batch = None
    take_out(scheduler.running_batch, is_over)
    expect_room(scheduler.running_batch)
    return reqs


def put_back_preempted(scheduler: Scheduler, adder: PrefillAdder) -> None:
    """Put requests back into the waiting queue that were preempted for a batch of nobody.

    SGLang 0.5.21 and older does so only after a batch that holds something, and loses them else.
    """
    preempted, adder.preempt_list = adder.preempt_list, []
    for req in preempted:
        scheduler._add_request_to_queue(req)


# --- settings -----------------------------------------------------------------------------------


def uncut_length(scheduler: Scheduler, limit: int) -> int:
    """Return how many tokens a request may prefill at most, so that SGLang never cuts it.

    Args:
        scheduler: The scheduler.
        limit: Longest one wanted, in tokens.

    Returns:
        A number of whole pages that depends on the server's settings alone.
    """
    chunk, page = scheduler.chunked_prefill_size, scheduler.page_size
    if chunk is not None:
        # Half of the prefill chunk is left to the decoding requests of a mixed batch.
        limit = min(limit, chunk // 2 if scheduler.is_mixed_chunk else chunk)
    return max(page, limit // page * page)


def lowest_priority(scheduler: Scheduler) -> int | None:
    """Return the priority that SGLang itself gives requests without one; None without priorities."""
    if not scheduler.enable_priority_scheduling:
        return None
    return sys.maxsize if scheduler.schedule_low_priority_values_first else -sys.maxsize - 1


def vocab_size(scheduler: Scheduler) -> int:
    """Return how many token ids the model has."""
    return int(scheduler.model_config.vocab_size)


def pool_capacity(scheduler: Scheduler) -> int:
    """Return how many tokens the KV pool holds."""
    return scheduler.max_total_num_tokens


# --- what operators ask -------------------------------------------------------------------------


def scheduler_of(updater: Updater) -> Scheduler:
    """Return the scheduler whose weights an updater changes."""
    return updater.scheduler


def show_state(reply: StateReply, name: str, value: dict[str, Any]) -> None:
    """Add a dict to what /server_info says of a scheduler."""
    reply.internal_state[name] = value

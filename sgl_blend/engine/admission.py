"""The admission of requests into the prefill batch of one scheduling round."""

from __future__ import annotations

from sgl_blend.engine.objects import PrefillAdder, Req, Verdict
from sgl_blend.engine.requests import fill_ids, prefix_length
from sgl_blend.engine.tiers import copies_in_flight


def continue_verdict() -> Verdict:
    """Return what tells the scheduler to go on with the next request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return Verdict(AddReqResult.CONTINUE)


def stop_verdict() -> Verdict:
    """Return what tells the scheduler to close the batch."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return Verdict(AddReqResult.OTHER)


def is_out_of_memory(verdict: Verdict) -> bool:
    """Tell whether a request was refused because the pool cannot hold it."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return bool(verdict == AddReqResult.NO_TOKEN)


def was_admitted(req: Req, adder: PrefillAdder) -> bool:
    """Tell whether the request is the last that joined the batch."""
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def is_cut(req: Req, adder: PrefillAdder) -> bool:
    """Tell whether a request joined the batch with a part of its prompt only."""
    return adder.new_chunked_req is req


_HOLDS_CUT = "sgl_blend_holds_cut"
"""Attribute of SGLang's PrefillAdder: whether a request in its batch needs a further step."""


def holds_cut(adder: PrefillAdder) -> bool:
    """Tell whether a request that joined the batch needs a further step; a batch may hold one."""
    return adder.new_chunked_req is not None or getattr(adder, _HOLDS_CUT, False)


def rows_left(adder: PrefillAdder) -> int:
    """Return how many more rows a batch that is being put together may compute."""
    left = adder.rem_input_tokens if adder.rem_chunk_tokens is None else adder.rem_chunk_tokens
    return max(0, left)


def change_budget(adder: PrefillAdder, num_rows: int) -> None:
    """Let a batch that is being put together compute more rows, or fewer."""
    adder.rem_input_tokens += num_rows
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens += num_rows


def close_batch(adder: PrefillAdder) -> None:
    """Let nothing follow a request that was cut for want of budget; SGLang cuts one at a time.

    With --schedule-policy shortest-prefill-first a request may be cut for the sake of others. These
    follow, and SGLang itself sees to it that none of them is cut.
    """
    if adder.rem_chunk_tokens is not None and getattr(adder, "chunked_req_limit", None) is None:
        adder.rem_chunk_tokens = min(0, adder.rem_chunk_tokens)


def close_after_cut(adder: PrefillAdder, *, continues: bool = False) -> None:
    """Close the batch if a request in it was cut, whoever it is.

    A cut falls between pages, so some tokens of the budget may be left. On its own SGLang can do
    nothing with less than a page. A request that drops rows could reach far with them, and be cut too.

    Args:
        adder: SGLang's PrefillAdder.
        continues: Whether the request that was cut in a batch before is cut again.
    """
    if continues:
        setattr(adder, _HOLDS_CUT, True)
    if holds_cut(adder):
        close_batch(adder)


def verdict_now(adder: PrefillAdder) -> Verdict:
    """Return SGLang's verdict for the request after those that were admitted."""
    return adder.budget_state()


def is_alone(adder: PrefillAdder) -> bool:
    """Tell whether nothing else holds memory that could come free.

    That is no batch, nothing that decodes, and no copy to host memory or from there.
    """
    running = adder.running_batch
    is_idle = not adder.can_run_list and (running is None or running.is_empty())
    return is_idle and not copies_in_flight(adder.tree_cache)


def cut_by_budget_alone(adder: PrefillAdder) -> None:
    """Let the next step of a cut prefill end where the batch's chunk budget does.

    With --schedule-policy shortest-prefill-first SGLang ends it earlier for the sake of who waits.
    """
    if getattr(adder, "chunked_req_limit", None) is not None:
        adder.chunked_req_limit = None


def fits_whole(req: Req, adder: PrefillAdder) -> bool:
    """Tell whether what is left of the batch's chunk budget holds the request's whole prefill."""
    left, page = adder.rem_chunk_tokens, adder.page_size
    pages = -(-(len(fill_ids(req)) - prefix_length(req)) // page)
    return left is None or pages * page <= left


def admitted(adder: PrefillAdder) -> list[Req]:
    """Return the requests that joined the batch so far, in order."""
    return adder.can_run_list


def has_preempted(adder: PrefillAdder) -> bool:
    """Tell whether running requests were preempted for this batch."""
    return bool(adder.preempt_list)


def num_running(adder: PrefillAdder) -> int:
    """Return how many requests decode beside this batch."""
    running = adder.running_batch
    return 0 if running is None else len(running.reqs)

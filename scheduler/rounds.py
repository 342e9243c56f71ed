"""Scheduling rounds as background work sees them: one clock, one order of precedence.

Background work is what no client asked for. Each kind of it is a job. In every round the jobs are
asked in order, and the first that wants the round gets it: one step a round, so that a request never
waits for more than one step. All ranks of a tensor-parallel server must decide alike. What they decide
by is read once, at the beginning of the round, and handed to whoever needs it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sgl_blend.engine.objects import PrefillAdder, Req, ScheduleBatch, Scheduler, Verdict
from sgl_blend.engine.orders import is_flush_waiting, takes_background_work
from sgl_blend.engine.rounds import (
    admits_nobody,
    expect_room,
    has_cut_request,
    holds_back_tokens,
    is_decoding,
    let_prefill_follow,
    somebody_waits,
    take_out,
)
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.scheduler.build_budget import ServedTime
from sgl_blend.scheduler.internal_requests import AddReq, is_internal

QUIET_S = 0.05
MAX_QUIET_S = 1.0
"""After a prefill, background work leaves the machine alone for a moment: first tokens get out."""


class Clock(NamedTuple):
    """What the first rank told all ranks at the beginning of a round.

    Attributes:
        now_s: Its monotonic clock, in seconds.
        prefill_ended_s: When a client's prefill ended last, by that clock.
        may_run: Whether background work may run as far as operators are concerned.
    """

    now_s: float
    prefill_ended_s: float
    may_run: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One scheduling round.

    Attributes:
        now_s: The first rank's clock when the round began, in seconds.
        is_waited_in: Whether requests wait to be admitted.
        is_decoded_in: Whether requests decode.
        is_open: Whether a step may run at all: no operator is at work, no step and no cut prefill is
            running, and none ran in the round before while there are requests.
        holds_first_tokens: Whether SGLang has not looked at the result of a client's prefill. It
            looks at it after the next batch was launched, so a step would stand in front of it.
        quiet_until_s: Until when first tokens are on their way.
    """

    now_s: float
    is_waited_in: bool
    is_decoded_in: bool
    is_open: bool
    holds_first_tokens: bool
    quiet_until_s: float

    @property
    def is_busy(self) -> bool:
        """Whether requests are served."""
        return self.is_waited_in or self.is_decoded_in

    def must_keep_quiet(self, since_s: float) -> bool:
        """Tell whether work that has waited since then must let first tokens out."""
        if self.holds_first_tokens:
            return True
        return self.now_s < min(self.quiet_until_s, since_s + MAX_QUIET_S)


class BackgroundJob(Protocol):
    """One kind of background work; owned by the scheduler thread."""

    @property
    def num_pending(self) -> int:
        """How much waits for a free moment."""

    @property
    def is_running(self) -> bool:
        """Whether a step is in flight."""

    def owns(self, req: Req) -> bool:
        """Tell whether an internal request is a step of this job."""

    def collect(self, now_s: float | None) -> None:
        """See what became of the step in flight.

        Args:
            now_s: The first rank's clock; None outside of rounds, where nobody has read it.
        """

    def offer(self, now: Round) -> bool:
        """Put a step into the waiting queue if one may run; return whether the round is still free."""

    def withdraw(self, now: Round) -> bool:
        """Take the step back unless it was admitted; return whether it was."""

    def admit(self, req: Req, adder: PrefillAdder, add: AddReq) -> Verdict:
        """Admit a step of this job, or let the next request be tried."""

    def interrupt(self) -> None:
        """Note that the step in flight ended early, so that its duration tells nothing."""

    def forget(self) -> None:
        """Drop all that is pending: the cache was flushed, or the weights have changed."""


class Rounds:
    """Gives each round to at most one step of one job; owned by the scheduler thread.

    Args:
        scheduler: SGLang's Scheduler.
        tp_group: Whose first rank's clock counts.
        jobs: By precedence, the most urgent first.
        served: The time that pays for their steps; it goes by the clock of the rounds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tp_group: TPGroup,
        jobs: Sequence[BackgroundJob],
        served: ServedTime,
    ) -> None:
        self.jobs = tuple(jobs)
        self._scheduler = scheduler
        self._tp_group = tp_group
        self._served = served
        self._round: Round | None = None
        self._prefill_ended_s = -QUIET_S
        self._flush_may_wait = False
        self._step_ran = False
        self._had_steps = False

    def read_clock(self, *, needed: bool) -> Clock | None:
        """Read the clock of a round, once; None where no job is pending and nobody else needs it.

        Args:
            needed: Whether somebody else does; alike on all ranks.
        """
        if not (needed or self._has_work):
            return None
        now_s, ended_s, may_run = self._tp_group.agree(
            [time.monotonic(), self._prefill_ended_s, float(takes_background_work(self._scheduler))]
        )
        return Clock(now_s, ended_s, bool(may_run))

    @property
    def _has_work(self) -> bool:
        return any(job.num_pending or job.is_running for job in self.jobs)

    def begin(self, running_batch: ScheduleBatch, clock: Clock | None) -> None:
        """Take steps that have ended out of the running batch, and offer the next one for this round.

        Args:
            running_batch: What decodes.
            clock: Of this round.


        With SGLang's overlap schedule a prefill joins the running batch before its result is looked at.
        Requests of ours end with their prefill: they leave again, or each would cost a decode step.
        """
        had_steps, self._had_steps = self._had_steps, take_out(running_batch, is_internal)
        # With overlap a step that was taken out holds its memory until the next round.
        if had_steps or self._had_steps or not is_decoding(running_batch):
            expect_room(running_batch)
        if clock is None or not self._has_work:
            self._round, self._step_ran = None, False
            self._served.stop_clock()
            return
        for job in self.jobs:
            job.collect(clock.now_s)
        self._round = self._look(clock, running_batch)
        self._served.elapse(clock.now_s, busy=self._round.is_busy)
        for job in self.jobs:
            if not job.offer(self._round):
                return

    def _look(self, clock: Clock, running_batch: ScheduleBatch) -> Round:
        scheduler = self._scheduler
        waited, decoded = somebody_waits(scheduler), is_decoding(running_batch)
        rests = self._step_ran and (waited or decoded)
        self._step_ran = False
        is_running = any(job.is_running for job in self.jobs)
        return Round(
            now_s=clock.now_s,
            is_waited_in=waited,
            is_decoded_in=decoded,
            is_open=clock.may_run
            and not (rests or is_running or has_cut_request(scheduler))
            and not admits_nobody(running_batch),
            holds_first_tokens=holds_back_tokens(scheduler, is_internal),
            quiet_until_s=clock.prefill_ended_s + QUIET_S,
        )

    def end(self) -> None:
        """Take back what was offered and not admitted."""
        if self._round is not None:
            for job in self.jobs:
                self._step_ran |= job.withdraw(self._round)
            self._round = None

    def admit(self, req: Req, adder: PrefillAdder, add: AddReq) -> Verdict:
        """Admit an internal request: the job that it belongs to knows how."""
        return next(job for job in self.jobs if job.owns(req)).admit(req, adder, add)

    def let_prefill_follow(self) -> None:
        """Let a step not count as the prefill after which SGLang decodes for a while."""
        let_prefill_follow(self._scheduler, is_internal)

    def prefill_ended(self) -> None:
        """Note that a client's prefill has just ended, and its first token is on its way.

        Each rank reads its own clock. In a round only the first rank's reading counts.
        """
        self._prefill_ended_s = time.monotonic()

    def order_came(self) -> None:
        """Note that an order is about to be carried out; it may be a flush that waits."""
        self._flush_may_wait = True

    def flush_waits(self) -> bool:
        """Tell whether a flush with a timeout waits for the server to be idle, alike on all ranks.

        Each rank ends the waiting by its own clock. So while a flush may wait, the first rank tells.
        """
        if self._flush_may_wait:
            (waits,) = self._tp_group.agree([float(is_flush_waiting(self._scheduler))])
            self._flush_may_wait = bool(waits)
        return self._flush_may_wait

    def interrupt(self) -> None:
        """Note that the step in flight was ended by an order, so that its duration tells nothing."""
        for job in self.jobs:
            job.interrupt()

    def collect(self) -> None:
        """See what became of steps whose result was looked at outside of a round."""
        for job in self.jobs:
            job.collect(None)

    def forget(self) -> None:
        """Drop all that is pending."""
        for job in self.jobs:
            job.forget()

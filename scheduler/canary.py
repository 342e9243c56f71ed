"""The canary: some blended requests are prefilled in full as well, and the two answers compared.

A shadow is a request of the server's own with a client's prompt, in the client's exact namespace: the
distribution of its first token is what the client would have got without blending. It runs when
nobody waits, alone in its batch, a bounded step at a time, and is dropped where memory is short.

    client's last prefill step    picked: its row of logits is kept       consider, capture
    free rounds                   the prompt is prefilled in steps        offer, admit, withdraw
    after the last step          KL and agreement; too far: off          collect
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from sgl_blend.engine.adapters import Adapters
from sgl_blend.engine.admission import admitted, continue_verdict, fits_whole, was_admitted
from sgl_blend.engine.forward import next_token_logits
from sgl_blend.engine.objects import ModelOutput, PrefillAdder, Req, Scheduler, Verdict
from sgl_blend.engine.requests import has_finished, holds_kv, prompt_ids, rid_of, was_aborted
from sgl_blend.engine.rounds import leave_queue, put_first
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.metrics import CanaryMetrics
from sgl_blend.protocol.request import Overrides
from sgl_blend.radix_ext.chunk_store import ChunkStore
from sgl_blend.scheduler.internal_requests import AddReq, new_internal_request, secret_rid_prefix
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.scheduler.rounds import Round
from sgl_blend.scheduler.switch import BlendSwitch

logger = logging.getLogger(__name__)

_MAX_HELD = 8
"""Picked requests held at once; each keeps its tokens and a row of logits."""
_RETRY_S = 0.05
_WINDOW = 32
_LEAST_COMPARED = 8
"""The mean of the last 32 comparisons is judged, from the eighth on."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the first token of a blended answer is from full prefill's.

    Attributes:
        kl: KL(full || blended) over the whole vocabulary, in nats.
        agrees: Whether both hold the same token for the likeliest.
    """

    kl: float
    agrees: bool


def compare(full: torch.Tensor, blended: torch.Tensor) -> Comparison:
    """Compare two rows of logits in float64; waits for their device.

    Args:
        full: float [vocab_size], logits after a full prefill, as the model gives them.
        blended: Same shape and device, after a blended one.

    Returns:
        The comparison. A KL that is not a number counts as infinite.
    """
    log_p = full.double().log_softmax(dim=-1)
    log_q = blended.double().log_softmax(dim=-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    agrees = (full.argmax() == blended.argmax()).double()
    kl, same = torch.stack([terms.sum(), agrees]).tolist()
    return Comparison(kl=math.inf if math.isnan(kl) else max(0.0, kl), agrees=bool(same))


@dataclass(slots=True, eq=False)
class _Shadow:
    """A picked request.

    Attributes:
        token_ids: Its prompt, without separators.
        salt: The client's exact namespace.
        extra_key: SGLang's request class.
        since_s: Since when it could have run; None before the first free round.
        steps_left: How many more steps may be spent on it.
        blended: Row of logits that the client's first token was sampled from.
        full: Row of logits after the full prefill.
        req: The internal request of the current step.
    """

    token_ids: array[int]
    salt: str | None
    extra_key: str | None
    steps_left: int
    since_s: float | None = None
    blended: torch.Tensor | None = None
    full: torch.Tensor | None = None
    req: Req | None = None

    @property
    def step(self) -> Req:
        """The internal request of the current step, of which there is one."""
        assert self.req is not None, "the shadow was offered"
        return self.req


@dataclass(slots=True)
class _Offer:
    """A shadow's next step that stands in the waiting queue for one scheduling round."""

    shadow: _Shadow
    admitted: bool = False
    refused: bool = False


class Canary:
    """Picks blended requests, prefills them in full and switches blending off if they differ.

    Every picked request is compared or counted as skipped in the end. A pending shadow holds no memory
    of the pool, so dropping it is always safe.

    Args:
        scheduler: SGLang's Scheduler.
        store: The tree, to see how far a prompt is prefilled.
        switch: What it throws if the answers differ too much.
        step_tokens: Longest step, in tokens.
        metrics: Where comparisons are counted.
        tp_group: Whose first rank's comparison counts.
        adapters: A shadow whose adapter is gone has nothing to be compared with.
        own: The server's settings. Who asks for others has chosen the quality of that request alone.
        rate: Share of such requests to pick, in (0, 1].
        max_kl: Largest mean KL at which blending goes on, in nats.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: ChunkStore,
        switch: BlendSwitch,
        metrics: CanaryMetrics,
        tp_group: TPGroup,
        adapters: Adapters,
        *,
        step_tokens: int,
        own: Overrides,
        rate: float,
        max_kl: float,
    ) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._store = store
        self._switch = switch
        self._metrics = metrics
        self._tp_group = tp_group
        self._own = own.policy, own.ratio, own.slo_s
        self._rate = Fraction(str(rate))  # 0.1 ten times is 1, which floats would miss
        self._max_kl = max_kl
        self._due = Fraction(0)
        self._step_tokens = step_tokens
        self._picked: dict[str, _Shadow] = {}  # by the client's rid, until its forward ran
        self._pending: deque[_Shadow] = deque()
        self._offer: _Offer | None = None
        self._not_before_s = 0.0
        self._in_flight: _Shadow | None = None
        self._recent: deque[Comparison] = deque(maxlen=_WINDOW)
        self.rid_prefix = secret_rid_prefix("shadow", tp_group)
        self._serial = 0

    @property
    def num_pending(self) -> int:
        """Shadows waiting for a free moment."""
        return len(self._pending)

    @property
    def is_running(self) -> bool:
        """Whether SGLang is running a shadow."""
        return self._in_flight is not None

    # --- the blended request ---

    def consider(self, req: Req, state: RequestState, *, salt: str | None) -> None:
        """Pick a blended request whose last prefill step was admitted, if its turn has come.

        Turns are counted, not drawn: at rate 0.25 every fourth request is picked that reuses a chunk's
        KV by the server's own settings.

        Args:
            req: The request.
            state: Its state.
            salt: Namespace in which it would be prefilled in full.
        """
        is_own = (state.policy, state.ratio, state.slo_s) == self._own
        if not self._switch.is_on or not is_own or state.report.reused_tokens == 0:
            return
        self._due += self._rate
        if self._due < 1:
            return
        self._due -= 1
        held = len(self._picked) + len(self._pending) + (self._in_flight is not None)
        if held >= _MAX_HELD:
            self._metrics.skip()
            return
        num_steps = -(-state.num_tokens // self._step_tokens)
        self._picked[rid_of(req)] = _Shadow(
            token_ids=prompt_ids(req),
            salt=salt,
            extra_key=state.keys[0].extra_key,
            # Its KV may be evicted between two steps, but not for ever.
            steps_left=2 * num_steps + 1,
        )

    def capture(self, rids: list[str], output: ModelOutput) -> None:
        """Keep the logits that comparisons need; copies on the device and does not wait for it.

        Args:
            rids: The requests of the forward.
            output: Its ModelRunnerOutput, before sampling, which may change logits in place.
        """
        logits = next_token_logits(output)
        running = self._in_flight
        for row, rid in enumerate(rids):
            shadow = self._picked.pop(rid, None)
            if shadow is not None:
                shadow.blended = logits[row].clone()
                self._pending.append(shadow)
            elif running is not None and rid == rid_of(running.step) and _is_last_step(running):
                running.full = logits[row].clone()

    # --- the shadow ---

    def owns(self, req: Req) -> bool:
        """Tell whether an internal request is a step of a shadow."""
        return rid_of(req).startswith(self.rid_prefix)

    def interrupt(self) -> None:
        """Note that the step in flight ended early; nobody times a shadow."""

    def collect(self, now_s: float | None) -> None:
        """See what became of the step in flight, and judge the last one.

        Between rounds every admitted step holds KV, has ended, or has given its KV back: retracted
        into the queue, or aborted.
        """
        shadow = self._in_flight
        if shadow is None or (holds_kv(shadow.step) and not has_finished(shadow.step)):
            return
        self._in_flight = None
        leave_queue(self._scheduler, shadow.step)
        if shadow.blended is None:
            return  # dropped meanwhile, and counted then
        if not has_finished(shadow.step) or was_aborted(shadow.step):
            self._metrics.skip()
        elif shadow.full is not None:
            self._judge(shadow)
        elif shadow.steps_left > 0:
            self._pending.appendleft(shadow)
        else:
            self._metrics.skip()

    def offer(self, now: Round) -> bool:
        """Put a shadow's next step into the waiting queue if nobody waits and it may run."""
        if not now.is_open or now.is_waited_in or not self._pending:
            return now.is_open
        for waiting in self._pending:
            waiting.since_s = now.now_s if waiting.since_s is None else waiting.since_s
        fits = self._adapters.fitting()
        fitting = (one for one in self._pending if fits is None or fits(one.extra_key))
        if (shadow := next(fitting, None)) is None:
            return True
        if self._adapters.is_gone(shadow.extra_key):
            self._pending.remove(shadow)
            self._metrics.skip()
            return True
        since_s = now.now_s if shadow.since_s is None else shadow.since_s
        if now.now_s < self._not_before_s or now.must_keep_quiet(since_s):
            return False
        shadow.req = self._new_step(shadow)
        self._offer = _Offer(shadow)
        put_first(self._scheduler, shadow.step)
        return False

    def admit(self, req: Req, adder: PrefillAdder, add: AddReq) -> Verdict:
        """Admit a shadow's step if it has the batch to itself and all of it fits.

        A step that is not admitted never closes the batch for the requests after it.
        """
        offer = self._offer
        if offer is None or offer.shadow.req is not req or admitted(adder):
            return continue_verdict()
        if fits_whole(req, adder):
            verdict = add(req)
            if was_admitted(req, adder):
                offer.admitted = True
                return verdict
        offer.refused = True
        return continue_verdict()

    def withdraw(self, now: Round) -> bool:
        """Take back what offer() put into the waiting queue; return whether it was admitted instead."""
        if self._offer is None:
            return False
        offer, self._offer = self._offer, None
        if offer.admitted:
            self._pending.remove(offer.shadow)
            self._in_flight = offer.shadow
            self._in_flight.steps_left -= 1
            return True
        leave_queue(self._scheduler, offer.shadow.step)
        self._not_before_s = now.now_s + _RETRY_S
        if offer.refused:
            self._pending.remove(offer.shadow)
            self._metrics.skip()
        return False

    def forget(self) -> None:
        """Forget all that was picked: the cache was flushed, the weights or the setting changed."""
        num_dropped = len(self._picked) + len(self._pending)
        self._picked.clear()
        self._pending.clear()
        running = self._in_flight
        if running is not None and running.blended is not None:
            running.blended = None  # it ends like any request, and is not compared
            num_dropped += 1
        for _ in range(num_dropped):
            self._metrics.skip()

    def _new_step(self, shadow: _Shadow) -> Req:
        """Make the request that prefills a shadow's prompt further, at most to its end."""
        found = self._store.find_prefix(
            shadow.token_ids,
            salt=shadow.salt,
            extra_key=shadow.extra_key,
            limit=len(shadow.token_ids) - 1,
        )
        self._serial += 1
        return new_internal_request(
            self._scheduler,
            f"{self.rid_prefix}{self._serial}",
            shadow.token_ids[: len(found) + self._step_tokens],
            salt=shadow.salt,
            extra_key=shadow.extra_key,
        )

    # --- the judgement ---

    def _judge(self, shadow: _Shadow) -> None:
        assert shadow.full is not None
        assert shadow.blended is not None
        found = compare(shadow.full, shadow.blended)
        kl, agrees = self._tp_group.agree([found.kl, found.agrees])
        comparison = Comparison(kl=kl, agrees=bool(agrees))
        self._recent.append(comparison)
        self._metrics.add(kl=comparison.kl, agrees=comparison.agrees)
        logger.debug("%s: %s", rid_of(shadow.step), comparison)
        if len(self._recent) >= _LEAST_COMPARED and self._mean_kl() > self._max_kl:
            self._trip()

    def _trip(self) -> None:
        self._metrics.trip()
        self._switch.turn_off()
        logger.error(
            "sgl-blend: the canary switched blending off, because the last %d blended answers are "
            "%.3g nats from full prefill in the mean, --blend-canary-max-kl allows %g, and agree "
            "with it on %.0f %% of the first tokens; restart the server with a higher "
            "--blend-recompute-ratio or another --blend-policy",
            len(self._recent),
            self._mean_kl(),
            self._max_kl,
            100 * self._agreement(),
        )

    def _mean_kl(self) -> float:
        return sum(comparison.kl for comparison in self._recent) / len(self._recent)

    def _agreement(self) -> float:
        return sum(comparison.agrees for comparison in self._recent) / len(self._recent)

    def describe(self) -> dict[str, Any]:
        """Return settings and figures for /server_info; the means are over the last comparisons."""
        return {
            "rate": float(self._rate),
            "max_kl": self._max_kl,
            "compared": self._metrics.compared,
            "skipped": self._metrics.skipped,
            "pending": self.num_pending,
            "mean_kl": self._mean_kl() if self._recent else None,
            "agreement": self._agreement() if self._recent else None,
            "tripped": not self._switch.is_on,
        }


def _is_last_step(shadow: _Shadow) -> bool:
    return len(prompt_ids(shadow.step)) == len(shadow.token_ids)

"""Pieces of a prompt that are prefilled while chunks after them are on their way from storage.

Blending is causal. So what stands before a chunk that is awaited can be prefilled now. A piece is an
internal request with the first tokens of the prompt, in the request's own namespace. It reuses chunks
as the request would. When it ends, the tree holds its KV, and the request finds it as its prefix.

    [system prompt][chunk 1][chunk 2][chunk 3 ...............][question]
    ├──── piece, while chunk 3 comes ───┤├──── the request ────────────┤

Nothing of a piece stays with SGLang after its one forward. If its KV is evicted before the request is
admitted, the request computes it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_blend.engine.admission import continue_verdict, fits_whole, was_admitted
from sgl_blend.engine.objects import PrefillAdder, Req, Scheduler, Verdict
from sgl_blend.engine.requests import (
    has_finished,
    holds_kv,
    logprobs_from,
    prompt_ids,
    rid_of,
    step_range,
    was_aborted,
)
from sgl_blend.engine.rounds import is_queued, leave_queue, pool_capacity, put_before, uncut_length
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.radix_ext.chunk_store import ChunkStore
from sgl_blend.scheduler.internal_requests import AddReq, new_internal_request, secret_rid_prefix
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.request_state import ATTRIBUTE, Ahead, RequestState, state_of
from sgl_blend.scheduler.rounds import Round


@dataclass(slots=True, eq=False)
class _Piece:
    """The first tokens of a prompt.

    Attributes:
        owner: The request whose prompt it is.
        state: Its state.
        req: What prefills them.
        start: Where its forward begins.
    """

    owner: Req
    state: RequestState
    req: Req
    start: int = 0


class Pieces:
    """Prefills pieces; a BackgroundJob, though clients wait for it. Owned by the scheduler thread.

    Args:
        scheduler: SGLang's Scheduler.
        store: Where their KV goes.
        model: Whose namespaces they are in.
        tp_group: Whose ranks agree on the ids of requests.
        num_layers: Of the model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: ChunkStore,
        model: LoadedModel,
        tp_group: TPGroup,
        *,
        num_layers: int,
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._model = model
        self._num_layers = num_layers
        # SGLang must not cut a piece: a flush would wait for the rest of it.
        self._most_tokens = uncut_length(scheduler, pool_capacity(scheduler))
        self.rid_prefix = secret_rid_prefix("piece", tp_group)
        self._serial = 0
        self._offered: dict[str, _Piece] = {}
        self._in_flight: dict[str, _Piece] = {}
        self._wanted: dict[str, Callable[[], _Piece]] = {}
        self.num_run = 0

    def want(self, req: Req, state: RequestState, border: int) -> bool:
        """Prefill a prompt up to a border, unless a piece of it is running or it is there already.

        Args:
            req: A request that waits for KV after the border.
            state: Its state.
            border: Tokens of the prompt before the first chunk that is awaited.

        Returns:
            Whether it is there.
        """
        rid = rid_of(req)
        if rid in self._in_flight:
            return False
        if (wanted_from := logprobs_from(req)) is not None:
            border = min(border, wanted_from)  # SGLang takes no longer prefix
        tokens, extra_key = prompt_ids(req), state.keys[0].extra_key
        salt = state.blended_namespace(self._model)
        done = self._store.stored_tokens(tokens[:border], salt=salt, extra_key=extra_key)
        stop = self._store.whole_pages(min(border, done + self._most_tokens))
        if stop <= done:
            return True

        def make() -> _Piece:
            self._serial += 1
            name = f"{self.rid_prefix}{self._serial}"
            piece = new_internal_request(
                self._scheduler,
                name,
                tokens[:stop],
                salt=salt,
                extra_key=extra_key,
                apart=False,
            )
            if (begun := state.up_to(stop)) is not None:
                setattr(piece, ATTRIBUTE, begun)
            return _Piece(req, state, piece)

        self._wanted[rid] = make
        return False

    def is_running_for(self, rid: str) -> bool:
        """Tell whether a piece of a request's prompt is in flight."""
        return rid in self._in_flight

    @property
    def num_pending(self) -> int:
        """Pieces that wait for a round."""
        return len(self._wanted)

    @property
    def is_running(self) -> bool:
        """Whether a piece is in flight."""
        return bool(self._in_flight)

    def owns(self, req: Req) -> bool:
        """Tell whether an internal request is a piece."""
        return rid_of(req).startswith(self.rid_prefix)

    def collect(self, now_s: float | None) -> None:
        """Tell requests what was done for them by pieces that have ended."""
        for rid, piece in list(self._in_flight.items()):
            req = piece.req
            ended = has_finished(req)
            if not ended and (holds_kv(req) or is_queued(self._scheduler, req)):
                continue
            del self._in_flight[rid]
            if ended and not was_aborted(req):
                self.num_run += 1
                piece.state.ahead.append(self._what_was_done(piece))

    def _what_was_done(self, piece: _Piece) -> Ahead:
        stop, state = len(prompt_ids(piece.req)), state_of(piece.req)
        if state is not None:
            return Ahead(piece.start, stop, state.report, state.hit_starts, state.missing)
        return Ahead.computed(piece.start, stop, self._num_layers)

    def offer(self, now: Round) -> bool:
        """Put pieces into the waiting queue, each before its request.

        Returns:
            Whether the round is free for background work.
        """
        for rid, make in self._wanted.items():
            piece = self._offered[rid] = make()
            put_before(self._scheduler, piece.req, piece.owner)
        self._wanted.clear()
        return not self._offered

    def withdraw(self, now: Round) -> bool:
        """Take back what was not admitted; no round rests because of pieces."""
        for piece in self._offered.values():
            leave_queue(self._scheduler, piece.req)
        self._offered.clear()
        return False

    def admit(self, req: Req, adder: PrefillAdder, add: AddReq) -> Verdict:
        """Admit a piece if the batch holds all of it; others are not held up by it."""
        verdict = add(req) if fits_whole(req, adder) else continue_verdict()
        if not was_admitted(req, adder):
            return continue_verdict()
        for rid, piece in list(self._offered.items()):
            if piece.req is req:  # one that was retracted and came back is in flight already
                self._in_flight[rid] = self._offered.pop(rid)
        for piece in self._in_flight.values():
            if piece.req is req:
                piece.start, _ = step_range(req)
        return verdict

    def interrupt(self) -> None:
        """Nothing is timed."""

    def forget(self) -> None:
        """Run nothing that is not in flight."""
        self._wanted.clear()

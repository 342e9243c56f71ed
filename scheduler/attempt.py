"""One try to admit one request into the batch that is put together."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_blend.engine.admission import was_admitted
from sgl_blend.engine.objects import PrefillAdder, Req, Verdict
from sgl_blend.fusion.plan import StepPlan
from sgl_blend.scheduler.internal_requests import AddReq
from sgl_blend.scheduler.request_state import RequestState


@dataclass(slots=True)
class AdmissionAttempt:
    """One try to admit one request into the batch that is put together.

    Attributes:
        req: The request, matched against the tree.
        state: Its state; the plan and its locks go there.
        adder: Puts the batch together.
        add: Admission of any request, of the server's own too.
        step: What the admitted step reuses; None if nothing.
    """

    req: Req
    state: RequestState
    adder: PrefillAdder
    add: AddReq
    step: StepPlan | None = None

    def run(self) -> Verdict:
        """Let SGLang try."""
        return self.add(self.req)

    @property
    def succeeded(self) -> bool:
        """Whether the request is the last that joined the batch."""
        return was_admitted(self.req, self.adder)

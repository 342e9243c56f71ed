"""Names of the parts of a blended prefill, as torch.profiler shows them.

SGLang's own profiler (``/start_profile``) records them on a running server, the device's part of each
included; ``sgl-blend bench profile`` adds them up. Without a profiler a mark costs a microsecond.
"""

from contextlib import AbstractContextManager
from enum import StrEnum

from torch.profiler import record_function

PREFIX = "sgl_blend."


class Phase(StrEnum):
    """A part of a blended prefill; a part inside another one is not counted in that."""

    MATCH = "match"
    PLAN = "plan"
    COPY = "copy"
    FULL_LAYERS = "full layers"
    CHECK_LAYER = "check layer"
    SELECTION = "selection"
    SHRUNK_LAYERS = "shrunk layers"
    LOGITS = "logits"


def phase(which: Phase) -> AbstractContextManager[object]:
    """Mark what runs in a with block as a phase."""
    return record_function(PREFIX + which)

"""Moves cached KV to where a request wants it, in all layers at once, before those layers run.

What is copied does not depend on which rows a policy selects: every row that may be dropped gets its
cached KV, and a row that is kept writes its fresh KV over it. So on a GPU the copy runs on a stream of
its own while the layers up to the check layer compute, and nothing waits for the selection.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from sgl_blend.fusion.layouts.base import Copy, KVLayout


class KVCopier:
    """Copies KV inside the pool; owned by the thread that runs forwards.

    Args:
        layout: The model's KV.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._stream: torch.cuda.Stream | None = None
        if layout.is_on_gpu:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy now: what runs next on this stream finds the KV in place."""
        for one in copies:
            self._layout.copy(one)

    def start(self, copies: Sequence[Copy]) -> None:
        """Copy beside what this stream does next; only after ``wait`` is the KV in place.

        The caller keeps the tensors of the copies until then.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.copy(copies)

    def wait(self) -> None:
        """Let this stream wait for what was started."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

"""Moves cached KV to where a request wants it, in all layers at once, before those layers run.

What is copied does not depend on which rows a policy selects: every row that may be dropped gets its
cached KV, and a row that is kept writes its fresh KV over it. So on a GPU the copy runs on a stream of
its own while the layers up to the check layer compute, and nothing waits for the selection.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from sgl_blend.engine.tiers import LayerLoads
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
        self._started: torch.cuda.Event | None = None

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
        if self._stream is not None:
            self._started = self._stream.record_event()

    def wait(self) -> None:
        """Let this stream wait for what was started, not for copies that follow a load."""
        if self._started is not None:
            torch.cuda.current_stream().wait_event(self._started)

    def follow(self, copies: Sequence[Copy], loads: LayerLoads) -> "FollowingCopies":
        """Copy KV that is still being loaded, each layer once it is there.

        The caller keeps the tensors of the copies until the last layer was waited for.
        """
        return FollowingCopies(self._layout, self._stream, copies, loads)


class FollowingCopies:
    """Copies that follow a load layer after layer, beside the forward that reads them.

    On a GPU all of them are queued at once on the copier's stream; nothing waits on the host. On a CPU
    each is made when its layer is waited for.

    Args:
        layout: The model's KV.
        stream: To copy on; None on a CPU.
        copies: What is copied.
        loads: What must be there before.
    """

    def __init__(
        self,
        layout: KVLayout,
        stream: torch.cuda.Stream | None,
        copies: Sequence[Copy],
        loads: LayerLoads,
    ) -> None:
        self._stream = stream
        self._loads = loads
        self._events: dict[int, torch.cuda.Event] = {}
        if stream is None:
            self._copies = [(one.layers, layout.layer_copy(one)) for one in copies]
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for layer in sorted({layer for one in copies for layer in one.layers}):
                loads.wait(layer)
                for one in copies:
                    if layer in one.layers:
                        layout.copy(replace(one, layers=range(layer, layer + 1)))
                self._events[layer] = stream.record_event()

    def wait(self, layer: int) -> None:
        """Let this stream wait until a layer has everything that was copied; once for each layer."""
        if self._stream is not None:
            if layer in self._events:
                torch.cuda.current_stream().wait_event(self._events[layer])
            return
        self._loads.wait(layer)
        for layers, copy in self._copies:
            if layer in layers:
                copy(layer)

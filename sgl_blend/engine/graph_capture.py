"""CUDA graphs as SGLang captures its own: its memory pool, its stream and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from sgl_blend.engine.objects import ServerArgs
from sgl_blend.engine.tp_group import TPGroup

_Result = TypeVar("_Result")

_WARM_UPS = 2
"""Runs before a capture, as many as SGLang's: kernels are compiled and workspaces taken in them."""


def graphs_may_be_paused(args: ServerArgs) -> bool:
    """Tell whether the memory of graphs is released with the server's, as an operator may wish.

    SGLang then captures through the library that pauses memory, and so would have to be followed.
    """
    from sglang.srt.utils import get_bool_env_var

    wanted = bool(getattr(args, "enable_memory_saver", False))
    return wanted and bool(get_bool_env_var("SGLANG_MEMORY_SAVER_CUDA_GRAPH"))


class CudaRecorder:
    """Captures functions as CUDA graphs; all ranks must capture the same, in the same order.

    Args:
        tp_group: Of the server. Where one rank fails, the others fail with it and do not wait.
    """

    def __init__(self, tp_group: TPGroup) -> None:
        self._tp_group = tp_group
        self._stream: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Stand around all captures."""
        from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

        set_graph_pool_id(_memory_pool())
        shared = _of_pool("get_or_create_global_graph_capture_stream")
        stream = None if shared is None else shared()
        with model_capture_mode(), graph_capture(stream=stream) as context:
            self._stream = context.stream
            yield
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def record(self, body: Callable[[], _Result]) -> Callable[[], _Result]:
        """Capture a function, inside of a session.

        Args:
            body: Reads and writes tensors that stay where they are, and asks nothing of the device.

        Returns:
            What runs it again on the values that the tensors have then. The results lie in the same
            memory each time.
        """

        def warm_up() -> None:
            body()
            torch.cuda.synchronize()

        def capture() -> _Result:
            with (
                _scope("graph_pool_capture_scope"),
                torch.cuda.graph(graph, pool=_memory_pool(), stream=self._stream),
            ):
                return body()

        for _ in range(_WARM_UPS):
            self._tp_group.together(warm_up)
        graph = torch.cuda.CUDAGraph()
        result = self._tp_group.together(capture)

        def replay() -> _Result:
            with _scope("graph_pool_replay_scope"):
                graph.replay()
            return result

        return replay


def _memory_pool() -> Any:
    """Return the pool of SGLang's own graphs: no two of them run at once, so one memory is enough."""
    from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool

    return get_or_create_global_graph_memory_pool(torch.cuda)


def _scope(name: str) -> AbstractContextManager[None]:
    """Enter what SGLang wants around a capture or replay, since 0.5.21: others borrow from the pool."""
    scope = _of_pool(name)
    entered: AbstractContextManager[None] = nullcontext() if scope is None else scope()
    return entered


def _of_pool(name: str) -> Any:
    from sglang.srt.model_executor.runner_utils import pool

    return getattr(pool, name, None)

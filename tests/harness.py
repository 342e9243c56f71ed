"""The real SGLang scheduler, pool and model, stepped by hand in a process of their own.

`Engine` in the test process starts a worker; `Engine.call` runs a module-level function there with a
`Driver`, which holds SGLang's Scheduler and does what its event loops do, one step at a time. Tests
so see KV bytes, locks and the order of things, which no client could. Nothing of SGLang is replaced:
its memory check runs at every idle step and raises.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver import Driver, namespace_of
from forked import FORK_SERVER, PATIENCE_S, start_fork_server
from prompts import Answer, Prompt, largest_difference, rag_prompt, random_tokens

if TYPE_CHECKING:
    import torch

__all__ = [  # with what every test of an engine needs beside it
    "Answer",
    "Driver",
    "Engine",
    "Prompt",
    "Ranks",
    "engine_settings",
    "largest_difference",
    "namespace_of",
    "rag_prompt",
    "random_tokens",
    "run_with",
    "watch_rows",
]

ENGINE_ARGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "log_level": "error",
    "max_total_tokens": 6000,
    "max_running_requests": 64,
    "random_seed": 0,
    "mem_fraction_static": 0.3,
    "watchdog_timeout": 1e6,  # nobody steps an engine while another one is tested
    # For a GPU: tools/gpu_run.py.
    **json.loads(os.environ.get("BLEND_TEST_ENGINE", "{}")),
}


def engine_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Merge settings over the CPU's; enable_blend=None stands for a process without the plugin."""
    # Called in the test process, not in the worker: a stock one has nothing of sgl-blend.
    from sgl_blend.commands.common.cpu import CPU_SETTINGS

    merged = {**CPU_SETTINGS, **ENGINE_ARGS, **settings}
    is_stock = settings.get("enable_blend", False) is None
    return {
        name: value
        for name, value in merged.items()
        if value is not None and not (is_stock and name.startswith("blend_"))
    }


class Engine:
    """A worker process with a Driver, from the test's side."""

    def __init__(self, model: Path, *, rank: int = 0, wait: bool = True, **settings: Any) -> None:
        from sgl_blend.commands.common.ports import reserve_port

        settings = {"model_path": str(model), "nccl_port": reserve_port(), **settings}
        self._pipe, far_end = FORK_SERVER.Pipe()
        work = (far_end, engine_settings(settings), rank, dict(os.environ))
        start_fork_server()
        self._process = FORK_SERVER.Process(target=_serve, args=work, daemon=True)
        self._process.start()
        far_end.close()
        if wait:
            self.receive()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run function(driver, *args) in the worker and return what it returns."""
        self.send(function, *args)
        return self.receive()

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call and do not wait for it."""
        self._pipe.send((function, args))

    def ask(self, *prompts: Prompt) -> list[Answer]:
        answers: list[Answer] = self.call(_ask, *prompts)
        return answers

    def settle(self) -> None:
        self.call(Driver.settle)

    def flush(self) -> None:
        self.call(_settle_and_flush)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def receive(self) -> Any:
        """Wait for the start or for the call that was sent last, and return its result."""
        try:
            assert self._pipe.poll(PATIENCE_S), f"no result in {PATIENCE_S} s: the worker hangs"
            error, result = self._pipe.recv()
        except EOFError:
            raise AssertionError("the scheduler process died") from None
        if error is not None:
            raise AssertionError(f"in the scheduler process:\n{error}")
        return result


class Ranks:
    """The workers of one tensor-parallel engine, which must do everything together."""

    def __init__(self, model: Path, size: int, **settings: Any) -> None:
        from sgl_blend.commands.common.ports import reserve_port

        together = {"tp_size": size, "nccl_port": reserve_port(), **settings}
        self.engines = [Engine(model, rank=rank, wait=False, **together) for rank in range(size)]
        for engine in self.engines:
            engine.receive()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run function(driver, *args) in all workers and return each one's result."""
        for engine in self.engines:
            engine.send(function, *args)
        return [engine.receive() for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _ask(driver: Driver, *prompts: Prompt) -> list[Answer]:
    return driver.ask(*prompts)


def _settle_and_flush(driver: Driver) -> None:
    driver.settle()
    driver.flush()


def _serve(pipe: Any, settings: dict[str, Any], rank: int, environment: dict[str, str]) -> None:
    import warnings

    os.environ.clear()
    os.environ.update(environment)  # the fork server has that of its own start
    warnings.simplefilter("ignore")
    try:
        driver = Driver(settings, rank)
    except BaseException:  # noqa: BLE001 - whatever it is, the test process must see it
        pipe.send((traceback.format_exc(), None))
        os._exit(1)
    pipe.send((None, None))
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((None, function(driver, *args)))
        except BaseException:  # noqa: BLE001 - as above
            pipe.send((traceback.format_exc(), None))
    os._exit(0)


@contextmanager
def watch_rows(driver: Driver) -> Iterator[list[int]]:
    """Note how many rows every MLP of the model computes."""
    rows: list[int] = []

    def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        rows.append(args[0].shape[0])

    layers = driver.scheduler.tp_worker.model_runner.model.model.layers
    handles = [layer.mlp.register_forward_pre_hook(note) for layer in layers]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def run_with(settings: Sequence[str], module: str) -> None:
    """Start this program anew, unless it has these settings of the environment already.

    Args:
        settings: Each NAME=value, such as glibc reads when a process starts.
        module: Which the program runs.
    """
    wanted = dict(setting.split("=") for setting in settings)
    if not wanted.items() <= os.environ.items():
        again = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **wanted})

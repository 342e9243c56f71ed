"""Programs of SGLang in processes that have imported SGLang before they began.

An import of SGLang takes ten seconds of CPU time, and a server imports it in three processes. Here one
process imports it for all tests of a run, and each program is a fork of that process. A forked server
has processes of its own, with parent, group and signals as `python -m sglang.launch_server` gives them.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver, process, spawn
from pathlib import Path
from socket import AF_UNIX, socket
from types import SimpleNamespace
from typing import IO, Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

PATIENCE_S = 580
"""Longest wait for a program or for a call into an engine."""

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "sglang.srt.managers.scheduler",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.models.registry",
        "preload",  # of this folder, and last
    ]
)


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Return where forks keep the byte code of our modules, until this process ends."""
    return tempfile.TemporaryDirectory(prefix="sgl-blend-compiled-")


def start_fork_server() -> None:
    """Start the fork server unless it runs, with this folder among those it imports from."""
    folders = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        patch.setenv("FORKS_COMPILED", _compiled().name)
        forkserver.ensure_running()


def run_forked(function: Callable[..., Any], *args: Any) -> tuple[int, str]:
    """Run a program's function in a process that has imported SGLang and nothing of ours.

    Returns:
        Its exit status, as that of a script, and everything it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        work = (function, args, str(log), {**os.environ, "PYTHONWARNINGS": "ignore"})
        start_fork_server()
        program = FORK_SERVER.Process(target=_run, args=work)
        program.start()
        program.join(PATIENCE_S)
        if program.exitcode is None:
            program.kill()
            program.join()
        return program.exitcode or 0, log.read_text(errors="replace")


def run_program(
    command: Sequence[str], cwd: Path, *, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, offline, and keep what it printed.

    Args:
        command: `python -m module ...` or `python program.py ...`.
        cwd: Its folder.
        timeout_s: After so long it is killed.
        environment: Further variables of its processes.

    Returns:
        As subprocess.run's; the exit status is the caller's to judge.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        with paths[0].open("w") as stdout, paths[1].open("w") as stderr:
            program = ForkedProgram(
                command,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
                start_new_session=True,
            )
        try:
            status = program.wait(timeout_s)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, status, *(path.read_text() for path in paths))


class ForkedProgram:
    """What subprocess.Popen is for a Python program, forked.

    Args:
        command: `[env NAME=VALUE ...] python`, then `-m module` or a file, then arguments.
        stdout: File for what it prints.
        stderr: File for what else it prints; the same by default.
        cwd: Its folder.
        env: Its environment; this process's by default.
        rest: Popen's arguments of a program without input, in a session of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[Any],
        stderr: IO[Any] | int = subprocess.STDOUT,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        **rest: Any,
    ) -> None:
        assert rest.pop("start_new_session")
        assert set(rest) <= {"stdin"}
        environment = dict(os.environ if env is None else env)
        words = list(command)
        if words[0] == "env":
            end = words.index(sys.executable)
            settings = [word.partition("=") for word in words[1:end]]
            environment.update({name: value for name, _, value in settings})
            words = words[end:]
        assert words[0] == sys.executable, f"not a program of Python: {words}"
        logs = [stdout.name, stdout.name if isinstance(stderr, int) else stderr.name]
        work = (words[1:], logs, str(cwd), environment)
        start_fork_server()
        self._process = FORK_SERVER.Process(target=_serve, args=work, daemon=True)
        self._process.start()
        self.pid: int = self._process.ident or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self._process.exitcode


def fork_servers(patch: pytest.MonkeyPatch) -> None:
    """Let the package's commands start their servers as forks, in this process."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProgram})
    patch.setattr("sgl_blend.commands.common.server.subprocess", forking)


def _serve(
    words: Sequence[str], logs: Sequence[str], folder: str, environment: dict[str, str]
) -> None:
    os.setsid()
    os.chdir(folder)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    _begin(logs, environment)
    _fork_children_from_here()
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    if words[:2] == ["-m", "sgl_blend"]:
        fork_servers(pytest.MonkeyPatch())
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _run(
    function: Callable[..., Any], args: Sequence[Any], log: str, environment: dict[str, str]
) -> None:
    _begin([log, log], environment)
    function(*args)


def _begin(logs: Sequence[str], environment: dict[str, str]) -> None:
    """Print into files, in an environment that is not the fork server's."""
    for number, log in enumerate(logs, 1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    _enter(environment)


def _enter(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # which OpenMP has read when torch was imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _fork_children_from_here() -> None:
    """Make this process a main process, whose children are forks of what it is now.

    SGLang asks for children by "spawn". They come from a fork server that is itself a fork of this
    process, so they are descendants of this process, in its group, and end with it.
    """
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    _hand_environment_over()
    state: Any = forkserver._forkserver
    alive, state._forkserver_alive_fd = os.pipe()
    with socket(AF_UNIX) as listener:
        state._forkserver_address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(state._forkserver_address)
        listener.listen()
        state.ensure_running = lambda: None  # here and in all that is forked from here
        pid = os.fork()
        if pid == 0:
            _serve_forks(listener.fileno(), alive)
    os.close(alive)
    _spare(pid)
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method(
        "forkserver", force=force
    )


def _hand_environment_over() -> None:
    """Let children have the environment of their parent when it starts them, as spawned ones do."""
    if spawn.prepare.__module__ == __name__:
        return  # this program was started by a forked one
    describe, prepare = spawn.get_preparation_data, spawn.prepare

    def describe_with_environment(name: str) -> dict[str, Any]:
        return {**describe(name), "environment": dict(os.environ)}

    def prepare_with_environment(data: Any) -> None:
        _enter(data.pop("environment"))
        prepare(data)

    spawn.get_preparation_data = describe_with_environment
    spawn.prepare = prepare_with_environment


def _spare(pid: int) -> None:
    """Let SGLang, which kills all children of an engine that ends, not find one of them."""
    process_class: Any = psutil.Process
    children = process_class.children

    def all_but_one(self: Any, recursive: bool = False) -> list[Any]:
        return [child for child in children(self, recursive) if child.pid != pid]

    process_class.children = all_but_one


def _serve_forks(listener: int, alive: int) -> None:
    """Fork the children of the parent process until it has ended."""
    me = os.getpid()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]

    def on_signal(signum: int, frame: object) -> None:
        if os.getpid() != me:  # a child, which has SGLang's own way with signals
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif signum == signal.SIGQUIT:  # what a scheduler that dies sends to its parent
            os.kill(os.getppid(), signum)

    for signum in (signal.SIGQUIT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)

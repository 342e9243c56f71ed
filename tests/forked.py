"""Programs of SGLang in processes that have imported SGLang before they began.

An import of SGLang takes ten seconds of CPU time, and a server imports it in three processes. Here one
process imports it for all tests of a run, and each program is a fork of that process. A forked server
has processes of its own, with parent, group and signals as `python -m sglang.launch_server` gives them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver, process
from pathlib import Path
from socket import AF_UNIX, socket
from typing import IO, Any

PATIENCE_S = 580
"""Longest wait for a program or for a call into an engine."""

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "sglang.srt.managers.scheduler",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.models.registry",
    ]
)


def run_forked(function: Callable[..., Any], *args: Any) -> tuple[int, str]:
    """Run a program's function in a process that has imported SGLang and nothing of ours.

    Returns:
        Its exit status, as that of a script, and everything it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        work = (function, args, str(log), {**os.environ, "PYTHONWARNINGS": "ignore"})
        program = FORK_SERVER.Process(target=_run, args=work)
        program.start()
        program.join(PATIENCE_S)
        if program.exitcode is None:
            program.kill()
            program.join()
        return program.exitcode or 0, log.read_text(errors="replace")


class ForkedServer:
    """What subprocess.Popen is for `[env NAME=VALUE ...] python -m module flags`, forked.

    Args:
        command: Of the server.
        stdout: File for everything it prints.
        cwd: Its folder.
        env: Its environment; this process's by default.
        rest: Popen's arguments of a server: no input, one log, a session of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[Any],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        **rest: Any,
    ) -> None:
        assert rest.pop("start_new_session")
        assert set(rest) <= {"stdin", "stderr"}
        environment = dict(os.environ if env is None else env)
        words = list(command)
        if words[0] == "env":
            end = words.index(sys.executable)
            settings = [word.partition("=") for word in words[1:end]]
            environment.update({name: value for name, _, value in settings})
            words = words[end:]
        assert words[:2] == [sys.executable, "-m"], f"not a module of Python: {words}"
        work = (words[2:], stdout.name, str(cwd), environment)
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
            raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
        return self._process.exitcode


def _serve(words: Sequence[str], log: str, folder: str, environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    _fork_children_from_here()
    sys.argv = list(words)
    _run(_run_module, (words[0],), log, environment)


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run(
    function: Callable[..., Any], args: Sequence[Any], log: str, environment: dict[str, str]
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()  # the fork server has that of its own start
    os.environ.update(environment)
    function(*args)


def _fork_children_from_here() -> None:
    """Make this process a main process, whose children are forks of what it is now.

    SGLang asks for children by "spawn". They come from a fork server that is itself a fork of this
    process, so they are descendants of this process, in its group, and end with it.
    """
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    state: Any = forkserver._forkserver
    alive, state._forkserver_alive_fd = os.pipe()
    with socket(AF_UNIX) as listener:
        state._forkserver_address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(state._forkserver_address)
        listener.listen()
        state.ensure_running = lambda: None  # here and in all that is forked from here
        if os.fork() == 0:
            _serve_forks(listener.fileno(), alive)
    os.close(alive)
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method(
        "forkserver", force=force
    )


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

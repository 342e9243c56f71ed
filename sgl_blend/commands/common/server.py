"""Start a real SGLang server as its own process, wait until it answers, and stop it again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx

from sgl_blend.commands.common.cpu import CPU_FLAGS
from sgl_blend.commands.common.ports import reserve_port
from sgl_blend.errors import CommandError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 600.0

CPU_SERVER_FLAGS = (
    *CPU_FLAGS,
    *("--max-total-tokens", "73728", "--chunked-prefill-size", "4096"),
    *("--max-running-requests", "8", "--sleep-on-idle"),
)
"""Where there is no CUDA."""

GPU_SHARE = 0.42
"""Of a GPU's memory, for weights and KV of one server: two fit, with room for activations."""

KEEP_MEMORY = (
    "MALLOC_TRIM_THRESHOLD_=8589934592",
    "MALLOC_MMAP_THRESHOLD_=8589934592",
    "MALLOC_TOP_PAD_=268435456",
)
"""glibc never returns memory, and never takes it page by page from a fresh mapping.

Without them page faults make two equal servers on a CPU differ by 10 % for as long as they live.
"""

_KEEP_CONNECTIONS = "SGLANG_TIMEOUT_KEEP_ALIVE=3600"
"""SGLang closes connections that are idle for 5 s, also while a client writes to them.

Between two requests to one server, a slow machine may be busy with another for longer.
"""


def stock_environment() -> tuple[str, ...]:
    """Return the settings of a server that loads every installed plugin of SGLang but this one."""
    groups = ("sglang.srt.plugins", "sglang.srt.platforms")
    names = [entry.name for group in groups for entry in entry_points(group=group)]
    others = sorted(set(names) - {"sgl_blend"})
    return (f"SGLANG_PLUGINS={','.join(others) or 'none'}",)  # an empty list would mean all


def _num_pending(info: Mapping[str, Any]) -> int:
    """Return how many chunks are to be built or probed."""
    return int(info["chunks_pending"]) + int(info["probes_pending"])


class ServerError(CommandError):
    """A server did not start, or did not do what was asked of it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        url: Where it listens.
        command: What started it, without this machine's paths.
        process_group: Of all its processes, as /proc/PID/stat names it.
        http: Client of its native API; closed when the server stops.
    """

    url: str
    command: str
    process_group: int
    http: httpx.Client

    def info(self) -> dict[str, Any]:
        """Return the plugin's settings and totals.

        Raises:
            ServerError: The server does not blend.
        """
        state = self.server_info()["internal_states"][0]
        if "sgl_blend" not in state:
            raise ServerError("the server reports no sgl_blend; is the plugin installed?")
        blend: dict[str, Any] = state["sgl_blend"]
        return blend

    def server_info(self) -> dict[str, Any]:
        """Return everything the server says about itself."""
        told: dict[str, Any] = self.http.get("/server_info").raise_for_status().json()
        return told

    def attention_backend(self) -> str:
        """Return by which of SGLang's backends the server attends."""
        return str(self.server_info().get("attention_backend"))

    def wait_for_builds(self) -> None:
        """Return when no chunk of an earlier request is waiting to be built or being built.

        Raises:
            ServerError: It takes too long.
        """
        started = time.monotonic()
        while (pending := _num_pending(self.info())) > 0:
            if time.monotonic() - started > IDLE_TIMEOUT_S:
                raise ServerError(f"{pending} chunks were not built in {IDLE_TIMEOUT_S:.0f} s")
            time.sleep(0.3)


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that was launched and may not answer yet.

    Attributes:
        server: Usable once it answers.
        process: Its first process.
        log: File for everything it prints.
    """

    server: Server
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, waiting: Callable[[float], None] = lambda seconds: None) -> Server:
        """Return the server when it answers.

        Args:
            waiting: Called again and again with the seconds since it is waited for.

        Raises:
            ServerError: It died or did not answer in time; the message shows the end of its log.
        """
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise ServerError(
                    f"the server ended with {self.process.returncode}:\n{self._tail()}"
                )
            if self._is_healthy():
                return self.server
            waiting(elapsed)
            time.sleep(0.25)
        raise ServerError(f"the server did not answer in {START_TIMEOUT_S:.0f} s:\n{self._tail()}")

    def _is_healthy(self) -> bool:
        try:
            return self.server.http.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _tail(self, num_lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


@contextmanager
def launched(
    model: Path | str, extra: Sequence[str], log: Path, environment: Sequence[str] = ()
) -> Iterator[Launch]:
    """Launch a server for the time of a with block, without waiting until it answers.

    Args:
        model: Folder of the model, or its name.
        extra: Further flags; they win over the ones that are set here.
        log: File for everything it prints.
        environment: Further NAME=VALUE settings of its processes.
    """
    port = reserve_port()
    flags = ["--host", "127.0.0.1", *port_flags(port, extra), *_device_flags(), *extra]
    launch = ["-m", "sglang.launch_server", "--model-path"]
    offline = ["HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1"] if Path(model).is_dir() else []
    env = ["env", *offline, _KEEP_CONNECTIONS, *environment]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*env, sys.executable, *launch, str(model), *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,  # a process group of its own, so that stopping hits no other
        )
    url = f"http://127.0.0.1:{port}"
    command = " ".join([*env, "python", *launch, Path(model).name, *flags])
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=300.0) as http:
            yield Launch(Server(url, command, process.pid, http), process, log)
    finally:
        _stop(process)


@contextmanager
def running(
    model: Path | str,
    extra: Sequence[str],
    log: Path,
    waiting: Callable[[float], None] = lambda seconds: None,
    environment: Sequence[str] = (),
) -> Iterator[Server]:
    """Run a server for the time of a with block, on the GPU if there is one, else on the CPU.

    Arguments as launched's and Launch.wait's.

    Raises:
        ServerError: It died or did not answer in time; the message shows the end of its log.
    """
    with launched(model, extra, log, environment) as launch:
        yield launch.wait(waiting)


def _device_flags() -> Sequence[str]:
    import torch

    if not torch.cuda.is_available():
        return CPU_SERVER_FLAGS
    free, total = torch.cuda.mem_get_info()
    # SGLang's fraction is one of what is free when it starts.
    fraction = min(0.9, GPU_SHARE * total / free)
    return ("--mem-fraction-static", f"{fraction:.3f}", "--sleep-on-idle")


def port_flags(port: int, others: Sequence[str]) -> list[str]:
    """Return the flags of a server for its ports.

    Args:
        port: Of its HTTP API.
        others: Its other flags. Data-parallel replicas each choose a port for NCCL themselves.
    """
    flags = ["--port", str(port)]
    if {"--dp-size", "--data-parallel-size"}.isdisjoint(others):
        flags += ["--nccl-port", str(reserve_port())]
    return flags


def _stop(process: subprocess.Popen[bytes]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()

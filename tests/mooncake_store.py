"""A real Mooncake: a master, and a process that owns the memory; on loopback, ended by their ids."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_blend.commands.common.ports import reserve_port

MASTER = Path(sys.executable).with_name("mooncake_master")
SEGMENT_BYTES = 64 << 20

_STORE_PROCESS = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
http, rpc, size = sys.argv[1:]
code = store.setup("127.0.0.1", f"http://127.0.0.1:{http}/metadata", int(size), 16 << 20, "tcp", "",
                   f"127.0.0.1:{rpc}")
print("code", code, flush=True)
while True:
    time.sleep(60)
"""


def why_not() -> str | None:
    """Tell why Mooncake cannot be run here; None if it can."""
    if not MASTER.exists() or importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: make mooncake"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as err:
        return f"Mooncake misses a library: {err}; make mooncake"
    return None


@dataclass
class Mooncake:
    """A running store.

    Attributes:
        rpc: Port of the master.
        http: Port of its metadata server.
        metrics: Port of the master's metrics.
        segment_bytes: Memory that it has.
    """

    folder: Path
    rpc: int
    http: int
    metrics: int
    segment_bytes: int = SEGMENT_BYTES
    master: subprocess.Popen[bytes] | None = None
    owner: subprocess.Popen[bytes] | None = None

    def start_master(self) -> None:
        flags = {
            "rpc_port": self.rpc,
            "rpc_address": "127.0.0.1",
            "metrics_port": self.metrics,
            "enable_http_metadata_server": "true",
            "http_metadata_server_port": self.http,
            "http_metadata_server_host": "127.0.0.1",
            "enable_metric_reporting": "false",
        }
        with (self.folder / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [str(MASTER), *(f"--{name}={value}" for name, value in flags.items())],
                stdout=log,
                stderr=log,
            )
        _wait_for_port(self.rpc, self.master)
        _wait_for_port(self.http, self.master)

    def start_owner(self) -> None:
        """Start the process that owns the memory; it outlives engines."""
        command = [sys.executable, "-c", _STORE_PROCESS]
        command += [str(self.http), str(self.rpc), str(self.segment_bytes)]
        with (self.folder / "owner.log").open("ab") as log:
            self.owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.owner.stdout is not None
        for line in self.owner.stdout:
            if line.startswith(b"code"):
                assert line == b"code 0\n", line
                return
        raise AssertionError((self.folder / "owner.log").read_text())

    def extra_config(self) -> dict[str, Any]:
        """Return what an operator gives as --hicache-storage-backend-extra-config."""
        return {
            "master_server_address": f"127.0.0.1:{self.rpc}",
            "metadata_server": f"http://127.0.0.1:{self.http}/metadata",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": 0,
        }

    def stop(self) -> None:
        for process in (self.owner, self.master):
            _end(process)
        self.owner = self.master = None

    def kill_master(self) -> None:
        _end(self.master)
        self.master = None

    @contextmanager
    def master_stopped(self) -> Iterator[None]:
        """Let the master hang."""
        assert self.master is not None
        self.master.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.master.send_signal(signal.SIGCONT)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody else on this machine gets from here."""
    return [reserve_port() for _ in range(count)]


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the master ended with {process.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens at port {port}")


def at_free_ports(folder: Path) -> Mooncake:
    """Return a store that is not started yet."""
    rpc, http, metrics = free_ports(3)
    return Mooncake(folder, rpc, http, metrics)


@contextmanager
def running(folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Iterator[Mooncake]:
    """Run a store until the end of the block."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    store = at_free_ports(folder)
    store.segment_bytes = segment_bytes
    try:
        store.start_master()
        store.start_owner()
        yield store
    finally:
        store.stop()

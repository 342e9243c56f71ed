"""Servers of tiny models as a client sees them: started, asked by plain HTTP, stopped."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import ForkedProgram

from sgl_blend.commands.common.cpu import CPU_FLAGS
from sgl_blend.commands.common.ports import reserve_port
from sgl_blend.commands.common.server import port_flags

SEP = "<|reserved_0|>"
RESERVED = "sgl-blend:c:0123:"
SERVER_FLAGS = [
    *CPU_FLAGS,
    *("--max-total-tokens", "20000", "--mem-fraction-static", "0.3"),
    *("--host", "127.0.0.1", "--log-level", "warning", "--skip-server-warmup", "--sleep-on-idle"),
    # SGLang 0.5.17 puts xgrammar's masks into pinned memory, which there is none of on a CPU.
    *("--grammar-backend", "llguidance"),
]
SYSTEM = "You answer from the documents.\n"
DOCUMENTS = [
    "The harbour of Varna lies on the Black Sea and was dredged in 1906. " * 2,
    "A capybara eats up to three kilograms of grass a day and swims well. " * 2,
    "Copper sheets on roofs turn green because a layer of brochantite forms. " * 2,
]


@dataclass
class Server:
    """A running server: where it listens and what it wrote."""

    url: str
    process: "subprocess.Popen[bytes] | ForkedProgram"
    log: Path

    def request(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                text = response.read().decode()
                status = response.status
        except urllib.error.HTTPError as err:
            text, status = err.read().decode(), err.code
        try:
            return status, json.loads(text)
        except json.JSONDecodeError:
            return status, text

    def generate(self, text: str, **params: Any) -> dict[str, Any]:
        status, body = self.sample(text, custom_params=params or None)
        assert status == 200, body
        answer: dict[str, Any] = body
        return answer

    def sample(self, text: str, **sampling: Any) -> tuple[int, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 4, **sampling}
        return self.request("/generate", {"text": text, "sampling_params": sampling})

    def totals(self) -> dict[str, Any]:
        totals: dict[str, Any] = self.request("/server_info")[1]["internal_states"][0]["sgl_blend"]
        return totals

    def wait_for_builds(self) -> None:
        for _ in range(200):
            if self.totals()["chunks_pending"] == 0:
                return
            time.sleep(0.1)
        raise AssertionError("background builds did not end")


def start_server(
    command: list[str],
    log: Path,
    cwd: Path,
    start: Callable[..., "subprocess.Popen[bytes] | ForkedProgram"] = ForkedProgram,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start a server and wait until it answers.

    Args:
        command: Python, -m, the module, the model's flags and those of the test.
        log: File for everything it prints.
        cwd: Its folder.
        start: subprocess.Popen for one that starts exactly as a user's does.
        environment: Further variables of its processes.
    """
    port = reserve_port()
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",  # tiny matrices only wait for each other, and tests run in parallel
        **(environment or {}),
    }
    with log.open("wb") as out:
        process = start(
            [*command, *SERVER_FLAGS, *port_flags(port, command)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=cwd,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server died:\n{log.read_text()[-3000:]}"
        try:
            if server.request("/health")[0] == 200:
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    stop(server)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-3000:]}")


def stop(server: Server) -> None:
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)  # asked to end, SGLang sleeps five seconds
        server.process.wait()


def rag_text(*numbers: int, question: str = "Where is Varna?") -> str:
    chunks = "".join(f"{SEP}{DOCUMENTS[i]}{SEP}" for i in numbers)
    return f"{SYSTEM}{chunks}{question}"

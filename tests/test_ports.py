"""Ports that are reserved before a server listens on them."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_blend.commands.common import ports
from sgl_blend.commands.common.ports import reserve_port
from sgl_blend.errors import CommandError

RESERVE = """
import sys
from sgl_blend.commands.common import ports
ports._PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
ports.reserve_port()
"""


def test_nobody_is_given_a_port_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    port = reserve_port()
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))

    with pytest.raises(CommandError, match=rf"^no port from {port} to {port} is free$"):
        reserve_port()

    other = subprocess.run(
        [sys.executable, "-c", RESERVE, str(port)], capture_output=True, text=True, check=False
    )
    assert "is free" in other.stderr, "another process was given the port"


def test_a_port_on_which_somebody_listens_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        with pytest.raises(CommandError):
            reserve_port()
    assert reserve_port() == port


def test_linux_gives_no_connection_such_a_port() -> None:
    low, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert ports._PORTS.stop <= int(low)

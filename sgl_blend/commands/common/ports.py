"""Ports for servers that take seconds to listen on them."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from sgl_blend.errors import CommandError

_PORTS = range(20_000, 32_000)
"""Linux takes the ports of outgoing connections from 32,768 on."""
_held: list[int] = []
"""Descriptors of the locks on the ports of this process."""


def reserve_port() -> int:
    """Return a port of 127.0.0.1 that nobody else is given while this process lives.

    A port that was only found free may be taken again before a server listens, which loads its model
    first: by a connection of any process, or by whoever else looks for a free one. So this one lies
    below those of connections, and a lock on a file tells all other callers that it is taken.

    Raises:
        CommandError: All ports are taken.
    """
    folder = Path(tempfile.gettempdir()) / f"sgl-blend-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in random.sample(_PORTS, len(_PORTS)):
        descriptor = os.open(folder / str(port), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(descriptor)
            continue
        _held.append(descriptor)
        return port
    raise CommandError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")

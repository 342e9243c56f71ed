"""How many requests the client alone sends and reads: above that, a benchmark measures itself."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sgl_blend.commands.bench.client import Client, ask

_TOGETHER = 64
"""Requests under way at once."""
_LEAST_SHARE = 0.5
"""Above this share of what the client can do, its own queues are part of every time."""


def measure_client(bodies: Sequence[bytes], seconds: float = 2.0) -> float:
    """Return the requests per second that this client sends to, and reads from, a server at no cost.

    Args:
        bodies: Of requests like those that will be measured, sent in turns.
        seconds: How long they are sent.
    """
    with _null_server() as url:
        return asyncio.run(_measure(url, bodies, seconds))


async def _measure(url: str, bodies: Sequence[bytes], seconds: float) -> float:
    answered = 0

    async def keep_asking(first: int) -> None:
        nonlocal answered
        number = first
        while time.perf_counter() < end:
            await ask(client, bodies[number % len(bodies)])
            answered += 1
            number += 1

    async with Client(url) as client:
        await ask(client, bodies[0])
        started = time.perf_counter()
        end = started + seconds
        await asyncio.gather(*map(keep_asking, range(_TOGETHER)))
        return answered / (time.perf_counter() - started)


@contextmanager
def _null_server() -> Iterator[str]:
    """Run a server without a model in a process of its own, as real ones do."""
    command = [sys.executable, "-m", "sgl_blend.commands.bench.null_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def client_warning(client_rate: float, rates: Sequence[float]) -> str | None:
    """Say so if some rate is so high that the client's own work counts; None if none is.

    Args:
        client_rate: From measure_client.
        rates: That were offered.
    """
    highest = max(rates, default=0.0)
    if highest <= _LEAST_SHARE * client_rate:
        return None
    return (
        f"at {highest:.3g} requests/s the client is busy: alone it sends and reads {client_rate:.3g}; "
        "times at such rates hold its own queues"
    )

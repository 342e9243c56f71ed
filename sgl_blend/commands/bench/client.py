"""Send requests and time them: the same calls for the blending and the stock server.

What a general HTTP client does for each request takes milliseconds of CPU time. At a hundred requests
per second that would be a part of every time that is measured. So this one speaks just enough HTTP/1.1
for SGLang's streams (client_speed.py measures it).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sgl_blend.commands.common.server import Server, ServerError

_TIMEOUT_S = 1800.0
"""An overloaded server lets its last request wait for long, and that is a figure too."""
_REUSED_WITHIN_S = 2.0
"""A connection that was idle for longer is not used again: a server closes one after some seconds."""
_OK = 200


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request.

    Attributes:
        ttft_s: From sending to the first streamed token.
        ended_s: When the last token came, on the clock of time.perf_counter.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of the prompt, as SGLang counts them: the exact prefix.
        report: ``meta_info["sgl_blend"]``; empty from a stock server.
    """

    ttft_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Connection:
    """One connection, and since when nobody uses it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float


class Client:
    """Streams answers of one server, as many at once as it is asked for; owned by one event loop.

    Args:
        url: Where the server listens, ``http://HOST:PORT``.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def lines(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Post JSON and yield the lines of the streamed answer as they come.

        Raises:
            ServerError: The server does not answer, refuses the request or breaks off.
        """
        try:
            reader, writer = await self._connect()
        except OSError as err:
            raise ServerError(f"a server did not answer: {err}") from err
        done = False
        try:
            head = f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.writelines([head.encode(), body])
            status, headers = await _read_head(reader)
            pieces = _read_body(reader, headers)
            if status != _OK:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                raise ServerError(f"the server answers {status}: {text:.300}")
            rest = b""
            async for piece in pieces:
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield line
            done = True
        except (OSError, asyncio.IncompleteReadError) as err:
            raise ServerError(f"a server broke off its answer: {err!r}") from err
        finally:
            if done and headers.get(b"connection") != b"close":
                self._idle.append(_Connection(reader, writer, time.monotonic()))
            else:
                writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            last = self._idle.pop()
            if not last.reader.at_eof() and time.monotonic() - last.idle_since < _REUSED_WITHIN_S:
                return last.reader, last.writer
            last.writer.close()
        return await asyncio.open_connection(self._host, self._port)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    """Read the status and the headers of an answer, names in lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    pairs = (line.partition(b":") for line in lines if line)
    headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
    return int(first.split()[1]), headers


async def _read_body(
    reader: asyncio.StreamReader, headers: dict[bytes, bytes]
) -> AsyncIterator[bytes]:
    """Yield the pieces of an answer's body."""
    if headers.get(b"transfer-encoding") != b"chunked":
        yield await reader.readexactly(int(headers.get(b"content-length", b"0")))
        return
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:size]
    await reader.readuntil(b"\r\n")


def connect(server: Server) -> Client:
    """Return a client of a server."""
    return Client(server.url)


async def ask(client: Client, body: bytes) -> Reply:
    """Send one streamed request.

    Raises:
        ServerError: The server refuses it, streams no token, or takes too long.
    """
    started = time.perf_counter()
    first_s, last = None, b""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for line in client.lines("/generate", body):
                if line.startswith(b"data: {"):
                    first_s = time.perf_counter() if first_s is None else first_s
                    last = line.removeprefix(b"data: ")
    except TimeoutError as err:
        raise ServerError(f"a server did not answer in {_TIMEOUT_S:.0f} s") from err
    ended_s = time.perf_counter()
    if first_s is None:
        raise ServerError("the server streamed no token")
    meta = _read_meta(last)
    report = meta.get("sgl_blend") or [{}]
    tokens = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
    return Reply(first_s - started, ended_s, *tokens, report[0])


def _read_meta(line: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(line)
    if "meta_info" not in answer:
        raise ServerError(f"the server streamed {line.decode(errors='replace'):.300}")
    meta: dict[str, Any] = answer["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise ServerError(f"the server gave up a request: {meta['finish_reason']}")
    return meta


async def ask_together(client: Client, bodies: Sequence[bytes]) -> list[Reply]:
    """Send requests at the same time and return their replies in the same order."""
    return list(await asyncio.gather(*(ask(client, body) for body in bodies)))


async def ask_at(
    client: Client, bodies: Sequence[bytes], arrivals_s: Sequence[float]
) -> tuple[list[Reply], float]:
    """Send each request at its time, however many are still unanswered: an open loop.

    Args:
        client: Of the server.
        bodies: One per request.
        arrivals_s: Seconds after now, ascending.

    Returns:
        The replies, and the seconds from now until the last one ended.
    """

    async def send(body: bytes, at_s: float) -> Reply:
        await asyncio.sleep(started + at_s - time.perf_counter())
        return await ask(client, body)

    started = time.perf_counter()
    replies = await asyncio.gather(*map(send, bodies, arrivals_s))
    return list(replies), max(reply.ended_s for reply in replies) - started

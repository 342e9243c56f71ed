"""Send requests and time them: the same calls for the blending and the stock server."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from sgl_blend.commands.common.server import Server, ServerError

_TIMEOUT_S = 1800.0
"""An overloaded server lets its last request wait for long, and that is a figure too."""


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


def connect(server: Server) -> httpx.AsyncClient:
    """Return a client that sends as many requests at once as it is asked to."""
    return httpx.AsyncClient(
        base_url=server.url,
        timeout=_TIMEOUT_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def ask(client: httpx.AsyncClient, body: bytes) -> Reply:
    """Send one streamed request.

    Raises:
        ServerError: The server refuses it, or streams no token.
    """
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    first_s, last = None, ""
    async with client.stream("POST", "/generate", content=body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise ServerError(f"the server answers {response.status_code}: {text:.300}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = time.perf_counter() if first_s is None else first_s
                last = line.removeprefix("data: ")
    ended_s = time.perf_counter()
    if first_s is None:
        raise ServerError("the server streamed no token")
    meta = _read_meta(last)
    report = meta.get("sgl_blend") or [{}]
    tokens = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
    return Reply(first_s - started, ended_s, *tokens, report[0])


def _read_meta(line: str) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(line)
    if "meta_info" not in answer:
        raise ServerError(f"the server streamed {line:.300}")
    meta: dict[str, Any] = answer["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise ServerError(f"the server gave up a request: {meta['finish_reason']}")
    return meta


async def ask_together(client: httpx.AsyncClient, bodies: Sequence[bytes]) -> list[Reply]:
    """Send requests at the same time and return their replies in the same order."""
    return list(await asyncio.gather(*(ask(client, body) for body in bodies)))


async def ask_at(
    client: httpx.AsyncClient, bodies: Sequence[bytes], arrivals_s: Sequence[float]
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

"""The benchmarks' client: what it reads, and how much of it there is."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sgl_blend.commands.bench.client import Client, Reply, ask, ask_together
from sgl_blend.commands.bench.client_speed import client_warning, measure_client
from sgl_blend.commands.bench.knees import Outcome, Point
from sgl_blend.commands.bench.null_server import EVENTS, make_answer
from sgl_blend.commands.bench.report import Circumstances, caveats
from sgl_blend.commands.common.records import describe_machine
from sgl_blend.commands.common.server import ServerError

Talk = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server that says what a test wants, and counts connections and requests."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.connections = 0
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(await reader.readexactly(length))
                await self._talk(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def talk_to(peer: Peer, ask_it: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            async with Client(f"http://127.0.0.1:{port}") as client:
                return await ask_it(client)
        finally:
            server.close()
            for writer in peer.writers:
                writer.close()
            await asyncio.sleep(0.05)  # for the loop to close them

    return asyncio.run(run())


async def answer(writer: asyncio.StreamWriter) -> None:
    writer.write(make_answer())


async def answer_in_pieces(writer: asyncio.StreamWriter) -> None:
    """Cut the events where no line ends, and wait before the second one."""
    events = [f"data: {event}\n\n".encode() for event in EVENTS]
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for number, event in enumerate(events):
        for piece in (event[:3], event[3:40], event[40:]):
            if piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0)
        if number == 0:
            await asyncio.sleep(0.2)
    writer.write(b"0\r\n\r\n")


def test_the_first_token_is_timed_and_the_last_event_read() -> None:
    reply: Reply = talk_to(Peer(answer_in_pieces), lambda client: ask(client, b"{}"))

    meta = json.loads(EVENTS[1])["meta_info"]
    assert (reply.prompt_tokens, reply.cached_tokens) == (meta["prompt_tokens"], 0)
    assert reply.ttft_s < 0.15, "the time of the second event is not the first one's"
    assert reply.report == {}


def test_connections_are_used_again_and_never_shared() -> None:
    async def ask_often(client: Client) -> None:
        for _ in range(3):
            await ask_together(client, [b"1", b"22", b"333"])

    peer = Peer(answer)
    talk_to(peer, ask_often)

    assert peer.connections == 3
    assert sorted(peer.requests) == sorted([b"1", b"22", b"333"] * 3)


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    async def answer_and_close(writer: asyncio.StreamWriter) -> None:
        await answer(writer)
        writer.close()

    async def ask_twice(client: Client) -> None:
        await ask(client, b"{}")
        await asyncio.sleep(0.05)
        await ask(client, b"{}")

    peer = Peer(answer_and_close)
    talk_to(peer, ask_twice)

    assert peer.connections == 2


async def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nno no")


async def break_off(writer: asyncio.StreamWriter) -> None:
    writer.write(make_answer()[:200])
    await writer.drain()
    writer.close()


async def say_nothing(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        (refuse, "the server answers 400: no no"),
        (break_off, "a server broke off its answer"),
        (say_nothing, "the server streamed no token"),
    ],
)
def test_what_goes_wrong_is_one_sentence(talk: Talk, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        talk_to(Peer(talk), lambda client: ask(client, b"{}"))


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    async def ask_nobody() -> None:
        async with Client("http://127.0.0.1:9") as client:  # the port of "discard"
            await ask(client, b"{}")

    with pytest.raises(ServerError, match="a server did not answer"):
        asyncio.run(ask_nobody())


def test_the_client_alone_is_faster_than_any_server_here() -> None:
    body = b'{"input_ids": [' + b", ".join([b"12345"] * 3000) + b"]}"

    # What else the machine does can only slow the client down, so the fastest moment is what it can.
    rate = max(measure_client([body], seconds=0.5) for _ in range(4))

    # A hundred requests per second are more than an 8B model on one GPU serves by any estimate. This
    # client does thousands; the bound leaves room for a machine that does other things.
    assert rate > 200


def test_a_rate_that_the_client_hardly_reaches_is_told() -> None:
    assert client_warning(1000.0, [1.0, 400.0]) is None
    assert client_warning(1000.0, []) is None
    told = client_warning(1000.0, [1.0, 600.0])
    assert told is not None
    assert "at 600 requests/s the client is busy: alone it sends and reads 1e+03" in told


def circumstances(backend: str, *, hopper: bool) -> Circumstances:
    return Circumstances(
        command="sgl-blend bench ttft",
        date="2026-01-01T00:00:00+00:00",
        model="llama-3.1-8b",
        versions={},
        commit=None,
        machine=describe_machine(),
        servers={},
        num_tokens=1,
        attention={"stock": backend, "blend": backend},
        hopper=hopper,
    )


def test_stock_without_its_own_attention_is_told_beside_the_figures() -> None:
    (sentence,) = caveats(circumstances("triton", hopper=True))
    assert "stock attends by triton; by default SGLang takes fa3" in sentence
    assert caveats(circumstances("fa3", hopper=True)) == []
    assert caveats(circumstances("torch_native", hopper=False)) == []


def outcome(*rates: float) -> Outcome:
    return Outcome(
        idle_ttft_s={},
        bound_s=1.0,
        points=[Point(rate=rate, stock=None, blend=None) for rate in rates],
        knees={},
        rates_at_bound={},
        gain=None,
        ceiling=None,
    )


def test_the_report_of_throughput_says_what_the_client_can_do() -> None:
    from sgl_blend.commands.bench.report import ThroughputReport, client_line, warnings

    report = ThroughputReport(
        circumstances=circumstances("fa3", hopper=True),
        settings={},
        client_rate=200.0,
        outcome=outcome(10.0, 150.0),
    )
    assert client_line(report) == (
        "The client alone sends and reads 200 requests/s; the highest rate offered is 75% of that."
    )
    assert len(warnings(report)) == 1

"""A server that answers at once: what a client can send and read, with no model behind.

    python -m sgl_blend.commands.bench.null_server

Speaks as much of HTTP as the benchmark's client does. It reads a request and streams back as many
events as SGLang does when it streams the first token and the rest, of about the same size. It prints
its port and ends when its standard input does.
"""

import asyncio
import json
import sys

META = {
    "prompt_tokens": 1,
    "cached_tokens": 0,
    "finish_reason": {"type": "length", "length": 16},
    "weight_version": "default",
    "e2e_latency": 0.0123456789,
}
EVENTS = [
    *(json.dumps({"text": "", "output_ids": [7] * count, "meta_info": META}) for count in (1, 15)),
    "[DONE]",
]


def make_answer() -> bytes:
    """Return a streamed answer, headers included."""
    chunks = [f"data: {event}\n\n".encode() for event in EVENTS]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + body + b"0\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answer = make_answer()
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [
                line.split(b":")[1]
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            await reader.readexactly(int(lengths[0]) if lengths else 0)
            writer.write(answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionResetError):
        writer.close()


async def main() -> None:
    """Serve on a free port of 127.0.0.1 until standard input ends."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - for whoever started it
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(main())

"""What the soak sends, and how each answer is checked; soak.py lets it run."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from examples.tinyrag.world import make_held_out

TENANTS = ("red", "green", "blue")
SAMPLED = 0.02
"""Share of the requests of a kind that is compared with a stock server."""
NEAR_TIE_NATS = 1e-3
KINDS = {
    "blended": 26,
    "streamed": 15,
    "plain": 12,
    "long": 8,
    "long output": 12,
    "hang up": 12,
    "tiny": 5,
    "malformed": 5,
    "n = 2": 3,
    "logprobs": 2,
}
"""Kinds of requests and how many of a hundred."""


class Waits(Protocol):
    """What a client waits at before each request."""

    async def wait(self) -> None:
        """Return when it may go on."""


@dataclass
class Tally:
    """What happened.

    Attributes:
        counts: Requests by kind.
        violations: One sentence each.
        ttft_s: Times to first token of streamed requests, by kind.
        rss: Seconds since the start and bytes of all server processes.
        tokens: Prompt tokens by kind, summed over answers.
        slowest_ping_s: By server, the longest that an empty request waited.
        begun_s: When the run began, by time.monotonic.
    """

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    rss: list[tuple[float, int]] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    slowest_ping_s: dict[str, float] = field(default_factory=dict)
    begun_s: float = field(default_factory=time.monotonic)

    def violate(self, sentence: str) -> None:
        """Note a violation with its time."""
        self.violations.append(f"at {time.monotonic() - self.begun_s:.0f} s: {sentence}")

    def expect(self, holds: bool, sentence: str) -> None:
        """Note a violation unless it holds."""
        if not holds:
            self.violate(sentence)


class Traffic:
    """Makes requests of every kind and checks what comes back.

    Args:
        blend: To the server that is tested.
        stock: To a server without the plugin.
        tally: Of what happens.
        separator: Marks chunks.
        marked: Share of the prompts of which the chunks are marked. Documents are long enough to be
            learned if it is below 1.
        adapters: Names of LoRA adapters that both servers have; requests take one or none.
    """

    def __init__(
        self,
        blend: httpx.AsyncClient,
        stock: httpx.AsyncClient,
        tally: Tally,
        separator: str,
        marked: float = 1.0,
        adapters: Sequence[str] = (),
    ) -> None:
        self._blend = blend
        self._stock = stock
        self._tally = tally
        self._separator = separator
        items = make_held_out(3, 12)
        self._systems = [str(item["system"]) for item in items[:2]]
        self._documents = [f"<doc> {chunk}" for item in items for chunk in _texts(item["chunks"])]
        self._marked = marked
        self._adapters = (None, *adapters)
        if marked < 1:
            pairs = zip(self._documents[::2], self._documents[1::2], strict=False)
            self._documents = [" ".join(pair) for pair in pairs]
        self._questions = [f"<ask> {item['question']}" for item in items]
        self._active = 0
        self._actions: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "blended": self.blended,
            "streamed": self.streamed,
            "plain": self.plain,
            "long": self.long,
            "long output": self.long_output,
            "hang up": self.hang_up,
            "tiny": self.tiny,
            "malformed": self.malformed,
            "n = 2": self.several,
            "logprobs": self.logprobs,
        }

    def prompt(self, draw: random.Random, chunks: int) -> str:
        """Return a prompt of chunks out of a pool larger than the cache, some far more often asked."""
        documents = self._draw_documents(draw, chunks)
        mark = self._separator if self._marked == 1 or draw.random() < self._marked else ""
        marked = "".join(f"{mark}{document}{mark}" for document in documents)
        return f"{draw.choice(self._systems)}{marked}{draw.choice(self._questions)}"

    def _draw_documents(self, draw: random.Random, count: int) -> list[str]:
        hot = self._documents[:6]
        pool = hot if count <= len(hot) and draw.random() < 0.8 else self._documents
        return draw.sample(pool, min(count, len(pool)))

    def body(self, draw: random.Random, text: str, **sampling: Any) -> dict[str, Any]:
        """Return a request of one of the tenants; greedy."""
        params = {"temperature": 0, "max_new_tokens": draw.choice((1, 4, 12)), **sampling}
        body = {"text": text, "sampling_params": params, "cache_salt": draw.choice(TENANTS)}
        adapter = draw.choice(self._adapters)
        return body if adapter is None else {**body, "lora_path": adapter}

    async def ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request and check status and report; return its answers."""
        response = await self._blend.post("/generate", json=body)
        ok = response.status_code == httpx.codes.OK
        self._tally.expect(ok, f"status {response.status_code}: {response.text[:200]}")
        if not ok:
            return []
        answers = response.json()
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            self.check_report(answer["meta_info"])
        return answers

    def check_report(self, meta: dict[str, Any]) -> None:
        """Check that a report adds up."""
        report = meta["sgl_blend"][0]
        kinds = ("prefix", "reused", "recomputed", "computed")
        counts = {kind: report[f"{kind}_tokens"] for kind in kinds}
        adds_up = sum(counts.values()) == report["prompt_tokens"] and min(counts.values()) >= 0
        self._tally.expect(adds_up, f"a report does not add up: {report}")
        self._tally.tokens.update(counts)

    async def compare(self, body: dict[str, Any]) -> None:
        """Ask both servers the same and compare the answers token by token."""
        body = {**body, "return_logprob": True, "top_logprobs_num": 2}
        answers = await self.ask(body)
        text = body["text"].replace(self._separator, "")
        params = {key: v for key, v in body["sampling_params"].items() if key != "custom_params"}
        response = await self._stock.post(
            "/generate", json={**body, "text": text, "sampling_params": params}
        )
        response.raise_for_status()
        want = response.json()["meta_info"]
        self._tally.counts["compared"] += 1
        for answer in answers:
            self._compare_tokens(answer["meta_info"], want, text)

    def _compare_tokens(self, got: dict[str, Any], want: dict[str, Any], text: str) -> None:
        pairs = zip(got["output_token_logprobs"], want["output_token_logprobs"], strict=False)
        for place, (mine, theirs) in enumerate(pairs):
            if mine[1] == theirs[1]:
                continue
            best, second = (entry[0] for entry in want["output_top_logprobs"][place][:2])
            if best - second <= NEAR_TIE_NATS:
                self._tally.counts["near ties"] += 1
            else:
                self._tally.violate(
                    f"a wrong answer: token {place} is {mine[1]}, stock says {theirs[1]} by "
                    f"{best - second:.3g} nats; prompt of {len(text)} letters, {got['sgl_blend']}"
                )
            return

    async def blended(self, draw: random.Random) -> None:
        """A RAG prompt; sampled ones at ratio 1."""
        body = self.body(draw, self.prompt(draw, draw.randint(1, 6)))
        if draw.random() < SAMPLED:
            body["sampling_params"]["custom_params"] = {"sgl_blend_ratio": 1.0}
            await self.compare(body)
        else:
            await self.ask(body)

    async def plain(self, draw: random.Random) -> None:
        """The same without separators; sampled ones at ratio 1 where chunks are found."""
        text = self.prompt(draw, draw.randint(1, 6)).replace(self._separator, "")
        body = self.body(draw, text)
        if draw.random() < SAMPLED:
            if self._marked < 1:
                body["sampling_params"]["custom_params"] = {"sgl_blend_ratio": 1.0}
            await self.compare(body)
        else:
            await self.ask(body)

    async def streamed(self, draw: random.Random) -> None:
        """A streamed request, marked or not; its TTFT is kept."""
        marked = draw.random() < 0.7
        text = self.prompt(draw, 5)
        body = self.body(draw, text if marked else text.replace(self._separator, ""))
        start = time.perf_counter()
        async with self._blend.stream("POST", "/generate", json={**body, "stream": True}) as reply:
            first = None
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and first is None:
                    first = time.perf_counter() - start
        self._tally.expect(first is not None, "a stream without a token")
        if first is not None:
            kind = "blended" if marked else "plain"
            self._tally.ttft_s.setdefault(kind, []).append(first)

    async def long(self, draw: random.Random) -> None:
        """A prompt that chunked prefill cuts several times."""
        # Documents of traffic without marks are twice as long, and a prompt has at most 2,048 tokens.
        body = self.body(draw, self.prompt(draw, 16 if self._marked == 1 else 12))
        if draw.random() < SAMPLED:
            body["sampling_params"]["custom_params"] = {"sgl_blend_ratio": 1.0}
            await self.compare(body)
        else:
            await self.ask(body)

    async def long_output(self, draw: random.Random) -> None:
        """Decodes for long, so that memory runs out and something is retracted."""
        text = self.prompt(draw, draw.randint(1, 3))
        await self.ask(self.body(draw, text, max_new_tokens=300, ignore_eos=True))

    async def hang_up(self, draw: random.Random) -> None:
        """A client that leaves: in the queue, in the prefill or while it decodes."""
        body = self.body(draw, self.prompt(draw, 8), max_new_tokens=100, ignore_eos=True)
        patience_s = draw.choice((0.001, 0.01, 0.05, 0.2, 0.5))
        try:
            async with (
                asyncio.timeout(patience_s),
                self._blend.stream("POST", "/generate", json={**body, "stream": True}) as reply,
            ):
                async for _ in reply.aiter_lines():
                    pass
        except TimeoutError:
            self._tally.counts["hung up"] += 1

    async def tiny(self, draw: random.Random) -> None:
        """One token, or chunks too short to be reused."""
        sep = self._separator
        await self.ask(self.body(draw, draw.choice(("a", f"{sep}a{sep}", f"a{sep}b{sep}c"))))

    async def malformed(self, draw: random.Random) -> None:
        """Refused with 400, and nothing else happens."""
        params: dict[str, Any] = draw.choice(
            (
                {"sgl_blend_ratio": 7},
                {"sgl_blend_policy": "best"},
                {"sgl_blend_spans": [[0, 5]]},
                {"sgl_blend_spans": [5, 2]},
                {"sgl_blend_what": 1},
                {"x": [[1]]},
            )
        )
        body = self.body(draw, "a plain prompt", custom_params=params)
        status = (await self._blend.post("/generate", json=body)).status_code
        self._tally.expect(status == httpx.codes.BAD_REQUEST, f"malformed {params} gave {status}")

    async def several(self, draw: random.Random) -> None:
        """Two samples of one prompt."""
        body = self.body(draw, self.prompt(draw, 3), n=2, temperature=0.8)
        body.pop("lora_path", None)  # SGLang 0.5.21 miscounts its users, and cannot unload it then
        answers = await self.ask(body)
        self._tally.expect(len(answers) == 2, f"n = 2 gave {len(answers)} answers")

    async def logprobs(self, draw: random.Random) -> None:
        """Logprobs of the prompt's end."""
        text = self.prompt(draw, 4)
        body = {**self.body(draw, text), "return_logprob": True, "logprob_start_len": 100}
        for answer in await self.ask(body):
            got = answer["meta_info"]["input_token_logprobs"]
            self._tally.expect(len(got) > 1, "no logprobs of the prompt")

    async def check_answer(self, draw: random.Random, ratio: float | None) -> None:
        """Compare one answer with stock's: at a ratio, or without blending."""
        text = self.prompt(draw, draw.randint(1, 5))
        body = self.body(draw, text if ratio is not None else text.replace(self._separator, ""))
        if ratio is not None:
            body["sampling_params"]["custom_params"] = {"sgl_blend_ratio": ratio}
        elif self._marked < 1:
            body["sampling_params"]["custom_params"] = {"sgl_blend": False}
        await self.compare(body)

    async def until_left(self) -> None:
        """Return when no client waits for an answer."""
        while self._active:
            await asyncio.sleep(0.02)

    async def run_client(self, number: int, until_s: float, gate: Waits) -> None:
        """Send requests one after another until the time is over; wait while the gate is closed."""
        draw = random.Random(f"client {number}")
        while time.monotonic() < until_s:
            await gate.wait()
            (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
            self._tally.counts[kind] += 1
            self._active += 1
            try:
                await self._actions[kind](draw)
            except httpx.HTTPError as err:
                self._tally.violate(f"{kind}: {type(err).__name__} {err}")
                return
            finally:
                self._active -= 1


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value

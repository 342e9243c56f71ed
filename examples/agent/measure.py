"""What two servers make of the agent's prompts: tokens by kind, and the time to first token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import openai

from benchmarks.repeats import Repeats, count_repeats
from examples.agent.conversation import Message
from examples.demo.measure import TOKEN_KINDS
from sgl_blend.commands.common.server import Server, ServerError

COUNTED = ("prompt_tokens", "found_tokens", *TOKEN_KINDS)


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of a prompt.

    Attributes:
        tokens: By kind, as the report of the blending server counts them.
        repeats: What of it came before.
        blend_s: Time to first token of the blending server.
        stock_s: Of the stock server.
    """

    tokens: dict[str, int]
    repeats: Repeats
    blend_s: float
    stock_s: float

    @property
    def found(self) -> int:
        """Tokens that were served beyond what the prompt begins with as an earlier one."""
        served = self.tokens["prompt_tokens"] - self.tokens["computed_tokens"]
        return max(0, served - self.repeats.exact)


def play(blend: Server, stock: Server, prompts: Sequence[list[Message]]) -> list[Turn]:
    """Send each prompt to both servers, one after the other.

    Before each request the blending server may finish what it builds, as while an agent's tools run:
    the two share a machine, and builds must slow neither. The servers take turns in going first.

    Raises:
        ServerError: A server answers no token.
    """
    repeats = count_repeats(tokenize(stock, messages) for messages in prompts)
    turns = []
    for number, (messages, told) in enumerate(zip(prompts, repeats, strict=True)):
        blend.wait_for_builds()
        before = blend.info()
        pair = (blend, stock) if number % 2 == 0 else (stock, blend)
        seconds = {}
        for server in pair:
            blend.wait_for_builds()
            seconds[server.url] = first_token(server, messages)
        after = blend.info()
        tokens = {name: int(after[name]) - int(before[name]) for name in COUNTED}
        turns.append(Turn(tokens, told, seconds[blend.url], seconds[stock.url]))
    return turns


def tokenize(server: Server, messages: list[Message]) -> np.ndarray:
    """Return the tokens of a prompt as a server makes them: int64 [n]."""
    answer = server.http.post("/tokenize", json={"model": "default", "messages": messages})
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return np.array(tokens, np.int64)


def first_token(server: Server, messages: list[Message]) -> float:
    """Ask for one token and return the seconds until it came."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        started = time.perf_counter()
        stream = client.chat.completions.create(
            model="default",
            messages=cast(Any, messages),
            max_tokens=1,
            temperature=0.0,
            stream=True,
        )
        for event in stream:
            for choice in event.choices:
                if choice.delta.content or choice.finish_reason:
                    return time.perf_counter() - started
    raise ServerError("the server streamed no token")


def shares(turns: Sequence[Turn], first: int) -> tuple[float, float]:
    """Return what was found of the repeated tokens, and TTFT of stock by ours, from a turn on.

    Args:
        turns: All.
        first: Number of the first turn that counts, from 1 on.
    """
    later = turns[first - 1 :]
    found = sum(turn.found for turn in later) / sum(turn.repeats.repeated for turn in later)
    faster = float(np.median([turn.stock_s / turn.blend_s for turn in later]))
    return found, faster

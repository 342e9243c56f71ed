"""What a server answers and how soon: the same calls for the blending and the stock server."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai

from sgl_blend.commands.common.server import Server, ServerError

TOKEN_KINDS = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
"""What can happen to a prompt token; the four add up to prompt_tokens."""

COUNTED = ("requests", "prompt_tokens", *TOKEN_KINDS, "chunk_hits", "chunk_misses")
"""Totals of the server that are reported per ratio."""

BUILD_TIMEOUT_S = 600.0
SAME_LOGPROB = 1e-3
"""The streamed token's logprob must agree this well with the distribution read afterwards."""

Params = dict[str, Any] | None
"""What goes into custom_params, or None for a server without the plugin."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The streamed first token of an answer: seconds until it came, and its logprob."""

    ttft_s: float
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one prompt.

    Attributes:
        ttft_s: Time to first token.
        logprobs: float64 [vocab_size], distribution of the first token.
        counts: Tokens by kind, chunk hits and misses; empty for a stock server.
    """

    ttft_s: float
    logprobs: np.ndarray
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to all prompts in one way of serving them, in prompt order."""

    answers: tuple[Answer, ...]

    @property
    def ttft_s(self) -> tuple[float, ...]:
        """Time to first token of every prompt."""
        return tuple(answer.ttft_s for answer in self.answers)

    @property
    def median_s(self) -> float:
        """Median time to first token."""
        return float(np.median(self.ttft_s))

    @property
    def logprobs(self) -> np.ndarray:
        """float64 [num_prompts, vocab_size]."""
        return np.stack([answer.logprobs for answer in self.answers])

    @property
    def counts(self) -> dict[str, int]:
        """Sum over all prompts."""
        total: Counter[str] = Counter()
        for answer in self.answers:
            total.update(answer.counts)
        return dict(total)


def stream_first_token(server: Server, text: str, params: Params) -> FirstToken:
    """Ask for one token through the OpenAI API and time it."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        started = time.perf_counter()
        stream = client.completions.create(
            model="default",
            prompt=text,
            max_tokens=1,
            temperature=0.0,
            logprobs=1,
            stream=True,
            extra_body=None if params is None else {"custom_params": params},
        )
        for event in stream:
            ttft_s = time.perf_counter() - started
            logprobs = event.choices[0].logprobs if event.choices else None
            if logprobs is not None and logprobs.token_logprobs:
                return FirstToken(ttft_s, float(logprobs.token_logprobs[0]))
    raise ServerError("the server streamed no token")


def read_distribution(server: Server, text: str, params: Params, vocab_size: int) -> np.ndarray:
    """Return the logprobs of the first token over the vocabulary, float64 [vocab_size].

    Sent after the timed request, so the server finds that request's KV, blended or not, in
    its radix cache and computes the last token only.
    """
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 1}
    if params is not None:
        sampling["custom_params"] = params
    body = {
        "text": text,
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": vocab_size,
    }
    answer = server.http.post("/generate", json=body).raise_for_status().json()
    pairs = answer["meta_info"]["output_top_logprobs"][0]
    logprobs = np.full(vocab_size, -np.inf)
    logprobs[[pair[1] for pair in pairs]] = [pair[0] for pair in pairs]
    if not np.isfinite(logprobs).all():
        raise ServerError(f"the server gave {len(pairs)} logprobs, expected {vocab_size}")
    # float32 logprobs do not add up to one to the last digit.
    logprobs -= np.log(np.exp(logprobs).sum())
    return logprobs


def ask(server: Server, text: str, params: Params, vocab_size: int) -> Answer:
    """Send one prompt, first for the time, then for the distribution.

    Raises:
        ServerError: The distribution is not the one the streamed token came from.
    """
    before = {} if params is None else server.info()
    token = stream_first_token(server, text, params)
    after = {} if params is None else server.info()
    logprobs = read_distribution(server, text, params, vocab_size)
    if abs(logprobs.max() - token.logprob) > SAME_LOGPROB:
        raise ServerError(
            f"the streamed token has logprob {token.logprob}, the distribution {logprobs.max()}"
        )
    counts = {name: after[name] - before[name] for name in COUNTED if name in after}
    return Answer(token.ttft_s, logprobs, counts)


def wait_for_chunks(server: Server, num_chunks: int, waiting: Callable[[int], None]) -> None:
    """Wait until the server has built its chunks in the background, and probed them.

    Args:
        server: A server with blending.
        num_chunks: How many there must be.
        waiting: Called again and again with the number built so far.

    Raises:
        ServerError: They were not built in time.
    """
    started = time.monotonic()
    built = 0
    while time.monotonic() - started < BUILD_TIMEOUT_S:
        info = server.info()
        built = int(info["chunks_built"])
        waiting(built)
        if built >= num_chunks and info["chunks_pending"] == info["probes_pending"] == 0:
            return
        time.sleep(0.25)
    raise ServerError(f"only {built} of {num_chunks} chunks built in {BUILD_TIMEOUT_S:.0f} s")


def kl_divergence(full: np.ndarray, blended: np.ndarray) -> float:
    """Mean over prompts of KL(full || blended), in nats.

    Args:
        full: float64 [num_prompts, vocab_size], logprobs after a full prefill.
        blended: Same shape, logprobs after blending.
    """
    return float((np.exp(full) * (full - blended)).sum(axis=1).mean())


def top1_agreement(full: np.ndarray, blended: np.ndarray) -> float:
    """Share of prompts whose most likely first token is the same."""
    return float((full.argmax(axis=1) == blended.argmax(axis=1)).mean())

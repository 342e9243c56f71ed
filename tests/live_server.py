"""Real servers for the tests that attack them: started, asked, checked, and started anew if dead."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from sgl_blend.commands.common.server import launched

FLAGS = (
    *("--max-total-tokens", "24000", "--skip-server-warmup", "--log-level", "warning"),
    # SGLang 0.5.17 puts xgrammar's masks into pinned memory, which there is none of on a CPU.
    *("--grammar-backend", "llguidance"),
)
BLEND = ("--enable-blend", "--blend-when", "always", "--blend-check-layer", "1")
SYSTEM_TOKENS, GAP_TOKENS, QUESTION_TOKENS = 50, 12, 20
FIRST_TOKEN, LAST_TOKEN = 10, 380  # of the tiny models' vocabulary, without the special ones
REST_TIMEOUT_S = 120.0
MAX_LOGPROB_ERROR = 1e-3

_serial = itertools.count()


def new_tokens(count: int) -> list[int]:
    """Return random tokens that no test has seen."""
    return random.Random(f"prompt {next(_serial)}").choices(range(FIRST_TOKEN, LAST_TOKEN), k=count)


def new_prompt(*chunk_lengths: int) -> tuple[list[int], list[int]]:
    """Return a new prompt and the spans of its chunks; none stands right after the first segment."""
    ids, spans = [1, *new_tokens(SYSTEM_TOKENS + GAP_TOKENS - 1)], []
    for length in chunk_lengths:
        spans += [len(ids), len(ids) + length]
        ids += new_tokens(length)
    return ids + new_tokens(QUESTION_TOKENS), spans


class LiveServer:
    """A running server that remembers what it answered when it was new.

    Args:
        model: Folder of the model.
        flags: Of the server.
        log: File for everything it prints.
    """

    def __init__(self, model: Path, flags: Sequence[str], log: Path) -> None:
        self._stack = ExitStack()
        environment = ("OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
        try:
            self._launch = self._stack.enter_context(launched(model, flags, log, environment))
            self.server = self._launch.wait()
        except BaseException:
            self._stack.close()
            raise
        self.http = self.server.http
        self._prompt = new_prompt(70, 66, 90)
        self._ways: list[dict[str, Any]] = [{}, {"spans": self._prompt[1], "ratio": 1.0}]
        if "learned" in flags:  # else it would blend the reference, too, and answer by it
            self._ways = [{**way, "find": "marks"} for way in self._ways]
        self._references = [self._answer(**self._ways[0])] * len(self._ways)
        if "block" in flags:  # answers with chunks are those of another forward, whatever the ratio
            self._references[1] = self._answer(**self._ways[1])
            assert self._references[1] != self._references[0]

    def close(self) -> None:
        """Stop the server at once: asked to end, SGLang sleeps five seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self._launch.process.pid, signal.SIGKILL)
        self._stack.close()

    def is_alive(self) -> bool:
        """Tell whether all its processes answer."""
        try:
            return self._launch.process.poll() is None and bool(self.server.server_info())
        except (httpx.HTTPError, KeyError):
            return False

    def last_words(self) -> str:
        """Return the errors in its log."""
        lines = self._launch.log.read_text(errors="replace").splitlines()
        words = ("Error", "assert", "Exception")
        return "\n".join([line for line in lines if any(word in line for word in words)][-6:])

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request.

        Raises:
            AssertionError: The server died of it; the message shows the errors in its log.
        """
        try:
            return self.http.request(method, path, **more)
        except httpx.TransportError as err:
            time.sleep(1.0)  # its log is still being written
            raise AssertionError(
                f"{method} {path}: {type(err).__name__}, the server died or hangs:\n{self.last_words()}"
            ) from None

    def generate(
        self,
        ids: list[int],
        spans: list[int] | None = None,
        ratio: float | None = None,
        find: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Ask for one token by default; return the answer."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        sampling |= {key: more.pop(key) for key in ("max_new_tokens",) if key in more}
        given = {"sgl_blend_spans": spans, "sgl_blend_ratio": ratio, "sgl_blend_find": find}
        if params := {name: value for name, value in given.items() if value not in (None, [])}:
            sampling["custom_params"] = params
        body = {"input_ids": ids, "sampling_params": sampling, **more}
        response = self.call("POST", "/generate", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(
        self, ids: list[int], spans: list[int] | None = None, max_new_tokens: int = 1
    ) -> Iterator[float]:
        """Yield when each token came, in seconds of time.perf_counter(); closing it hangs up."""
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        sampling["max_new_tokens"] = max_new_tokens
        if spans:
            sampling["custom_params"] = {"sgl_blend_spans": spans}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        with self.http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == httpx.codes.OK
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()

    def ttft_s(self, ids: list[int], spans: list[int] | None = None) -> float:
        """Return the time to first token of one request, in seconds."""
        start = time.perf_counter()
        (first,) = self.stream(ids, spans)
        return first - start

    def info(self) -> dict[str, Any]:
        """Return the plugin's totals."""
        try:
            return self.server.info()
        except httpx.HTTPError as err:
            raise AssertionError(f"{err!r}, the server died:\n{self.last_words()}") from None

    # --- is it unharmed? ---

    def check_unharmed(self) -> None:
        """Check that it rests, holds no lock, leaked nothing, and answers as when it was new."""
        self.wait_until_at_rest()
        for way, want in zip(self._ways, self._references, strict=True):
            self._compare(self._answer(**way), want, f"asked with {way}")
        self.wait_until_at_rest()

    def wait_until_at_rest(self) -> None:
        """Wait until nothing is pending or locked and the whole pool is free or evictable."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            info = self.info()
            pool, canary = info["pool"], info["canary"] or {"pending": 0}
            pending = info["chunks_pending"] + info["probes_pending"] + canary["pending"]
            accounted = pool["free"] + pool["evictable"] == pool["capacity"]
            if pending == 0 and pool["locked"] == 0 and accounted:
                return
            assert time.monotonic() < deadline, f"not at rest: {pending} pending, pool {pool}"
            time.sleep(0.1)

    def _answer(self, **way: Any) -> list[tuple[float, int]]:
        """Return log-probability and id of each token of the reference prompt's answer."""
        answer = self.generate(self._prompt[0], **way, max_new_tokens=8, return_logprob=True)
        return [(entry[0], entry[1]) for entry in answer["meta_info"]["output_token_logprobs"]]

    def _compare(
        self, got: list[tuple[float, int]], want: list[tuple[float, int]], what: str
    ) -> None:
        assert [token for _, token in got] == [token for _, token in want], what
        errors = [abs(g[0] - w[0]) for g, w in zip(got, want, strict=True)]
        assert max(errors) < MAX_LOGPROB_ERROR, f"{what}: log-probabilities differ by {errors}"


class Decoding:
    """A request that decodes in a thread of its own until the block ends."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._times: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        for at_s in self._server.stream([1, *new_tokens(QUESTION_TOKENS)], max_new_tokens=4000):
            self._times.append(at_s)
            if self._stop.is_set():
                return

    def __enter__(self) -> "Decoding":
        self._thread.start()
        while not self._times:
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def largest_gap_s(self, since_s: float) -> float:
        """Return the longest time without a token after a moment, in seconds."""
        times = [at_s for at_s in self._times if at_s >= since_s]
        assert len(times) > 1, "it decoded nothing"
        return max(b - a for a, b in itertools.pairwise([since_s, *times]))


class Servers:
    """The servers of a test module, by their flags.

    Args:
        model: Folder of the model.
        folder: For their logs.
        limit: Most that run at once; the one that was asked for longest ago ends.
    """

    def __init__(self, model: Path, folder: Path, limit: int = 2) -> None:
        self.model = model
        self._folder = folder
        self._limit = limit
        self._running: dict[tuple[str, ...], LiveServer] = {}
        self._started = 0

    def get(self, *flags: str) -> LiveServer:
        """Return a server with these flags that lives."""
        server = self._running.pop(flags, None)
        if server is not None and not server.is_alive():
            server.close()
            server = None
        if server is None:
            while len(self._running) >= self._limit:
                self._running.pop(next(iter(self._running))).close()
            self._started += 1
            log = self._folder / f"server-{self._started}.log"
            server = LiveServer(self.model, [*FLAGS, *flags], log)
        self._running[flags] = server  # after all others
        return server

    @contextmanager
    def use(self, *flags: str) -> Iterator[LiveServer]:
        """Lend a server that lives; it ends if the block fails, because its state is unknown then."""
        server = self.get(*flags)
        try:
            yield server
        except BaseException:
            self._running.pop(flags, None)
            server.close()
            raise

    def close(self) -> None:
        """Stop all."""
        for server in self._running.values():
            server.close()
        self._running.clear()

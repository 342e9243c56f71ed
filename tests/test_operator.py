"""Operator endpoints and other clients while a background build runs: as on stock, in every state.

A client's request was answered; that the server still builds its chunks is the server's own affair.
Nobody who flushes, pauses, updates weights or releases memory may notice it, nor may the next request.
"""

import base64
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import BLEND, Decoding, LiveServer, Servers, new_prompt, new_tokens
from tiny_models import make_model, make_text_model

pytestmark = pytest.mark.engine

SMALL_STEPS = ("--chunked-prefill-size", "128")
LARGE_STEPS = ("--chunked-prefill-size", "256")
SCHEDULES = {
    "overlap": (*BLEND, *SMALL_STEPS),
    # With a canary, so that its shadows can be met as well.
    "no overlap": (
        *(*BLEND, *SMALL_STEPS, "--disable-overlap-schedule"),
        *("--blend-canary-rate", "1", "--blend-canary-max-kl", "1000"),
    ),
    "host tier": (*BLEND, *SMALL_STEPS, "--enable-hierarchical-cache"),
    "drafts": (
        *(*BLEND, *SMALL_STEPS, "--speculative-algorithm", "NGRAM"),
        *("--speculative-ngram-capacity", "10000"),
    ),
}
SHORT_CHUNK, LONG_CHUNK = 2000, 4000
QUESTION = 24
DELAY_S = 0.12
WATCH_S = 0.6


@dataclass(frozen=True)
class Call:
    """One call of an operator; its status is to be stock's."""

    path: str
    body: dict[str, Any] | None = field(default_factory=dict)
    method: str = "POST"


EMPTY = "nothing is pending and the whole pool is free"
STILL = "no build runs"

FLUSH = Call("/flush_cache")
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
CONTINUE = Call("/continue_generation")


def pause(mode: str) -> Call:
    return Call("/pause_generation", {"mode": mode})


def disk(*, flush: bool) -> Call:
    return Call("/update_weights_from_disk", {"model_path": "MODEL", "flush_cache": flush})


def tags(*names: str) -> dict[str, Any]:
    return {"tags": list(names)}


SCRIPTS: dict[str, list[Call | str]] = {
    "flush": [FLUSH, EMPTY, FLUSH, EMPTY, FLUSH],
    "flush by GET": [Call("/flush_cache", None, "GET"), EMPTY, Call("/flush_cache", None, "GET")],
    "flush with a timeout": [Call("/flush_cache?timeout=20"), EMPTY, FLUSH],
    "weights from disk": [disk(flush=True), EMPTY, disk(flush=True)],
    "weights from disk, cache kept": [disk(flush=False), disk(flush=False), FLUSH, EMPTY],
    "weights from tensors": [
        *(Call("/begin_weight_update"), Call("/update_weights_from_tensor", {"tensors": True})),
        *(Call("/end_weight_update"), EMPTY),
    ],
    "memory": [Call(RELEASE), STILL, EMPTY, Call(RESUME), EMPTY],
    "memory of the weights": [
        *(Call(RELEASE, tags("weights")), STILL, Call(RESUME, tags("weights"))),
    ],
    "memory of the cache": [
        *(Call(RELEASE, tags("kv_cache")), STILL, EMPTY, Call(RESUME, tags("kv_cache"))),
    ],
    "pause in place": [pause("in_place"), STILL, CONTINUE, CONTINUE],
    "pause and retract": [pause("retract"), STILL, CONTINUE],
    "pause and abort": [pause("abort"), CONTINUE],
    "flush while paused": [pause("retract"), FLUSH, EMPTY, CONTINUE],
    "flush while paused in place": [pause("in_place"), FLUSH, EMPTY, CONTINUE],
    "a step of reinforcement learning": [
        *(pause("retract"), Call(RELEASE), STILL, Call(RESUME, tags("weights"))),
        *(disk(flush=False), Call(RESUME, tags("kv_cache", "cuda_graph")), FLUSH, CONTINUE),
    ],
    "abort of all": [Call("/abort_request", {"rid": "", "abort_all": True})],
    "looks": [
        *(Call("/health_generate", None, "GET"), Call("/health", None, "GET")),
        *(Call("/server_info", None, "GET"), Call("/get_load", None, "GET")),
        *(Call("/v1/loads", None, "GET"), Call("/model_info", None, "GET")),
        *(Call("/freeze_gc"), Call("/weights_checker", {"action": "checksum"})),
        Call("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 2}),
    ],
}
DEADLY = ("flush", "weights from disk", "memory")
"""Each of them ended the server when builds were ordinary requests of several steps."""


@dataclass(frozen=True)
class Case:
    schedule: str
    state: str
    script: str
    chunk_tokens: int = SHORT_CHUNK

    def __str__(self) -> str:
        return f"{self.schedule}, {self.state}, {self.script}, {self.chunk_tokens}"


def make_cases() -> list[Any]:
    quick = [Case("overlap", "cut", script) for script in SCRIPTS]
    quick += [Case("overlap", state, script) for state in ("pending", "steps") for script in DEADLY]
    quick += [Case("no overlap", state, script) for state in ("cut", "shadow") for script in DEADLY]
    every = [
        Case(*key, LONG_CHUNK)
        for key in itertools.product(SCHEDULES, ("pending", "steps", "cut", "shadow"), SCRIPTS)
        if key[0] == "no overlap" or key[1] != "shadow"  # only that server has a canary
    ]
    return [
        *(pytest.param(case, id=str(case)) for case in quick),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in every),
    ]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = make_text_model("llama", tmp_path_factory.mktemp("model"))
    started = Servers(model, tmp_path_factory.mktemp("servers"))
    yield started
    started.close()


class SharedTensors:
    """Bodies that set one parameter to what it is; each is read once, while this object lives."""

    def __init__(self, model: Path) -> None:
        set_sharing_strategy: Any = torch.multiprocessing.set_sharing_strategy
        set_sharing_strategy("file_system")  # by name: any process may open it
        self._file = model / "model.safetensors"
        self._held: list[Any] = []

    def body(self) -> dict[str, Any]:
        from safetensors.torch import load_file
        from sglang.srt.utils import MultiprocessingSerializer

        name = "model.norm.weight"
        self._held.append([(name, load_file(self._file)[name])])
        data = MultiprocessingSerializer.serialize(self._held[-1])
        return {"serialized_named_tensors": [base64.b64encode(data).decode()], "flush_cache": True}


class Operator:
    """Runs scripts and keeps the statuses that a stock server gave."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._tensors = SharedTensors(servers.model)
        self._stock: dict[str, list[int]] = {}

    def _send(self, server: LiveServer, call: Call) -> int:
        body = call.body
        if body is not None:
            body = self._tensors.body() if "tensors" in body else body
            if body.get("model_path") == "MODEL":
                body = {**body, "model_path": str(self._servers.model)}
        response = server.call(call.method, call.path, json=body)
        return response.status_code

    def run(self, server: LiveServer, script: str) -> list[int]:
        """Run a script on a blending server, checks included, and return the statuses."""
        statuses = []
        for step in SCRIPTS[script]:
            if isinstance(step, Call):
                statuses.append(self._send(server, step))
            elif step == EMPTY:
                info = server.info()
                found = info["chunks_pending"], info["pool"]
                empty = found[0] == 0 and found[1]["free"] == found[1]["capacity"]
                assert empty, f"{step}: {found} after {statuses}"
            else:
                before = progress(server)
                time.sleep(WATCH_S)
                assert progress(server) == before, f"{step} after {statuses}"
        return statuses

    def stock_statuses(self, script: str) -> list[int]:
        """Return the statuses of a stock server that rests."""
        if script not in self._stock:
            server = self._servers.get(*LARGE_STEPS)
            server.generate(new_prompt(200)[0])
            time.sleep(DELAY_S)  # right after an answer SGLang itself may end of new weights
            calls = [step for step in SCRIPTS[script] if isinstance(step, Call)]
            self._stock[script] = [self._send(server, call) for call in calls]
            server.generate(new_prompt(200)[0])
        return self._stock[script]


@pytest.fixture(scope="module")
def operator(servers: Servers) -> Operator:
    return Operator(servers)


def progress(server: LiveServer) -> tuple[Any, ...]:
    """Return what changes when a build or a shadow makes a step."""
    info = server.info()
    steps = info.get("build_steps", info["chunks_built"])
    return steps, info["pool"], info["canary"] and info["canary"]["compared"]


def enter(server: LiveServer, case: Case) -> None:
    """Let clients' requests be answered until the server is in the case's state."""
    for _ in range(4):
        if case.state == "shadow":
            ask_for_a_shadow(server, case.chunk_tokens)
        else:
            count = case.chunk_tokens // 100
            lengths = [100] * count if case.state == "steps" else [case.chunk_tokens]
            server.generate(*new_prompt(*lengths))
        if case.state == "pending":
            return  # the operator comes at once: to look first would take too long
        time.sleep(DELAY_S)
        info = server.info()
        if info["canary"]["pending"] if case.state == "shadow" else info["chunks_pending"]:
            return
    raise AssertionError(f"background work was over each time: there is no state {case.state!r}")


def ask_for_a_shadow(server: LiveServer, chunk_tokens: int) -> None:
    """Let a request reuse a stored chunk at another place."""
    ids, spans = new_prompt(chunk_tokens // 2, 200)
    server.generate(ids, spans)
    server.wait_until_at_rest()
    first, last, stop = spans[0], spans[1], spans[3]
    moved = ids[:first] + ids[last:stop] + ids[first:last] + new_tokens(QUESTION)
    answer = server.generate(moved, [first, first + 200, first + 200, stop])
    assert answer["meta_info"]["sgl_blend"][0]["reused_tokens"] > 0


@pytest.mark.parametrize("case", make_cases())
def test_an_operator_does_not_notice_background_work(
    servers: Servers, operator: Operator, case: Case
) -> None:
    want = operator.stock_statuses(case.script)
    with servers.use(*SCHEDULES[case.schedule]) as server:
        enter(server, case)

        assert operator.run(server, case.script) == want

        server.check_unharmed()


def test_a_flush_with_a_timeout_does_not_wait_for_builds(servers: Servers) -> None:
    with servers.use(*SCHEDULES["overlap"]) as server:
        forgotten = []
        for _ in range(3):  # the machine may stop for a moment, and the build be done
            ids, spans = new_prompt(LONG_CHUNK)
            before = server.info()["chunks_built"]
            server.generate(ids, spans)
            assert server.call("POST", "/flush_cache?timeout=60").status_code == 200
            after = server.info()
            assert after["chunks_pending"] == 0
            forgotten.append(after["chunks_built"] == before)

        assert any(forgotten), "the flush waited until the chunk was built"
        server.check_unharmed()


def test_chunk_kv_of_old_weights_is_not_used(servers: Servers, tmp_path: Path) -> None:
    other = make_model("llama", tmp_path, seed=1)
    with servers.use(*SCHEDULES["overlap"]) as server:
        prompt, spans = new_prompt(80, 80)
        first, second = spans[:2], spans[2:]

        def ask(ratio: float) -> dict[str, Any]:
            head, a, b = prompt[: first[0]], prompt[slice(*second)], prompt[slice(*first)]
            ids = head + a + b + new_tokens(20)
            report: dict[str, Any] = server.generate(ids, spans, ratio)["meta_info"]["sgl_blend"][0]
            server.wait_until_at_rest()
            return report

        def update(path: Path) -> None:
            body = {"model_path": str(path), "flush_cache": False}
            assert server.call("POST", "/update_weights_from_disk", json=body).status_code == 200

        server.generate(prompt, spans)
        server.wait_until_at_rest()
        before = ask(0.1)
        assert before["chunk_hits"] == 2, before
        update(other)
        try:
            changed = ask(0.1)
            again = ask(0.2)  # another namespace, so that the first answer is no prefix of it
            assert changed["chunk_hits"] == 0, changed
            assert again["chunk_hits"] == 2, again
        finally:
            update(servers.model)
        server.check_unharmed()


# --- other clients ------------------------------------------------------------------------------

LONG_BUILDS = pytest.mark.parametrize(
    "chunk_tokens", [2500, pytest.param(7000, marks=pytest.mark.slow)]
)


def time_step(server: LiveServer, prompt: list[int], length: int) -> list[float]:
    """Return times of a build's longest step: the last one of a prompt whose rest is cached."""
    server.generate(prompt)
    return [server.ttft_s(prompt[:-length] + new_tokens(length)) for _ in range(5)]


def short_ttfts(server: LiveServer, at_least: int, *, building: bool) -> list[float]:
    """Return TTFTs of short requests, sent now and then; only while a build runs, if asked to."""
    found: list[float] = []
    pauses = itertools.cycle((0.11, 0.23, 0.17, 0.29))
    while len(found) < at_least and (not building or server.info()["chunks_pending"]):
        found.append(server.ttft_s([1, *new_tokens(QUESTION)]))
        time.sleep(next(pauses))
    return found


@LONG_BUILDS
def test_a_short_request_waits_for_one_step_of_a_long_build(
    servers: Servers, chunk_tokens: int
) -> None:
    prompt, spans = new_prompt(chunk_tokens)
    stock = servers.get(*LARGE_STEPS)
    with servers.use(*BLEND, *LARGE_STEPS) as server:
        length = server.info()["build_step_tokens"]
        steps = [time_step(stock, prompt, length)]
        idle = [short_ttfts(server, 12, building=False)]
        server.generate(prompt, spans)

        beside = short_ttfts(server, 12, building=True)

        # The machine may be slower than it was: what it is compared with is measured again.
        server.wait_until_at_rest()
        idle.append(short_ttfts(server, 12, building=False))
        steps.append(time_step(stock, prompt, length))
        assert len(beside) >= 3, f"the build was over after {beside}, idle {idle}"
        bar = max(map(statistics.median, idle)) + max(map(statistics.median, steps))
        assert statistics.median(beside) <= bar, f"{beside}, idle {idle}, steps {steps}"
        longest = max(map(max, idle)) + max(map(max, steps))
        assert sorted(beside)[-2] <= longest, f"{beside}, idle {idle}, steps {steps}"
        server.check_unharmed()


def gap_after(server: LiveServer, chunk_tokens: int, *, marked: bool) -> float:
    """Return the largest gap of a running request after the answer to a long cold one."""
    prompt, spans = new_prompt(chunk_tokens)
    with Decoding(server) as decoding:
        server.generate(prompt, spans if marked else None)
        answered = time.perf_counter()
        if marked:
            assert server.info()["chunks_pending"] > 0
        time.sleep(2.0)
    return decoding.largest_gap_s(answered)


@LONG_BUILDS
def test_a_running_request_waits_for_one_step_of_a_long_build(
    servers: Servers, chunk_tokens: int
) -> None:
    stock = servers.get(*LARGE_STEPS)
    with servers.use(*BLEND, *LARGE_STEPS) as server:
        prompt, length = new_prompt(chunk_tokens)[0], server.info()["build_step_tokens"]
        rounds: list[tuple[float, float]] = []
        # The machine may stop for a moment in one of the rounds, or be slower than it was: what a gap
        # is compared with is measured in its round. A build that is not cut shows in all.
        while not rounds or (len(rounds) < 5 and rounds[-1][0] > rounds[-1][1]):
            steps = time_step(stock, prompt, length)
            control = gap_after(stock, chunk_tokens, marked=False)
            gap = gap_after(server, chunk_tokens, marked=True)
            rounds.append((gap, control + max(steps)))

        gap, bar = rounds[-1]
        assert gap <= bar, f"gaps, and stock's with one step: {rounds}"
        server.check_unharmed()

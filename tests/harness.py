"""The real SGLang scheduler, pool and model, stepped by hand in a process of their own.

`Engine` in the test process starts a worker; `Engine.call` runs a module-level function there with a
`Driver`, which holds SGLang's Scheduler and does what its event loops do, one step at a time. Tests
so see KV bytes, locks and the order of things, which no client could. Nothing of SGLang is replaced:
its memory check runs at every idle step and raises.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import FORK_SERVER, PATIENCE_S
from tiny_models import VOCAB_SIZE

CPU_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "log_level": "error",
    "max_total_tokens": 6000,
    "max_running_requests": 64,
    "random_seed": 0,
    "mem_fraction_static": 0.3,
    "watchdog_timeout": 1e6,  # nobody steps an engine while another one is tested
    # For a GPU: tools/gpu_run.py.
    **json.loads(os.environ.get("SGL_BLEND_TEST_ENGINE", "{}")),
}


@dataclass
class Prompt:
    """A request as a test writes it."""

    segments: list[list[int]]
    """Tokens before the first chunk, the chunks and pieces between, tokens behind the last."""
    chunk_at: list[int] = field(default_factory=list)
    """Which segments are chunks."""
    params: dict[str, Any] = field(default_factory=dict)
    """custom_params beside the spans."""
    salt: str | None = None
    max_new_tokens: int = 1
    temperature: float = 0.0
    logprob_start_len: int = -1
    priority: int | None = None
    ignore_eos: bool = True
    logprobs: bool = True
    """Ask for the logprobs of the whole vocabulary; SGLang keeps such requests out of mixed batches."""

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment]

    @property
    def spans(self) -> list[int]:
        offsets: list[int] = []
        for index in self.chunk_at:
            start = sum(len(segment) for segment in self.segments[:index])
            offsets += [start, start + len(self.segments[index])]
        return offsets


@dataclass
class Answer:
    """What came of a request."""

    output_ids: list[int]
    logprobs: list[list[float]]
    """Per output token the log-probability of every token of the vocabulary."""
    input_logprobs: list[float]
    report: dict[str, Any]
    finish: str


def _stock_if_absent(settings: dict[str, Any]) -> dict[str, Any]:
    """Merge settings over the CPU's; enable_blend=None stands for a process without the plugin."""
    merged = {**CPU_ARGS, **settings}
    return {name: value for name, value in merged.items() if value is not None}


def _start_scheduler(server_args: Any, ports: Any, rank: int) -> Any:
    """Do what SGLang's run_scheduler_process does before its event loop, in every version.

    The rank is the tensor-parallel one; all others are 0.
    """
    from sglang.srt import runtime_context
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process

    if hasattr(runtime_context, "SpawnRanks"):
        ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
        runtime_context.publish(server_args, role="scheduler", ranks=ranks)
        configure_scheduler_process(server_args, rank)
        return Scheduler(server_args, ports)
    ranks_of_one = (rank, 0, 0, 0, 0, None)
    configure_scheduler_process(server_args, rank, *ranks_of_one)
    runtime_context.publish(server_args, role="scheduler")
    return Scheduler(server_args, ports, rank, *ranks_of_one)


class Driver:
    """Holds the scheduler in the worker process."""

    def __init__(self, settings: dict[str, Any], rank: int = 0) -> None:
        import torch
        import zmq
        from sglang.srt.entrypoints.engine import Engine as SGLangEngine
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs

        load_plugins()
        server_args = SGLangEngine.server_args_class(**_stock_if_absent(settings))
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        server_args.check_server_args()
        ports = PortArgs.init_new(server_args)
        context: Any = zmq.Context.instance()
        self._sinks = []
        for name in (ports.tokenizer_ipc_name, ports.detokenizer_ipc_name):
            sink = context.socket(zmq.PULL)
            sink.bind(name)
            self._sinks.append(sink)
        self.scheduler = _start_scheduler(server_args, ports, rank)
        torch.set_num_threads(1)  # SGLang took all; tiny matrices only wait for each other
        self.modules_of_ours = [name for name in sys.modules if name.startswith("sgl_blend")]
        """What of sgl-blend SGLang has loaded; later calls of a test load more."""
        runtime = getattr(self.scheduler, "sgl_blend", None)
        owners = () if runtime is None else (runtime.builder, runtime.canary)
        self._internal = tuple(owner.rid_prefix for owner in owners if owner is not None)
        self.num_batches = 0
        if self.scheduler.enable_overlap:  # what run_event_loop does on a CPU
            self.scheduler.result_queue = deque()
            self.scheduler.schedule_stream = self.scheduler.device_module.Stream(priority=0)
            self.scheduler.schedule_stream.synchronize = lambda: None
        self._serial = 0

    # --- requests ---

    def submit(self, prompt: Prompt) -> Any:
        """Hand a request to the scheduler as its receive loop would, and return SGLang's Req."""
        return self.hand_over(self.receive(prompt))

    def hand_over(self, received: Any) -> Any:
        """Hand the scheduler what the tokenizer process sent, and return SGLang's Req."""
        self.scheduler.handle_generate_request(received)
        found = [req for req in self.scheduler.waiting_queue if req.rid == received.rid]
        assert found, "the scheduler did not queue the request"
        return found[0]

    def receive(self, prompt: Prompt) -> Any:
        """Return a request as the tokenizer process sends it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        from sgl_blend.engine.requests import set_salt

        self._serial += 1
        rid = f"test-{self._serial}"
        custom: dict[str, Any] = dict(prompt.params)
        if prompt.chunk_at:
            custom["sgl_blend_spans"] = prompt.spans
        sampling = SamplingParams(
            temperature=prompt.temperature,
            max_new_tokens=prompt.max_new_tokens,
            ignore_eos=prompt.ignore_eos,
            custom_params=custom or None,
        )
        sampling.normalize(None)
        received = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", prompt.tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=prompt.logprobs,
            logprob_start_len=prompt.logprob_start_len,
            top_logprobs_num=VOCAB_SIZE if prompt.logprobs else 0,
            token_ids_logprob=None,
            stream=False,
            priority=prompt.priority,
        )
        set_salt(received, prompt.salt)
        return received

    def ask(self, *prompts: Prompt) -> list[Answer]:
        """Submit requests at once, run until all are done, and return their answers."""
        reqs = [self.submit(prompt) for prompt in prompts]
        self.run_until(lambda: all(req.finished() for req in reqs))
        return [self.answer(req) for req in reqs]

    def answer(self, req: Any) -> Answer:
        logprob = req.logprob if req.return_logprob else None
        rows = (
            zip(logprob.output_top_logprobs_val, logprob.output_top_logprobs_idx, strict=True)
            if logprob is not None
            else ()
        )
        tables = []
        for values, tokens in rows:
            by_token = dict(zip(tokens, values, strict=True))
            tables.append([float(by_token[token]) for token in sorted(by_token)])
        inputs = (logprob.input_token_logprobs_val if logprob is not None else None) or []
        state = getattr(req, "sgl_blend", None)
        report = {} if state is None else state.report.for_client()
        if state is not None and state.told:
            assert state.told == report, "the client is told something else than what was counted"
        return Answer(
            output_ids=list(req.output_ids),
            logprobs=tables,
            input_logprobs=[float(x) for x in inputs if x is not None],
            report=report,
            finish=type(req.finished_reason).__name__,
        )

    # --- the event loop, one step at a time ---

    def step(self) -> bool:
        """Do one round of SGLang's event loop; return whether a batch ran."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        scheduler.cur_batch_for_debug = batch
        self.num_batches += bool(batch)
        if scheduler.enable_overlap:
            self._run_overlapped(batch)
        elif batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        self._drain()
        return bool(batch)

    def _run_overlapped(self, batch: Any) -> None:
        """Launch a batch before the result of the last one is looked at, as SGLang does by default."""
        scheduler = self.scheduler
        at_once = scheduler.is_disable_overlap_for_batch(batch, last_batch=scheduler.last_batch)
        if at_once:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        result = None
        if batch:
            result = scheduler.run_batch(batch)
            scheduler.result_queue.append((batch.copy(), result))
        if scheduler.last_batch:
            if not at_once:
                scheduler.process_batch_result(*scheduler.result_queue.popleft())
        elif batch is None:
            scheduler.on_idle()
        scheduler.launch_batch_sample_if_needed(result, batch)

    def run_until(self, done: Callable[[], bool], limit: int = 5000) -> None:
        for _ in range(limit):
            if done():
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def settle(self) -> None:
        """Run until nothing is left to do, background work included, and check the pool."""
        idle = 0
        deadline = time.monotonic() + 60
        while idle < 3 and time.monotonic() < deadline:
            resting = not self.step() and self._num_pending() == 0
            idle = idle + 1 if resting else 0
        assert idle == 3, "the scheduler never came to rest"
        assert self.scheduler.is_fully_idle()
        assert self.locked_tokens() == 0, "a lock outlives its request"

    def _num_pending(self) -> int:
        runtime = getattr(self.scheduler, "sgl_blend", None)
        if runtime is None:
            return 0
        shadows = 0 if runtime.canary is None else runtime.canary.num_pending
        return int(runtime.builder.num_pending + shadows)

    def _drain(self) -> None:
        from sglang.srt.managers.io_struct import sock_recv

        for sink in self._sinks:
            while sink.poll(0):
                # Only what is streamed has rids; an abort, which names one, is for the tokenizer.
                streamed = getattr(sock_recv(sink), "rids", None) or []
                if any(rid.startswith(self._internal) for rid in streamed):
                    raise AssertionError("an internal request was streamed to the client")

    # --- looking inside ---

    def queued(self, received: Any) -> Any:
        """Return SGLang's Req for a received request, as it stands in the waiting queue."""
        from sglang.srt.managers.schedule_batch import Req

        vocab_size = self.scheduler.model_config.vocab_size
        tokens, sampling = received.input_ids, received.sampling_params
        req = Req(received.rid, "", tokens, sampling, vocab_size=vocab_size)
        req.full_untruncated_fill_ids = tokens
        return req

    @property
    def runtime(self) -> Any:
        return self.scheduler.sgl_blend

    def locked_tokens(self) -> int:
        return int(self.scheduler.tree_cache.protected_size())

    def flush(self) -> None:
        assert self.scheduler.flush_cache()

    def kv(self, tokens: list[int], salt: str | None) -> list[Any]:
        """Return copies of (K, V) of every layer for a path that must be stored completely."""
        from sgl_blend.engine.tree import match_prefix

        tree = self.scheduler.tree_cache
        match = match_prefix(tree, array("q", tokens), salt=salt, extra_key=None)
        assert len(match) == len(tokens), f"{len(match)} of {len(tokens)} tokens are stored"
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        layers = range(self.scheduler.model_config.num_hidden_layers)
        return [
            (
                pool.get_key_buffer(i)[match.slots].cpu(),
                pool.get_value_buffer(i)[match.slots].cpu(),
            )
            for i in layers
        ]

    def slots_of(self, tokens: list[int], salt: str | None) -> list[int]:
        """Return the slots of a path that must be stored completely; it counts as used."""
        from sgl_blend.engine.tree import match_prefix

        tree = self.scheduler.tree_cache
        match = match_prefix(tree, array("q", tokens), salt=salt, extra_key=None)
        assert len(match) == len(tokens), f"{len(match)} of {len(tokens)} tokens are stored"
        return [int(slot) for slot in match.slots]

    def chunk_salt(self, client_salt: str | None = None) -> str:
        from sgl_blend.radix_ext.namespaces import chunk_salt

        return chunk_salt(self.runtime.describe()["model_fingerprint"], client_salt)


class Engine:
    """A worker process with a Driver, from the test's side."""

    def __init__(self, model: Path, *, rank: int = 0, wait: bool = True, **settings: Any) -> None:
        # Here, not in the worker: a stock one has nothing of sgl-blend.
        from sgl_blend.commands.common.ports import reserve_port

        settings = {"model_path": str(model), "nccl_port": reserve_port(), **settings}
        self._pipe, far_end = FORK_SERVER.Pipe()
        work = (far_end, settings, rank, dict(os.environ))
        self._process = FORK_SERVER.Process(target=_serve, args=work, daemon=True)
        self._process.start()
        far_end.close()
        if wait:
            self.receive()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run function(driver, *args) in the worker and return what it returns."""
        self.send(function, *args)
        return self.receive()

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call and do not wait for it."""
        self._pipe.send((function, args))

    def ask(self, *prompts: Prompt) -> list[Answer]:
        answers: list[Answer] = self.call(_ask, *prompts)
        return answers

    def settle(self) -> None:
        self.call(Driver.settle)

    def flush(self) -> None:
        self.call(_settle_and_flush)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def receive(self) -> Any:
        """Wait for the start or for the call that was sent last, and return its result."""
        try:
            assert self._pipe.poll(PATIENCE_S), f"no result in {PATIENCE_S} s: the worker hangs"
            error, result = self._pipe.recv()
        except EOFError:
            raise AssertionError("the scheduler process died") from None
        if error is not None:
            raise AssertionError(f"in the scheduler process:\n{error}")
        return result


class Ranks:
    """The workers of one tensor-parallel engine, which must do everything together."""

    def __init__(self, model: Path, size: int, **settings: Any) -> None:
        from sgl_blend.commands.common.ports import reserve_port

        together = {"tp_size": size, "nccl_port": reserve_port(), **settings}
        self.engines = [Engine(model, rank=rank, wait=False, **together) for rank in range(size)]
        for engine in self.engines:
            engine.receive()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run function(driver, *args) in all workers and return each one's result."""
        for engine in self.engines:
            engine.send(function, *args)
        return [engine.receive() for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _ask(driver: Driver, *prompts: Prompt) -> list[Answer]:
    return driver.ask(*prompts)


def _settle_and_flush(driver: Driver) -> None:
    driver.settle()
    driver.flush()


def _serve(pipe: Any, settings: dict[str, Any], rank: int, environment: dict[str, str]) -> None:
    import warnings

    os.environ.clear()
    os.environ.update(environment)  # the fork server has that of its own start
    warnings.simplefilter("ignore")
    try:
        driver = Driver(settings, rank)
    except BaseException:  # noqa: BLE001 - whatever it is, the test process must see it
        pipe.send((traceback.format_exc(), None))
        os._exit(1)
    pipe.send((None, None))
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((None, function(driver, *args)))
        except BaseException:  # noqa: BLE001 - as above
            pipe.send((traceback.format_exc(), None))
    os._exit(0)


def namespace_of(req: Any) -> str:
    """Return the namespace that SGLang caches a request in, in every version."""
    return getattr(req, "cache_salt", None) or req.extra_key or ""


def random_tokens(seed: int, length: int) -> list[int]:
    """Return tokens that no other seed gives, none of them special."""
    draw = random.Random(seed)
    return [draw.randrange(8, VOCAB_SIZE) for _ in range(length)]


def rag_prompt(
    system: list[int], chunks: list[list[int]], question: list[int], **rest: Any
) -> Prompt:
    """Build the usual prompt: a system prompt, chunks, a question."""
    return Prompt([system, *chunks, question], list(range(1, 1 + len(chunks))), **rest)


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest absolute difference of two rows of log-probabilities."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

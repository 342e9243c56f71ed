"""SGLang's Scheduler with pool and model, stepped by hand in the process that holds it."""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from prompts import Answer, Prompt
from tiny_models import VOCAB_SIZE


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


def _check_cached(req: Any, report: dict[str, Any]) -> None:
    """Check what clients read in an answer's usage; a retracted request was counted before."""
    assert 0 <= req.cached_tokens <= report["prompt_tokens"]
    if not req.retracted_stain:
        assert req.cached_tokens == report["prefix_tokens"] + report["reused_tokens"]


class Driver:
    """Holds the scheduler in the worker process."""

    def __init__(self, settings: dict[str, Any], rank: int = 0) -> None:
        import torch
        import zmq
        from sglang.srt.entrypoints.engine import Engine as SGLangEngine
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs

        load_plugins()
        server_args = SGLangEngine.server_args_class(**settings)
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
        owners = () if runtime is None else runtime.rounds.jobs
        self._internal = tuple(owner.rid_prefix for owner in owners)
        self.num_batches = 0
        if self.scheduler.enable_overlap:  # what run_event_loop does on a CPU
            self.scheduler.result_queue = deque()
            self.scheduler.schedule_stream = self.scheduler.device_module.Stream(priority=0)
            self.scheduler.schedule_stream.synchronize = lambda: None
        self._serial = 0
        self._num_tokens = min(VOCAB_SIZE, self.scheduler.model_config.vocab_size)

    def use_all_cores(self) -> None:
        """Have forwards take the time that the model was measured with, for benchmarks.

        With one thread the loading controller would take the model for faster than it is.
        """
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))

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
            top_logprobs_num=self._num_tokens if prompt.logprobs else 0,
            token_ids_logprob=None,
            stream=False,
            priority=prompt.priority,
            lora_id=prompt.adapter,
            extra_key=prompt.extra_key,
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
            _check_cached(req, report)
        output_ids = list(req.output_ids_through_stop)  # verified drafts may reach beyond it
        return Answer(
            output_ids=output_ids,
            logprobs=tables[: len(output_ids)],
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
            resting = resting and self.scheduler.is_fully_idle()  # a host tier copies beside it
            idle = idle + 1 if resting else 0
        assert idle == 3, "the scheduler never came to rest"
        assert self.scheduler.is_fully_idle()
        assert self.locked_tokens() == 0, "a lock outlives its request"

    def _num_pending(self) -> int:
        runtime = getattr(self.scheduler, "sgl_blend", None)
        if runtime is None:
            return 0
        return sum(job.num_pending for job in runtime.rounds.jobs)

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

    def kv(self, tokens: list[int], salt: str | None, extra_key: str | None = None) -> list[Any]:
        """Return copies of (K, V) of every layer for a path that must be stored completely."""
        from sgl_blend.engine.tree import match_prefix

        tree = self.scheduler.tree_cache
        match = match_prefix(tree, array("q", tokens), salt=salt, extra_key=extra_key)
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


def namespace_of(req: Any) -> str:
    """Return the namespace that SGLang caches a request in, in every version."""
    return getattr(req, "cache_salt", None) or req.extra_key or ""

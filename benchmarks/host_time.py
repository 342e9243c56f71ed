"""What a blended forward costs the host, in Python, beside the work of the device.

A model of width 8 leaves little else to do. Prompts of stored chunks are blended in new orders on the
engine that tests step by hand, and the CPU time of the scheduler's thread is taken: other processes on
the machine do not count. Time inside the torch reference of scattered attention is taken off; on a GPU
a kernel stands there.

    PYTHONPATH=tests python -m benchmarks.host_time [--against CHECKOUT] [--json FILE]

With ``--against``, another checkout of sgl-blend is measured in turns with this one, each time in a
process of its own. Printed and written per checkout, medians over all prompts of all rounds:

    preparation   ms from the begin of the forward to the first layer
    layer         ms of each layer above the check layer but the last one
    attention     microseconds of Python around one layer's Triton kernels, which are not launched
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import Driver, Engine, rag_prompt, random_tokens
from tiny_models import COMMON

from sgl_blend.commands.common.records import origin_of_script

ROOT = Path(__file__).parents[1]
LAYERS, CHECK_LAYER = 16, 1
POLICIES = ("hkvd", "funnel")
MEASURES = ("preparation", "layer")
CALLS = 300
SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 60) for i in range(5)]


def _make_model(folder: Path) -> Path:
    import torch
    import transformers

    width = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8, "num_attention_heads": 1}
    heads = {"num_key_value_heads": 1, "num_hidden_layers": LAYERS}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**COMMON, **width, **heads})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure_forwards(driver: Driver, prompts: int) -> dict[str, list[float]]:
    """Blend prompts one after another; return ms of CPU time by policy and measure."""
    from sgl_blend.fusion.fusor import Fusor

    fusor = driver.runtime._fusor
    now = time.thread_time
    marks: list[float] = []
    in_attention = 0.0
    attend, run = fusor._kernel.run, Fusor.run

    def timed_attend(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_attention
        begin = now()
        result = attend(*args, **kwargs)
        in_attention += now() - begin
        return result

    def timed_run(*args: Any) -> Any:
        marks.append(now() - in_attention)
        return run(*args)

    for layer in fusor._modules:
        layer.register_forward_pre_hook(lambda *_: marks.append(now() - in_attention))
    draw = random.Random(0)
    found: dict[str, list[float]] = {}
    with patch.object(fusor._kernel, "run", timed_attend), patch.object(Fusor, "run", timed_run):
        for number in range(prompts):
            policy = POLICIES[number % len(POLICIES)]
            order = draw.sample(CHUNKS, 4)
            params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.15}
            question = random_tokens(100 + number, 20)
            if number % 20 == 0:  # the pool is small
                driver.settle()
                driver.flush()
                driver.ask(rag_prompt(SYSTEM, CHUNKS, question, params=params, logprobs=False))
                driver.settle()
            marks.clear()
            driver.ask(rag_prompt(SYSTEM, order, question, params=params, logprobs=False))
            if len(marks) != 1 + LAYERS:
                continue  # nothing was blended, or a build came between
            above = marks[CHECK_LAYER + 2 :]
            layers = [b - a for a, b in itertools.pairwise(above)]
            times = (marks[1] - marks[0], statistics.median(layers))
            for name, seconds in zip(MEASURES, times, strict=True):
                found.setdefault(f"{policy} {name}", []).append(1e3 * seconds)
    return found


class _NoKernel:
    """Takes a launch and does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


def measure_attention() -> list[float]:
    """Return microseconds of Python of one layer's scattered attention, its KV split in two."""
    import torch

    from sgl_blend.kernels import ragged_attention_triton as triton

    rows, slots = 448, torch.arange(3136)
    q, pool = torch.zeros(rows, 32, 128).half(), torch.zeros(3136, 8, 128).half()
    times = []
    with (
        patch.object(triton, "_ragged_attention", _NoKernel()),
        patch.object(triton, "_merge_splits", _NoKernel()),
    ):
        plan = triton.TritonRagged().plan(slots[:rows], [rows], [slots], torch.float16)
        for _ in range(CALLS):
            begin = time.thread_time()
            triton.ragged_attention_triton(q, pool, pool, plan, scale=0.1, num_splits=2)
            times.append(1e6 * (time.thread_time() - begin))
    return times


def measure_here(prompts: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"blend_check_layer": CHECK_LAYER, "blend_when": "always"}
        engine = Engine(_make_model(Path(folder)), enable_blend=True, **settings)
        try:
            found: dict[str, list[float]] = engine.call(measure_forwards, prompts)
        finally:
            engine.close()
    return {**found, "attention": measure_attention()}


def _measure_in(checkout: Path, prompts: int) -> dict[str, list[float]]:
    """Measure a checkout in a process of its own."""
    path = os.pathsep.join([str(checkout), str(checkout / "tests")])
    done = subprocess.run(
        [
            "env",
            f"PYTHONPATH={path}",
            sys.executable,
            __file__,
            "--here",
            "--prompts",
            str(prompts),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=checkout,
    )
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=40, help="of each round and checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure_here(arguments.prompts)))
        return
    checkouts = {"this": ROOT}
    if arguments.against is not None:
        checkouts["other"] = arguments.against.resolve()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for _ in range(arguments.rounds):
        for name, checkout in checkouts.items():
            for measure, times in _measure_in(checkout, arguments.prompts).items():
                found[name].setdefault(measure, []).extend(times)
    medians = {
        name: {measure: round(statistics.median(times), 4) for measure, times in measured.items()}
        for name, measured in found.items()
    }
    for name, measured in medians.items():
        print(name, ", ".join(f"{measure} {time}" for measure, time in measured.items()))
    if arguments.json is not None:
        record = {"origin": origin_of_script(), "unit": "ms; attention in microseconds"}
        arguments.json.write_text(json.dumps({**record, "medians": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Everything that has to be shown on a GPU, in parts of less than ten minutes each.

    python tools/gpu_run.py 1 --out build/gpu      # correct? kernels, real SGLang, laws in bfloat16
    python tools/gpu_run.py 2 --out build/gpu      # fast? time to first token, where it goes
    python tools/gpu_run.py 3 --out build/gpu      # under load: throughput
    python tools/gpu_run.py 4 --out build/gpu      # FlashInfer: right? faster? compiles for minutes
    python tools/gpu_run.py 1 2 3 4 --tiny         # the same steps, small, on a CPU

Each step is a command of its own with a time limit and a log; a step that fails does not stop the
others, and what no longer fits before --deadline is left out and said so. Last comes a table; the exit
status is 1 if a step failed. benchmarks/gpu_todo.md says how a machine without a network gets SGLang.
"""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE_S = 40.0
"""For a step whose time is up to end its servers."""
LEAST_S = 20.0
"""A step that has no more time than this left is not begun."""
BLEND = [sys.executable, "-m", "sgl_blend"]
# Warnings of an untried stack are no reason to see nothing else.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
PARALLEL = ["-n", "8", "-p", "no:benchmark"] if importlib.util.find_spec("xdist") else []
KERNEL_TESTS = (
    "tests/test_delta_rope_triton.py",
    "tests/test_kv_deviation_triton.py",
    "tests/test_segmented_topk.py",
    "tests/test_row_compaction.py",
    "tests/test_ragged_attention_triton.py",
    "tests/test_attention_choice.py",
)
PREFILL_SIZES = [512, *range(1024, 4097, 256), *range(4608, 7169, 512), 7424, 7680, 8192]
"""Rows of a captured prefill. Stock rounds a prefill up to the next size. With few sizes it would do up
to twice the work, and our gain would be flattered. So these are its own from 1,024 rows on, and the
rows that the last step of a long prompt has."""
# What the light pack of SGLang for an offline machine can do: no fa3, no grammar. Stock captures 36
# more sizes of prefill below 1,024 rows, which nothing here has, and batches up to 256.
SERVER = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "cuda-graph-max-bs-decode": "128",
    "cuda-graph-config": json.dumps({"prefill": {"bs": PREFILL_SIZES}}),
}
CUDA_ENGINE = {
    "device": "cuda",
    "dtype": "bfloat16",  # SGLang's norm on CUDA takes no float32
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
}


@dataclass(frozen=True, slots=True)
class Step:
    """A command, how long it may take, and what its processes find in their environment."""

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Sequence[tuple[str, str]] = ()


def steps(part: int, out: Path, *, tiny: bool) -> list[Step]:
    """Return what a part consists of."""
    server = [] if tiny else [f"--server-arg={name}={value}" for name, value in SERVER.items()]
    shape = ["--shape", "tiny" if tiny else "llama-3.1-8b", *server]

    def bench(kind: str, name: str, *flags: str, limit_s: float = 240) -> Step:
        model = [] if kind == "kernels" else shape
        command = [*BLEND, "bench", kind, *model, *flags, "--json", str(out / f"{name}.json")]
        return Step(name, command, limit_s)

    engine = () if tiny else (("SGL_BLEND_TEST_ENGINE", json.dumps(CUDA_ENGINE)),)
    engine_args = (
        [] if tiny else [f"--engine-arg={k}={json.dumps(v)}" for k, v in CUDA_ENGINE.items()]
    )
    verify = [
        *(*BLEND, "verify", "--model-path", str(ROOT / "examples" / "tinyrag" / "model")),
        *(
            "--limit",
            "2" if tiny else "16",
            "--policies",
            "hkvd",
            "--ratios",
            "0.15",
            "--check-layers",
            "2",
        ),
        *("--max-kl", "9", "--json", str(out / "verify-bf16.json"), *engine_args),
    ]
    short = "300" if tiny else "paper"
    small = ["--chunk-tokens", "64"] if tiny else []
    repeats = ["--repeats", "2"]
    quick = ["--repeats", "2", "--batches", "1"] if tiny else ["--repeats", "5"]
    if part == 1:
        kernel_tests = KERNEL_TESTS[2:4] if tiny else KERNEL_TESTS
        return [
            Step("kernel-tests", [*PYTEST, *PARALLEL, "-m", "not engine", *kernel_tests], 240),
            bench("kernels", "kernels", "--plot", str(out / "kernels.png")),
            bench("profile", "smoke", "--length", short, *small, "--repeats", "2"),
            Step("law-l2", [*PYTEST, "tests/test_laws.py", "-k", "l2"], 120, engine),
            Step("no-sync", [*PYTEST, "tests/test_no_sync.py"], 120, engine),
            # A second thread makes so small a model slower.
            Step("verify-bf16", verify, 240, (("OMP_NUM_THREADS", "1"),) if tiny else ()),
        ]
    ratios = ["--ratios", "0.15" if tiny else "0,0.15,1"]
    if part == 2:
        long = "400" if tiny else "16k"
        return [
            bench("ttft", "ttft-paper", "--lengths", short, *small, *ratios, *quick),
            bench("profile", "profile", "--length", short, *small, *repeats),
            bench("ttft", "ttft-16k", "--lengths", long, *small, *ratios, *repeats, "--batches=1"),
            bench("profile", "profile-16k", "--length", long, *small, *repeats),
        ]
    seconds = ["--seconds", "2", "--rates", "1"] if tiny else ["--seconds", "10"]
    documents = ["--documents", "6", "--chunks", "4"] if tiny else []
    if part == 3:
        flags = [*seconds, *documents, *small, "--blocks", "1"]
        return [bench("throughput", "throughput", *flags, limit_s=560)]
    chosen = [] if tiny else ["--blend-arg=blend-attention=flashinfer"]
    return [
        Step("flashinfer-tests", [*PYTEST, "tests/test_ragged_attention_flashinfer.py"], 400),
        bench("kernels", "kernels-flashinfer", "--compile-flashinfer", limit_s=400),
        bench("ttft", "ttft-flashinfer", "--lengths", short, *small, *ratios, *quick, *chosen),
    ]


def run(step: Step, out: Path, limit_s: float) -> str:
    """Run a step; return how it ended."""
    settings = [f"{name}={value}" for name, value in step.environment]
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            ["env", *settings, *step.command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # An interrupt and time to obey it: its servers would hold the GPU otherwise.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"over {limit_s:.0f} s"
    return "ok" if status == 0 else f"status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time everything on a GPU.")
    parser.add_argument("parts", nargs="+", type=int, choices=(1, 2, 3, 4))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a try on a CPU")
    parser.add_argument("--only", help="comma-separated names of steps")
    parser.add_argument(
        "--deadline", type=float, default=1e9, help="seconds after which everything has ended"
    )
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    wanted = None if args.only is None else set(args.only.split(","))
    chosen = [
        step
        for part in args.parts
        for step in steps(part, out, tiny=args.tiny)
        if wanted is None or step.name in wanted
    ]
    begun = time.monotonic()
    summary: list[dict[str, str | float]] = []
    for step in chosen:
        started = time.monotonic()
        left = args.deadline - (started - begun) - GRACE_S
        ended = run(step, out, min(step.limit_s, left)) if left > LEAST_S else "no time left"
        seconds = round(time.monotonic() - started, 1)
        summary.append({"step": step.name, "ended": ended, "seconds": seconds})
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        log = out / f"{step.name}.log"
        tail = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(f"=== {step.name}: {ended}, {seconds:.0f} s", *tail[-25:], sep="\n", flush=True)
    print()
    for entry in summary:
        print(f"{entry['step']:20} {entry['ended']:14} {entry['seconds']:6.0f} s")
    return int(any(entry["ended"] != "ok" for entry in summary))


if __name__ == "__main__":
    sys.exit(main())

"""The first half hour on a GPU: three calls of at most nine minutes each.

    python tools/gpu_run.py 1 --deadline 540    # does it run? the numbers that decide; is it right?
    python tools/gpu_run.py 2 --deadline 540    # time to first token of every policy, and where it goes
    python tools/gpu_run.py 3 --deadline 540    # long prompts, and under load
    python tools/gpu_run.py 1 2 3 --tiny        # the same steps, small, on a CPU
    python tools/gpu_run.py 4                   # later: FlashInfer, which compiles for minutes

Each step is a command of its own with a time limit and a log. It is printed and saved when it ends, and
what fails does not stop the others. A step that starts SGLang's servers and fails without a time-out is
tried once more without prefill graphs and without ours, and the summary says so. The limits of a
call add up to no more than its deadline; what no longer fits is left out and said so. Last comes a
table; the exit status is 1 if a step failed. benchmarks/gpu_todo.md says how a machine without a
network gets SGLang.
"""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
FEW_TESTS = ["--maxfail", "3", "-k", "not torch.float16 and not torch.float32"]
"""A call is short: bfloat16, and float32 in tests of that alone. Three failures are enough."""
KERNEL_TESTS = (
    "tests/test_delta_rope_triton.py",
    "tests/test_kv_deviation_triton.py",
    "tests/test_unquantise_triton.py",
    "tests/test_segmented_topk.py",
    "tests/test_row_compaction.py",
    "tests/test_ragged_attention_triton.py",
    "tests/test_ragged_attention_fixed.py",
    "tests/test_attention_choice.py",
)
DEADLINE_S = 540.0
"""Of a call: what the limits of its steps may add up to, so that its results are there soon."""
RATES = "8,16,24,48,64,80,96"
"""Requests per second: an estimate has stock at 23 and the blending server at 60 to 90."""
PREFILL_SIZES = [512, *range(1024, 4097, 256), *range(4608, 7169, 512), 7424, 7680, 8192]
"""Rows of a captured prefill. Stock rounds a prefill up to the next size. With few sizes it would do up
to twice the work, and our gain would be flattered. So these are its own from 1,024 rows on, and the
rows that the last step of a long prompt has."""
# What the small pack of SGLang for a machine without a network can do: no fa3, no grammar. Stock
# captures 36 more sizes of prefill below 1,024 rows, which nothing here has, and batches up to 256.
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
    "blend_cuda_graph": "off",  # a step of its own captures them
}


NO_PREFILL_GRAPH = "--server-arg=disable-prefill-cuda-graph"
"""Makes the capture of prefills, the likeliest thing to fail in a start, no part of it."""
NO_BLEND_GRAPH = "--blend-arg=blend-cuda-graph=off"
"""Likewise the capture of the layers above the check layer."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command, how long it may take, and what its processes find in their environment.

    Attributes:
        starts_servers: Whether it can be tried again without graphs.
        good: Exit statuses that are no failure.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Sequence[tuple[str, str]] = ()
    starts_servers: bool = False
    good: Sequence[int] = (0,)

    def without_graphs(self) -> "Step":
        """Return the step that is tried when this one failed."""
        more = [NO_PREFILL_GRAPH, NO_BLEND_GRAPH]
        more = [flag for flag in more if flag not in self.command]
        return replace(self, command=[*self.command, *more], starts_servers=False)


class Steps:
    """The steps of all calls.

    Args:
        out: Folder for what they write.
        tiny: Whether everything is small, for a CPU.
    """

    def __init__(self, out: Path, *, tiny: bool) -> None:
        self._out, self._tiny = out, tiny
        server = [] if tiny else [f"--server-arg={name}={value}" for name, value in SERVER.items()]
        self._shape = ["--shape", "tiny" if tiny else "llama-3.1-8b", *server]
        self._small = ["--chunk-tokens", "64"] if tiny else []
        self._repeats = ["--repeats", "2"]
        self._quick = [*self._repeats, "--batches", "1"] if tiny else ["--repeats", "5"]
        # Graphs are of this kernel alone; a CPU has it not.
        self._triton = [] if tiny else ["--blend-arg=blend-attention=triton"]
        self._paper, self._long = ("300", "400") if tiny else ("paper", "16k")
        self._engine = () if tiny else (("BLEND_TEST_ENGINE", json.dumps(CUDA_ENGINE)),)

    def of(self, call: int) -> list[Step]:
        """Return what a call consists of, in order."""
        return {1: self._first, 2: self._ttft, 3: self._load, 4: self._flashinfer}[call]()

    def _bench(self, kind: str, name: str, *flags: str, limit_s: float) -> Step:
        model = [] if kind == "kernels" else self._shape
        command = [*BLEND, "bench", kind, *model, *flags, "--json", str(self._out / f"{name}.json")]
        starts = kind != "kernels" and NO_PREFILL_GRAPH not in flags and not self._tiny
        return Step(name, command, self._limit(limit_s), starts_servers=starts)

    def _limit(self, limit_s: float) -> float:
        """A CPU that does other things needs longer; nobody waits for it."""
        return 900.0 if self._tiny else limit_s

    def _first(self) -> list[Step]:
        """What everything else needs first, then what decides most, tests last."""
        tiny, plain = self._tiny, [] if self._tiny else [NO_PREFILL_GRAPH, NO_BLEND_GRAPH]
        first = [sys.executable, "-m", "tools.gpu_first", "--json", str(self._out / "first.json")]
        tests = KERNEL_TESTS[2:4] if tiny else KERNEL_TESTS
        chosen = [] if tiny else FEW_TESTS
        return [
            self._bench(
                "profile", "smoke", "--length", self._paper, *self._small, *self._repeats, *plain,
                limit_s=120,
            ),
            Step("gpu-first", [*first, *(["--tiny"] if tiny else [])], self._limit(90)),
            self._bench("kernels", "kernels", "--plot", str(self._out / "kernels.png"), limit_s=60),
            Step(
                "verify-bf16", self._verify(), self._limit(70),
                (("OMP_NUM_THREADS", "1"),) if tiny else (),  # slower with more, so small a model is
                # 3: so few prompts judge no policy. What counts here is what is checked before.
                good=(0, 3),
            ),
            self._engine_test("no-sync", "tests/test_no_sync.py", limit_s=60),
            self._engine_test("law-l2", "tests/test_laws.py", "-k", "l2", limit_s=45),
            Step(
                "kernel-tests", [*PYTEST, *PARALLEL, "-m", "not engine", *chosen, *tests],
                self._limit(55),
            ),
        ]  # fmt: skip

    def _engine_test(self, name: str, *arguments: str, limit_s: float) -> Step:
        return Step(name, [*PYTEST, *arguments], self._limit(limit_s), self._engine)

    def _verify(self) -> list[str]:
        """Return the command that compares blended answers with full prefills."""
        engine = (
            []
            if self._tiny
            else [f"--engine-arg={k}={json.dumps(v)}" for k, v in CUDA_ENGINE.items()]
        )
        model, limit = str(ROOT / "examples" / "tinyrag" / "model"), "2" if self._tiny else "16"
        return [
            *(*BLEND, "verify", "--model-path", model, "--limit", limit),
            *("--policies", "hkvd", "--ratios", "0.15", "--check-layers", "2"),
            *("--max-kl", "9", "--json", str(self._out / "verify-bf16.json"), *engine),
        ]

    def _ttft(self) -> list[Step]:
        """Graphs; the paper's setting, every way to leave rows out; then where the time goes."""
        ways = ["--policies", "hkvd,funnel,remembered", "--ratios", "0,0.15"]
        one = ["--length", self._paper, *self._small, *self._repeats]
        paper = ["--lengths", self._paper, *self._small, *ways, *self._triton, *self._quick]
        return [
            self._engine_test(
                "graphs", "tests/test_graphs.py", "-k", "captured_graphs", limit_s=45
            ),
            self._bench("ttft", "ttft-paper", *paper, limit_s=245),
            self._bench("profile", "profile", *one, limit_s=105),
            *self._graphs(),
        ]

    def _graphs(self) -> list[Step]:
        """The paper's setting once more, with the layers above the check layer launched one by one."""
        flags = ["--policies", "funnel", "--ratios", "0.15", NO_BLEND_GRAPH, *self._triton]
        eager = ["--lengths", self._paper, *self._small, *flags, *self._quick]
        return [self._bench("ttft", "ttft-no-graphs", *eager, limit_s=105)]

    def _load(self) -> list[Step]:
        """Long prompts, and requests at random times."""
        ways = ["--policies", "hkvd", "--ratios", "0.15", "--batches", "1"]
        long = ["--lengths", self._long, *self._small, *ways, *self._repeats]
        if self._tiny:
            traffic = [
                *("--seconds", "2", "--rates", "1", "--documents", "6", "--chunks", "4"),
                *("--blocks", "1", *self._small),
            ]
        else:
            traffic = ["--seconds", "6", "--rates", RATES, "--blocks", "1"]
        return [
            self._bench("ttft", "ttft-16k", *long, limit_s=180),
            self._bench("throughput", "throughput", *traffic, limit_s=320),
        ]

    def _flashinfer(self) -> list[Step]:
        """Not in the first half hour: without prebuilt modules this compiles for minutes."""
        chosen = [] if self._tiny else ["--blend-arg=blend-attention=flashinfer"]
        paper = ["--lengths", self._paper, *self._small, "--ratios", "0.15", *self._quick, *chosen]
        tests = [*PYTEST, "tests/test_ragged_attention_flashinfer.py"]
        return [
            Step("flashinfer-tests", tests, self._limit(400)),
            self._bench("kernels", "kernels-flashinfer", "--compile-flashinfer", limit_s=400),
            self._bench("ttft", "ttft-flashinfer", *paper, limit_s=240),
        ]


def run(step: Step, out: Path, limit_s: float) -> str:
    """Run a step; return how it ended."""
    settings = [f"{name}={value}" for name, value in step.environment]
    with (out / f"{step.name}.log").open("a") as log:
        # A shell's background jobs ignore interrupts, and so would their children.
        command = ["env", "--default-signal=INT", *settings, *step.command]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
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
    return "ok" if status in step.good else f"status {status}"


def run_or_retry(step: Step, out: Path, until: float) -> str:
    """Run a step, and once more without graphs if its servers fail; say how it ended.

    Args:
        step: What to run.
        out: Folder for its log, which is begun anew.
        until: When it must have ended, on the clock of time.monotonic, grace included.
    """
    (out / f"{step.name}.log").unlink(missing_ok=True)
    end = min(time.monotonic() + step.limit_s, until - GRACE_S)
    if end - time.monotonic() < LEAST_S:
        return "no time left"
    ended = run(step, out, end - time.monotonic())
    left = end - time.monotonic()
    if not step.starts_servers or not ended.startswith("status") or left < LEAST_S:
        return ended
    again = run(step.without_graphs(), out, left)
    return f"{again} without graphs, {ended} with"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time everything on a GPU.")
    parser.add_argument("calls", nargs="+", type=int, choices=(1, 2, 3, 4))
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
    steps = Steps(out, tiny=args.tiny)
    chosen = [step for call in args.calls for step in steps.of(call)]
    begun = time.monotonic()
    summary: list[dict[str, str | float]] = []
    for step in chosen:
        if wanted is not None and step.name not in wanted:
            continue
        started = time.monotonic()
        ended = run_or_retry(step, out, begun + args.deadline)
        seconds = round(time.monotonic() - started, 1)
        summary.append({"step": step.name, "ended": ended, "seconds": seconds})
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        log = out / f"{step.name}.log"
        tail = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(f"=== {step.name}: {ended}, {seconds:.0f} s", *tail[-25:], sep="\n", flush=True)
    print()
    for entry in summary:
        print(f"{entry['step']:20} {entry['seconds']:6.0f} s  {entry['ended']}")
    return int(any(not str(entry["ended"]).startswith("ok") for entry in summary))


if __name__ == "__main__":
    sys.exit(main())

"""Compile every Triton kernel ahead of time for an H100/H200 (sm_90), without a GPU.

    python -m tools.compile_kernels [--quick] [--only TEXT] [--arch 90]

Prints what ptxas made of each: registers per thread, spilled bytes, shared memory, tensor-core and
asynchronous-copy instructions, mean bytes of a global access. Exits with 1 if one does not compile, one
spills that kernel_builds.py does not let spill, a memory-bound kernel has narrow accesses, or products
and sums are fused where each must be rounded. The interpreter that runs kernels in tests can see none
of that. The Triton that compiles is the one that is imported: PYTHONPATH may name another
(tests/test_compile_kernels.py).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from tools.kernel_builds import LISTS, Build


@dataclass(frozen=True)
class Report:
    """What a build costs on the device; bytes and counts."""

    registers: int
    spilled: int
    shared: int
    wgmma: int
    mma: int
    cp_async: int
    fused: int
    mean_access: float
    seconds: float


def compile_build(build: Build, arch: int, max_registers: int | None = None) -> Report:
    """Compile one kernel and read what became of it.

    Raises:
        Exception: Whatever the compiler raises.
    """
    started = time.perf_counter()
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(build.kernel.params):
        name = parameter.name
        if name in build.constants:
            signature[name] = "constexpr"
            constants[(index,)] = build.constants[name]
            continue
        signature[name] = build.arguments.get(name, "i32")
        if signature[name].startswith("*") or name in build.aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(build.kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    options["enable_fp_fusion"] = build.fuses
    if max_registers is not None:
        options["maxnreg"] = max_registers
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    cubin = compiled.asm["cubin"]
    registers, spilled = read_registers(cubin)
    accesses = re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bu](\d+)", ptx)
    widths = [int(bits) // 8 * int(vector or 1) for vector, bits in accesses]
    return Report(
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"mma\.sync", ptx)),
        cp_async=len(re.findall(r"cp\.async\.c[ga]", ptx)),
        fused=len(re.findall(r"\bFFMA\b", _dump(cubin, "-sass"))),
        mean_access=sum(widths) / max(1, len(widths)),
        seconds=time.perf_counter() - started,
    )


def read_registers(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of stack."""
    usage = _dump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def _dump(cubin: bytes, what: str) -> str:
    """Ask cuobjdump, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True)
        return done.stdout


def as_row(label: str, report: Report) -> list[str]:
    """Write a report as a row of the table."""
    numbers = [report.registers, report.spilled, report.shared, report.wgmma, report.mma]
    numbers += [report.cp_async]
    decimals = [f"{report.mean_access:.1f}", f"{report.seconds:.1f}"]
    return [label, *(str(number) for number in numbers), *decimals]


def main() -> int:
    """Compile, print, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only Llama-like models")
    parser.add_argument("--only", default="", help="only labels that contain this")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times 10")
    parser.add_argument("--max-registers", type=int, help="per thread; fewer than needed spill")
    arguments = parser.parse_args()
    table = Table(
        "kernel", "regs", "spill B", "smem B", "wgmma", "mma", "cp.async", "access B", "s"
    )
    failures = []
    for build in (build for builds in LISTS for build in builds()):
        if arguments.only not in build.label or (arguments.quick and not build.quick):
            continue
        try:
            report = compile_build(build, arguments.arch, arguments.max_registers)
        except (TritonError, RuntimeError) as fault:  # of the front end and ptxas, and of a pass
            failures.append(f"{build.label}: {type(fault).__name__}: {fault}")
            continue
        table.add_row(*as_row(build.label, report))
        if report.spilled and not build.may_spill:
            failures.append(f"{build.label}: spills {report.spilled} bytes")
        if report.fused and not build.fuses:
            failures.append(f"{build.label}: fuses {report.fused} products with sums")
        if report.mean_access < build.least_mean_access:
            failures.append(
                f"{build.label}: accesses of {report.mean_access:.1f} bytes in the mean"
            )
    Console(width=120).print(table)
    print(f"Triton {triton.__version__}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

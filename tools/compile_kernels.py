"""Compile every Triton kernel ahead of time for an H100/H200 (sm_90), without a GPU.

    python tools/compile_kernels.py [--quick] [--only TEXT] [--arch 90]

Prints what ptxas made of each: registers per thread, spilled bytes, shared memory, tensor-core and
asynchronous-copy instructions, mean bytes of a global access. Exits with 1 if one does not compile, a
default configuration spills, or a memory-bound kernel has narrow accesses. The interpreter that runs
kernels in tests can see none of that.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from sgl_blend.kernels import (
    delta_rope_tables_triton,
    delta_rope_triton,
    kv_deviation_triton,
    ragged_attention_triton,
    row_compaction_triton,
    segmented_topk_triton,
)
from sgl_blend.kernels.ragged_attention_tiles import TileShape, choose_tile

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


@dataclass(frozen=True)
class Build:
    """One kernel with everything that decides its machine code.

    Attributes:
        label: Kernel and configuration.
        kernel: The jitted function.
        arguments: Type of each argument that is not a constant; a missing one is i32.
        constants: Values of the constants.
        aligned: Integer arguments that are multiples of 16, as strides are.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline.
        least_mean_access: Bytes that a thread must read or write at once in the mean; less means
            that the compiler has lost sight of an alignment.
        quick: Whether it is in the short list.
    """

    label: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    least_mean_access: float = 0.0
    quick: bool = False


@dataclass(frozen=True)
class Report:
    """What a build costs on the device; bytes and counts."""

    registers: int
    spilled: int
    shared: int
    wgmma: int
    mma: int
    cp_async: int
    mean_access: float
    seconds: float


def copies() -> Iterator[Build]:
    """All layers' KV moved at once: Llama-like rows."""
    cases: list[tuple[torch.dtype, bool, int, int, int]] = [
        (torch.bfloat16, True, 8, 128, 128),
        (torch.bfloat16, False, 8, 128, 128),
        (torch.bfloat16, True, 32, 128, 128),
        (torch.bfloat16, True, 8, 80, 32),
        (torch.bfloat16, True, 1, 256, 64),
        (torch.float16, True, 8, 128, 128),
        (torch.float32, True, 8, 128, 128),
        (torch.float8_e4m3fn, True, 8, 128, 128),
        (torch.float8_e4m3fn, False, 8, 128, 128),
        (torch.float8_e5m2, True, 8, 128, 128),
    ]
    for dtype, neox, heads, dim, rotary in cases:
        style = "neox" if neox else "gptj"
        yield Build(
            f"copy_rotated_layers {_short(dtype)} {style} {heads}x{dim} rotary {rotary}",
            delta_rope_triton._copy_rotated_layers,
            {
                "address_ptr": "*i64", "source_ptr": "*i64", "dest_ptr": "*i64",
                "cos_ptr": "*fp32", "sin_ptr": "*fp32",
            },
            {
                "DTYPE": delta_rope_triton.TRITON_DTYPES[dtype],
                "LIMIT": delta_rope_triton.FP8_LIMITS.get(dtype, 0.0), "NEOX": neox,
                "NUM_HEADS": heads, "HEAD_DIM": dim, "HALF": rotary // 2, "V_WIDTH": heads * dim,
                **delta_rope_triton.copy_blocks(heads, dim, rotary // 2, dim),
            },
            aligned=("k_stride", "v_stride"),
            least_mean_access=8,
            quick=heads == 8 and dim == 128 and dtype in (torch.bfloat16, torch.float8_e4m3fn),
        )  # fmt: skip


def tables() -> Iterator[Build]:
    """The rotations of a step, from tables in float32 and in the model's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for half in (24, 64):
            yield Build(
                f"delta_rope_tables {_short(dtype)} rotary {2 * half}",
                delta_rope_tables_triton._tables,
                {
                    "table_ptr": POINTERS[dtype], "old_ptr": "*i64", "new_ptr": "*i64",
                    "cos_ptr": "*fp32", "sin_ptr": "*fp32",
                },
                {
                    "HALF": half, "BLOCK_R": triton.next_power_of_2(half),
                    "BLOCK_T": delta_rope_tables_triton.BLOCK_TOKENS,
                },
                aligned=("table_stride",),
                quick=half == 64,
            )  # fmt: skip


def deviations() -> Iterator[Build]:
    """V as it is, K moved first."""
    for dtype, pool_dtype, half, neox in (
        (torch.bfloat16, torch.bfloat16, 0, True),
        (torch.bfloat16, torch.bfloat16, 64, True),
        (torch.bfloat16, torch.bfloat16, 64, False),
        (torch.bfloat16, torch.bfloat16, 32, True),
        (torch.bfloat16, torch.float8_e4m3fn, 0, True),
        (torch.bfloat16, torch.float8_e4m3fn, 64, True),
    ):
        moved = f"moved {'neox' if neox else 'gptj'} {2 * half}" if half else "as it is"
        yield Build(
            f"kv_deviation_at {_short(dtype)}/{_short(pool_dtype)} {moved}",
            kv_deviation_triton._deviation,
            {
                "fresh_ptr": POINTERS[dtype], "pool_ptr": POINTERS[pool_dtype],
                "row_ptr": "*i64", "slot_ptr": "*i64",
                "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*fp32",
            },
            {
                "NEOX": neox, "NUM_HEADS": 8, "HEAD_DIM": 128, "HALF": half,
                **delta_rope_triton.pair_blocks(8, 128, half),
            },
            aligned=("fresh_stride", "pool_stride"),
            least_mean_access=8,
            quick=half in (0, 64) and neox,
        )  # fmt: skip


def selections() -> Iterator[Build]:
    """Both block sizes."""
    for block in (segmented_topk_triton._SHORT_BLOCK, segmented_topk_triton._LONG_BLOCK):
        yield Build(
            f"segmented_topk block {block}",
            segmented_topk_triton._segmented_topk,
            {
                "score_ptr": "*fp32", "first_ptr": "*i32", "first_taken_ptr": "*i32",
                "taken_ptr": "*i64", "left_ptr": "*i64",
            },
            {"BLOCK": block},
            num_warps=block // segmented_topk_triton._ROWS_PER_WARP,
            quick=True,
        )  # fmt: skip


def compactions() -> Iterator[Build]:
    """Hidden state, residual, positions and slots of a model of 4096."""
    for dtype in (torch.bfloat16, torch.float32):
        wide = POINTERS[dtype]
        kinds = [wide, wide, "*i64", "*i32"]
        types = {f"source{n}": kind for n, kind in enumerate(kinds)}
        types |= {f"target{n}": kind for n, kind in enumerate(kinds)}
        yield Build(
            f"compact_rows {_short(dtype)} 2 x 4096",
            row_compaction_triton._compact_rows,
            {"row_ptr": "*i64", **types},
            {"WIDTH0": 4096, "WIDTH1": 4096, "WIDTH2": 1, "WIDTH3": 1, "BLOCK": 2048,
             "stride2": 1, "stride3": 1},
            aligned=("stride0", "stride1"),
            least_mean_access=8,
            quick=dtype == torch.bfloat16,
        )  # fmt: skip


def attentions() -> Iterator[Build]:
    """Every tile of the table, split and whole, and narrow KV."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for dtype, kv_dtype, dim, v_dim, split, paged in (
        (bf16, bf16, 128, 128, False, True),
        (bf16, bf16, 128, 128, True, True),
        (bf16, bf16, 128, 128, False, False),
        (bf16, bf16, 32, 32, False, True),
        (bf16, bf16, 64, 64, False, True),
        (bf16, bf16, 80, 80, False, True),
        (bf16, bf16, 96, 96, False, True),
        (bf16, bf16, 192, 128, False, True),
        (bf16, bf16, 256, 256, False, True),
        (bf16, fp8, 128, 128, False, True),
        (bf16, fp8, 64, 64, False, True),
        (bf16, fp8, 256, 256, False, True),
        (bf16, torch.float8_e5m2, 128, 128, False, True),
        (torch.float16, torch.float16, 128, 128, False, True),
        (torch.float32, torch.float32, 64, 64, False, True),
        (torch.float32, torch.float32, 128, 128, False, True),
        (torch.float32, torch.float32, 256, 256, False, True),
    ):
        yield attention(dtype, kv_dtype, dim, v_dim, split=split, paged=paged)
    for group in (1, 7, 8):
        yield attention(bf16, bf16, 128, 128, group=group)
    yield attention(bf16, bf16, 128, 128, fixed=True)
    yield attention(bf16, bf16, 128, 128, split=True, fixed=True)
    for dim in (64, 128):
        yield Build(
            f"merge_splits {dim}",
            ragged_attention_triton._merge_splits,
            {"partial_ptr": "*fp32", "log_sum_ptr": "*fp32", "out_ptr": "*bf16",
             "bounds_ptr": "*i64", "v_scale": "fp32"},
            {"V_HEAD_DIM": dim, "BLOCK_DV": dim},
            num_warps=1,
            quick=dim == 128,
        )  # fmt: skip


def attention(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    v_dim: int,
    *,
    split: bool = False,
    paged: bool = True,
    group: int = 4,
    fixed: bool = False,
    tile: TileShape | None = None,
) -> Build:
    """One build of the attention kernel; fixed is the one that graphs capture."""
    padded, v_padded = (int(triton.next_power_of_2(d)) for d in (dim, v_dim))
    tile = tile or choose_tile(max(dim, v_dim), dtype)
    kv_pointer = POINTERS[kv_dtype]
    width = f"{dim}/{v_dim}" if dim != v_dim else str(dim)
    shape = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
    where = (" fixed" if fixed else "") if paged else " rows"
    return Build(
        f"ragged_attention {_short(dtype)}/{_short(kv_dtype)} d{width} group {group} {shape}"
        f"{' split' if split else ''}{where}",
        ragged_attention_triton._ragged_attention,
        {
            "q_ptr": POINTERS[dtype], "k_ptr": kv_pointer, "v_ptr": kv_pointer,
            "out_ptr": "*fp32" if split else POINTERS[dtype], "log_sum_ptr": "*fp32",
            "position_ptr": "*i32", "bounds_ptr": "*i64" if fixed else "*i32",
            "slot_ptr": "*i32" if fixed else "*i64",
            "log2_scale": "fp32", "v_scale": "fp32",
        },
        {
            "PAGED": paged, "SPLIT": split, "GROUP": group,
            "HEAD_DIM": dim, "V_HEAD_DIM": v_dim, "BLOCK_D": padded, "BLOCK_DV": v_padded,
            "BLOCK_B": 16, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        },
        aligned=("q_stride", "k_stride", "v_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        quick=dim == v_dim == 128 and dtype == torch.bfloat16 and paged and group == 4,
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return POINTERS[dtype].removeprefix("*")


LISTS: tuple[Callable[[], Iterator[Build]], ...] = (
    copies,
    tables,
    deviations,
    selections,
    compactions,
    attentions,
)


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
    if max_registers is not None:
        options["maxnreg"] = max_registers
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = read_registers(compiled.asm["cubin"])
    accesses = re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bu](\d+)", ptx)
    widths = [int(bits) // 8 * int(vector or 1) for vector, bits in accesses]
    return Report(
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"mma\.sync", ptx)),
        cp_async=len(re.findall(r"cp\.async\.c[ga]", ptx)),
        mean_access=sum(widths) / max(1, len(widths)),
        seconds=time.perf_counter() - started,
    )


def read_registers(cubin: bytes) -> tuple[int, int]:
    """Ask cuobjdump, which comes with Triton, for registers per thread and bytes of stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


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
        if report.spilled:
            failures.append(f"{build.label}: spills {report.spilled} bytes")
        if report.mean_access < build.least_mean_access:
            failures.append(
                f"{build.label}: accesses of {report.mean_access:.1f} bytes in the mean"
            )
    Console(width=120).print(table)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

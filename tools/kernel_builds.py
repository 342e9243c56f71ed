"""What of our kernels is compiled ahead of time: every kernel, for the models that are served.

Triton compiles a kernel anew for each type and constant. compile_kernels.py compiles this list.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sgl_blend.kernels import (
    delta_rope_tables_triton,
    delta_rope_triton,
    kv_deviation_triton,
    ragged_attention_triton,
    row_compaction_triton,
    segmented_topk_triton,
    unquantise_triton,
)
from sgl_blend.kernels.ragged_attention_tiles import TileShape, choose_tile, padded_dim

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
"""Of the models that are served, and of the smallest test models."""

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
        fuses: Whether a product and a sum may be rounded once.
        may_spill: Whether it may: slow, right, and run by no server that is fast in anything.
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
    fuses: bool = True
    may_spill: bool = False
    quick: bool = False


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
        *((torch.bfloat16, True, 2, dim, dim) for dim in HEAD_DIMS),
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
            least_mean_access=8 if heads * dim > 32 else 4,
            quick=heads == 8 and dim == 128 and dtype in (torch.bfloat16, torch.float8_e4m3fn),
        )  # fmt: skip


def tables() -> Iterator[Build]:
    """The rotations of a step, from tables in float32 and in the model's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for half in (8, 24, 64, 128):
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
    half_precision, fp8 = torch.bfloat16, torch.float8_e4m3fn
    whole = [(dim, half) for dim in HEAD_DIMS for half in (0, dim // 2)]
    plain = [
        (half_precision, half_precision, 128, 0, True),
        (half_precision, half_precision, 128, 64, True),
        (half_precision, half_precision, 128, 64, False),
        (half_precision, half_precision, 128, 32, True),
        (half_precision, fp8, 128, 0, True),
        (half_precision, fp8, 128, 64, True),
        (fp8, fp8, 128, 0, True),  # a probe compares two parts of the pool
        *((half_precision, half_precision, *dims, True) for dims in whole),
    ]
    rounded = [(half_precision, half_precision, 128, 0, True)]  # V that came in few bits
    for number, (dtype, pool_dtype, dim, half, neox) in enumerate([*plain, *rounded]):
        is_rounded = number >= len(plain)
        moved = f"moved {'neox' if neox else 'gptj'} {2 * half}" if half else "as it is"
        if is_rounded:
            moved = "from few bits"
        yield Build(
            f"kv_deviation_at {_short(dtype)}/{_short(pool_dtype)} d{dim} {moved}",
            kv_deviation_triton._deviation,
            {
                "fresh_ptr": POINTERS[dtype], "pool_ptr": POINTERS[pool_dtype],
                "row_ptr": "*i64", "slot_ptr": "*i64",
                "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*fp32",
                "share_ptr": "*fp32", "half_bin_ptr": "*fp32",
            },
            {
                "ROUNDED": is_rounded,
                "NEOX": neox, "NUM_HEADS": 8, "HEAD_DIM": dim, "HALF": half,
                **delta_rope_triton.pair_blocks(8, dim, half),
            },
            aligned=("fresh_stride", "pool_stride"),
            least_mean_access=8,
            quick=dim == 128 and half in (0, 64) and neox,
        )  # fmt: skip


def decodings() -> Iterator[Build]:
    """Coded keys and values of every kind and head dimension."""
    half_precision = torch.bfloat16
    styles = [(128, True), (128, False), (64, True), (32, True), (32, False), (None, True)]
    shapes = [
        *((dtype, 8, 128, *style) for dtype in (half_precision, torch.float16, torch.float32)
          for style in styles),
        *((half_precision, 8, dim, dim, True) for dim in HEAD_DIMS if dim != 128),
        *((half_precision, 8, dim, None, True) for dim in HEAD_DIMS if dim != 128),
        *((half_precision, 1, 128, rotary, True) for rotary in (128, None)),
    ]  # fmt: skip
    kinds = itertools.product((4, 8), (False, True), shapes)
    for bits, anchors, (dtype, heads, dim, rotary, neox) in kinds:
        half = dim // 2 if rotary is None else rotary // 2
        turned = "v" if rotary is None else f"{'neox' if neox else 'gptj'} {rotary}"
        coded = f"{bits} bits{' anchors' if anchors else ''}"
        yield Build(
            f"unquantise {coded} {_short(dtype)} {heads}x{dim} {turned}",
            unquantise_triton._unquantise,
            {
                "packed_ptr": "*u8", "step_ptr": "*fp32", "base_ptr": "*fp32", "low_ptr": "*fp32",
                "anchor_step_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
                "slot_ptr": "*i64", "pool_ptr": POINTERS[dtype],
            },
            {
                **unquantise_triton.constants(bits, anchors, rotary is not None, neox),
                "NUM_HEADS": heads, "HEAD_DIM": dim, "HALF": half,
                **delta_rope_triton.pair_blocks(heads, dim, half),
            },
            aligned=("page_stride", "pool_stride"),
            least_mean_access=8,
            fuses=False,
            quick=bits == 4 and anchors and heads == 8 and dim == 128 and half == 64
            and neox and dtype == torch.bfloat16,
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
    for block in (segmented_topk_triton._SHORT_BLOCK, segmented_topk_triton._LONG_ROW_BLOCK):
        yield Build(
            f"select_rows block {block}",
            segmented_topk_triton._select_rows,
            {
                "score_ptr": "*fp32", "row_ptr": "*i64", "bounds_ptr": "*i32", "stays_ptr": "*i8",
                "kept_ptr": "*i64", "taken_ptr": "*i64", "place_ptr": "*i64",
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
    yield from _number_compactions()


def _number_compactions() -> Iterator[Build]:
    """Numbers by row, and those that candidates carry: positions, slots, cos and sin."""
    i64, fp32 = "*i64", "*fp32"
    for kernel, label, kinds, half in (
        (row_compaction_triton._compact_numbers, "3 x 1", [i64, i64, i64], 1),
        (row_compaction_triton._compact_numbers, "2 priorities", [fp32, fp32], 1),
        (row_compaction_triton._compact_rows, "candidates", [i64, i64, fp32, fp32], 64),
    ):
        unused = 4 - len(kinds)
        widths = [1, 1, half, half][: len(kinds)] + [0] * unused
        pointers = kinds + [i64] * unused
        types = {
            f"{end}{n}": kind for end in ("source", "target") for n, kind in enumerate(pointers)
        }
        strides = {f"stride{n}": 1 for n, width in enumerate(widths) if width <= 1}
        yield Build(
            f"compact_rows {label}",
            kernel,
            {"row_ptr": i64, **types},
            {**{f"WIDTH{n}": width for n, width in enumerate(widths)}, "BLOCK": 2048, **strides},
            aligned=tuple(f"stride{n}" for n, width in enumerate(widths) if width > 1),
            quick=True,
        )  # fmt: skip


def attentions() -> Iterator[Build]:
    """Every tile of the table, split and whole, and narrow KV."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for dtype, kv_dtype, dim, v_dim, split, paged in (
        *((bf16, bf16, dim, dim, split, True) for dim in HEAD_DIMS for split in (False, True)),
        (bf16, bf16, 128, 128, False, False),
        (bf16, bf16, 192, 128, False, True),
        (bf16, fp8, 128, 128, False, True),
        (bf16, fp8, 64, 64, False, True),
        (bf16, fp8, 256, 256, False, True),
        (bf16, torch.float8_e5m2, 128, 128, False, True),
        (torch.float16, torch.float16, 128, 128, False, True),
        *((torch.float32, torch.float32, dim, dim, False, True) for dim in HEAD_DIMS),
        (torch.float32, fp8, 64, 64, False, True),
    ):
        yield attention(dtype, kv_dtype, dim, v_dim, split=split, paged=paged)
    for group in (1, 7, 8):
        yield attention(bf16, bf16, 128, 128, group=group)
    for most_requests in (64, 256, 1024, 4096):
        yield attention(bf16, bf16, 128, 128, most_requests=most_requests)
    for split in (False, True):
        yield attention(bf16, bf16, 128, 128, split=split, fixed=True)
    for dim, bounds in ((dim, bounds) for dim in HEAD_DIMS for bounds in ("*i32", "*i64")):
        yield Build(
            f"merge_splits {dim}{' fixed' if bounds == '*i64' else ''}",
            ragged_attention_triton._merge_splits,
            {
                "partial_ptr": "*fp32", "log_sum_ptr": "*fp32", "out_ptr": "*bf16",
                "bounds_ptr": bounds, "v_scale": "fp32",
            },
            {"V_HEAD_DIM": dim, "BLOCK_DV": padded_dim(dim)},
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
    most_requests: int = 16,
    fixed: bool = False,
    tile: TileShape | None = None,
) -> Build:
    """One build of the attention kernel; fixed is the one that graphs capture."""
    padded, v_padded = padded_dim(dim), padded_dim(v_dim)
    tile = tile or choose_tile(max(dim, v_dim), dtype)
    kv_pointer = POINTERS[kv_dtype]
    width = f"{dim}/{v_dim}" if dim != v_dim else str(dim)
    shape = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
    where = (" fixed" if fixed else "") if paged else " rows"
    many = f" {most_requests} requests" if most_requests > 16 else ""
    return Build(
        f"ragged_attention {_short(dtype)}/{_short(kv_dtype)} d{width} group {group} {shape}"
        f"{' split' if split else ''}{where}{many}",
        ragged_attention_triton._ragged_attention,
        {
            "q_ptr": POINTERS[dtype], "k_ptr": kv_pointer, "v_ptr": kv_pointer,
            "out_ptr": "*fp32" if split else POINTERS[dtype], "log_sum_ptr": "*fp32",
            "position_ptr": "*i32" if fixed else "*i64",
            "bounds_ptr": "*i64" if fixed else "*i32", "slot_ptr": "*i32" if fixed else "*i64",
            "log2_scale": "fp32", "v_scale": "fp32",
        },
        {
            "PAGED": paged, "SPLIT": split, "GROUP": group,
            "HEAD_DIM": dim, "V_HEAD_DIM": v_dim, "BLOCK_D": padded, "BLOCK_DV": v_padded,
            "BLOCK_B": most_requests, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        },
        aligned=("q_stride", "k_stride", "v_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # float32 runs in tests alone: its products use the scalar units.
        may_spill=dtype == torch.float32 and (dim in (80, 96) or kv_dtype != dtype),
        quick=dim == v_dim == 128 and dtype == torch.bfloat16 and paged and group == 4 and not many,
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return POINTERS[dtype].removeprefix("*")


LISTS: tuple[Callable[[], Iterator[Build]], ...] = (
    copies,
    tables,
    deviations,
    decodings,
    selections,
    compactions,
    attentions,
)

"""How the work of scattered attention is cut on a GPU: tiles, and shares of the KV."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.kernels.checks import check_rows, check_tensor

_MAX_SPLITS = 32
_MIN_SPLIT_POSITIONS = 512
"""A share of the KV below this costs more in merging than it gains."""
_PROGRAMS_PER_MULTIPROCESSOR = 2
_REQUEST_BLOCKS = (16, 64, 256, 1024)
"""Sizes that the number of requests is rounded up to: each one is compiled anew."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How the work is cut: rows times heads and KV positions per step, and how a step is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launches of all layers have in common: grid, constants, and room for shares.

    A layer reads what the one before has left in the buffers of the shares only after it wrote it anew.
    """

    grid: tuple[int, int, int]
    constants: dict[str, Any]
    partial: torch.Tensor | None
    log_sum: torch.Tensor | None


# By head_dim, rounded up to a power of 2, for 16-bit queries: the largest tiles of which ptxas spills
# nothing for sm_90 (tools/compile_kernels.py); none has been timed yet. 128 rows reuse a KV block
# twice as often as 64, and that counts because KV comes through L2 once per tile. Two warpgroups hold
# 64 of the rows each. 64 positions a step keep two programs on a multiprocessor up to head_dim 64
# (126 registers); at 128 one program fills it (201); at 256 the accumulator leaves room for 32 (242).
_HALF_PRECISION_TILES = {
    16: TileShape(128, 64, 4, 3),
    32: TileShape(128, 64, 4, 3),
    64: TileShape(128, 64, 8, 3),
    128: TileShape(128, 64, 8, 3),
    256: TileShape(128, 32, 8, 2),
}
# float32 products are exact and so run on the scalar units, with operands twice as wide: small tiles,
# and at 128 no second stage, which would spill.
_SINGLE_PRECISION_TILES = {
    16: TileShape(32, 32, 4, 2),
    32: TileShape(32, 32, 4, 2),
    64: TileShape(32, 32, 4, 2),
    128: TileShape(32, 32, 8, 1),
    256: TileShape(32, 16, 8, 2),
}


def choose_tile(head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tile for queries of this shape.

    Raises:
        ValueError: The head dimension is beyond 256.
    """
    tiles = _SINGLE_PRECISION_TILES if dtype == torch.float32 else _HALF_PRECISION_TILES
    padded = padded_dim(head_dim)
    if padded not in tiles:
        raise ValueError(f"q: expected head_dim of at most {max(tiles)}, got {head_dim}")
    return tiles[padded]


def padded_dim(head_dim: int) -> int:
    """Return the power of 2 that a head is padded to; tl.dot takes no less than 16."""
    return max(16, _next_power_of_2(head_dim))


def request_block(num_requests: int) -> int:
    """Return the size that a number of requests is rounded up to."""
    fitting = (block for block in _REQUEST_BLOCKS if block >= num_requests)
    return next(fitting, _next_power_of_2(num_requests))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def choose_splits(device: torch.device, num_programs: int, max_length: int) -> int:
    """Return into how many shares the KV is cut, so that the programs fill the device.

    Args:
        device: Anything but CUDA has nothing to fill.
        num_programs: Programs of one share, at least 1.
        max_length: Positions of the longest request.
    """
    if device.type != "cuda":
        return 1
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device) // num_programs
    return max(1, min(wanted, _MAX_SPLITS, max_length // _MIN_SPLIT_POSITIONS))


def host_bounds(num_rows: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return the bounds of a TritonPlan, int32 [3, B + 1]; arguments as RaggedKernel.host_counts."""
    bounds = np.zeros((3, len(num_rows) + 1), dtype=np.int32)
    np.cumsum(num_rows, out=bounds[0, 1:])
    np.cumsum(lengths, out=bounds[1, 1:])
    bounds[2, :-1] = lengths
    return bounds


def prepare_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_rows: tuple[int, ...],
    max_length: int,
    is_paged: bool,
    tile: TileShape | None,
    num_splits: int | None,
) -> Launch:
    """Check what a layer brings, and decide how it is cut.

    Args:
        q: As in ragged_attention_triton, like k, v, tile and num_splits.
        k: See q.
        v: See q.
        num_rows: Rows of each request.
        max_length: Positions of the longest request.
        is_paged: Whether K and V are pools.
        tile: See q.
        num_splits: See q.

    Raises:
        ValueError: Shapes do not fit.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, v_head_dim = v.shape
    check_tensor("q", q, shape=(sum(num_rows), None, None))
    check_tensor("k", k, shape=(None, num_kv_heads, head_dim))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(name, tensor)
    tile = tile or choose_tile(max(head_dim, v_head_dim), q.dtype)
    group = num_heads // num_kv_heads
    if group * num_kv_heads != num_heads or group > tile.block_m:
        raise ValueError(f"q: {num_heads} heads do not pack over {num_kv_heads} KV heads")
    tile_rows = tile.block_m // group
    num_tiles = sum(-(-rows // tile_rows) for rows in num_rows)
    programs = max(1, num_tiles * num_kv_heads)
    splits = num_splits or choose_splits(q.device, programs, max_length)
    partial, log_sum = None, None
    if splits > 1:
        shape = splits, q.shape[0], num_heads
        partial = q.new_empty(*shape, v_head_dim, dtype=torch.float32)
        log_sum = q.new_empty(shape, dtype=torch.float32)
    constants = {
        "PAGED": is_paged, "SPLIT": splits > 1, "GROUP": group,
        "HEAD_DIM": head_dim, "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": padded_dim(head_dim), "BLOCK_DV": padded_dim(v_head_dim),
        "BLOCK_B": request_block(len(num_rows)),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    return Launch((num_tiles, num_kv_heads, splits), constants, partial, log_sum)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

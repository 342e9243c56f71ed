"""How the work of scattered attention is cut on a GPU: tiles, and shares of the KV."""

from dataclasses import dataclass

import torch

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
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // num_programs
    return max(1, min(wanted, _MAX_SPLITS, max_length // _MIN_SPLIT_POSITIONS))

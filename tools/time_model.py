"""An estimate of how long a prefill takes on a GPU, stock and blended. Nothing here was measured by us.

docs/speed.md has the formulas and the table that this writes (python -m tools.docs_pages). Two numbers
are measured: a large matrix product and a large copy on one NVIDIA H200. Everything else is counted
(operations, bytes, tiles, waves) or assumed, and the assumptions stand in the classes below.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sgl_blend.policies import POLICIES
from tools.results_tables import table


@dataclass(frozen=True)
class Device:
    """A GPU and the host beside it; seconds, bytes and FLOP per second.

    Attributes:
        flop_per_s: Of a large product of bfloat16 matrices; measured.
        bytes_per_s: Of a large copy, read and written; measured.
        sustained: Share of flop_per_s that is left when a prefill draws full power; assumed.
        stock_flop_per_s: Of the server's own attention; assumed.
        scattered_flop_per_s: Of attention of scattered rows; assumed.
        gap_s: Between two kernels; assumed.
        host_layer_s: To launch one layer kernel by kernel; assumed.
        host_step_s: To prepare a blended step; assumed.
        fixed_s: HTTP, scheduler and sampling; assumed.
    """

    name: str
    multiprocessors: int
    flop_per_s: float
    bytes_per_s: float
    sustained: float = 0.93
    stock_flop_per_s: float = 400e12
    scattered_flop_per_s: float = 350e12
    gap_s: float = 1.8e-6
    host_layer_s: float = 0.36e-3
    host_step_s: float = 1.3e-3
    fixed_s: float = 4e-3


H200 = Device("NVIDIA H200", 132, 788e12, 4.3e12)
FA3_FLOP_PER_S = 620e12
"""Of stock's attention where SGLang's fa3 is installed; assumed."""
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 32, 4096, 14336, 32, 8, 128
"""Llama-3.1-8B, whose values have two bytes."""
KV_ROW_BYTES = KV_HEADS * HEAD_DIM * 2
PRODUCTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.87), (64, 256, 0.84), (64, 128, 0.72))
"""Rows and columns of a product's tile, and its share of the full speed; assumed."""
STEP_TOKENS = 8192
"""Of one prefill step: SGLang's --chunked-prefill-size on such a GPU."""
LOGITS_S = 0.28e-3
ROUND_S = 0.8e-3
"""A round of the scheduler."""


@dataclass(frozen=True)
class Prompt:
    """System prompt, chunks of equal length and a question, in tokens."""

    name: str
    system: int
    chunks: int
    chunk: int
    question: int

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.system + self.chunks * self.chunk + self.question


PROMPTS = (
    Prompt("3.2k: 6 x 512 + 64", 128, 6, 512, 64),
    Prompt("16k: 31 x 509 + 93", 128, 31, 509, 93),
    Prompt("32k: 62 x 513 + 66", 128, 62, 513, 66),
)


@dataclass(frozen=True)
class Estimate:
    """Seconds of one prefill; the parts are those of the blended one.

    Attributes:
        full: Layers below the check layer.
        check: The check layer.
        shrunk: Linear work, attention and small kernels of the layers above.
        copy: Of stored KV, hidden or not.
        ceiling: Speed-up if only linear work took time and took it in proportion to rows.
    """

    stock: float
    blended: float
    full: float
    check: float
    shrunk: tuple[float, float, float]
    copy: float
    ceiling: float

    @property
    def speedup(self) -> float:
        """Stock's time over the blended one."""
        return self.stock / self.blended


def product_s(device: Device, rows: int, columns: int, depth: int) -> float:
    """Estimate one product: whole waves of tiles, split along the depth if that is faster."""
    speed = device.flop_per_s * device.sustained / device.multiprocessors
    times = []
    for tile_rows, tile_columns, share in TILES:
        for parts in (1, 2, 3, 4):
            tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) * parts
            full = tiles / device.multiprocessors
            waves = math.ceil(full) if full < 6 else full + 0.3
            merging = 0 if parts == 1 else 8 * parts * rows * columns / device.bytes_per_s + 2e-6
            work = 2 * tile_rows * tile_columns * depth / parts
            times.append(waves * work / (speed * share) + merging)
    num_bytes = 2 * (columns * depth + rows * (columns + depth))
    return max(min(times), num_bytes / (0.9 * device.bytes_per_s)) + 1.5e-6


def linear_s(device: Device, rows: int, names: Sequence[str] = tuple(PRODUCTS)) -> float:
    """Estimate the linear work of a layer."""
    return sum(product_s(device, rows, *PRODUCTS[name]) for name in names)


def small_s(device: Device, rows: int) -> float:
    """Estimate norms, rotation, KV store and activation of a layer."""
    widths = (4 * HIDDEN, 4 * HIDDEN, 2 * (HIDDEN + 1024), 4096, 3 * INTERMEDIATE)
    times = (max(2 * rows * width / 3.3e12, 1.5e-6) + device.gap_s for width in widths)
    return sum(times) + 4 * device.gap_s


def stock_attention_s(device: Device, start: int, rows: int) -> float:
    """Estimate causal attention of neighbouring rows."""
    pairs = rows * start + rows * (rows + 1) / 2
    return 4 * HEADS * HEAD_DIM * pairs / device.stock_flop_per_s + 6e-6


def scattered_attention_s(device: Device, positions: Sequence[int]) -> float:
    """Estimate attention of scattered rows: tiles of 32, the longest first, on all multiprocessors."""
    tiles = [positions[first : first + 32] for first in range(0, len(positions), 32)]
    programs = len(tiles) * KV_HEADS
    splits = max(1, min(2 * device.multiprocessors // programs, 32, (positions[-1] + 1) // 512))
    block_s = 4 * 128 * 64 * HEAD_DIM * device.multiprocessors / device.scattered_flop_per_s
    jobs = []
    for tile in tiles:
        left = math.ceil((tile[-1] + 1) / 64)
        share = math.ceil(left / splits)
        for _ in range(splits):
            jobs += [min(share, left) * block_s + 2.5e-6] * KV_HEADS
            left -= min(share, left)
    busy = [0.0] * device.multiprocessors
    for job in sorted(jobs, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + job)
    merging_s = 0.0
    if splits > 1:
        merged = len(positions) * HEADS * HEAD_DIM * 4 * (splits + 0.5)
        merging_s = merged / 2.5e12 + 3e-6 + device.gap_s
    return max(busy) + 3e-6 + merging_s


def padded(rows: int) -> int:
    """Return the rows of the prefill graph that stock replays for so many."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, 8193, 512)]
    size: int = next(size for size in sizes if size >= rows)
    return size


def stock_s(device: Device, prompt: Prompt) -> float:
    """Estimate stock's prefill, which finds the system prompt in its cache."""
    total = LOGITS_S
    for start in range(prompt.system, prompt.tokens, STEP_TOKENS):
        rows = min(STEP_TOKENS, prompt.tokens - start)
        layer = linear_s(device, padded(rows)) + small_s(device, padded(rows))
        total += LAYERS * (layer + stock_attention_s(device, start, rows))
    return total + device.fixed_s + ROUND_S


def estimate(
    device: Device,
    prompt: Prompt,
    ratio: float = 0.15,
    check: int = 2,
    early_share: float | None = None,
) -> Estimate:
    """Estimate both prefills of a prompt whose chunks are stored; the first of them is exact.

    Args:
        device: What it runs on.
        prompt: What is asked.
        ratio: Share of reused tokens that is recomputed.
        check: The check layer.
        early_share: Share of reused tokens that passes the layers up to the check layer, if the policy
            trusts a memory. Steps are cut as without one, though fewer would do.
    """
    exact, above = prompt.system + prompt.chunk, LAYERS - check - 1
    host = device_s = full = checking = copied = 0.0
    shrunk = [0.0, 0.0, 0.0]
    layer_rows = 0
    starts = range(prompt.system, prompt.tokens, STEP_TOKENS)
    for start in starts:
        stop = min(start + STEP_TOKENS, prompt.tokens)
        begin = max(start, exact)
        reused = max(0, min(stop, prompt.tokens - prompt.question) - begin)
        rest, chosen = stop - begin - reused, math.ceil(ratio * reused)
        early = reused if early_share is None else math.ceil(max(early_share, ratio) * reused)
        rows, kept = early + rest, chosen + rest
        layer_rows += rows * (check + 1) + kept * above
        attention, early_attention = (
            scattered_attention_s(device, [*_spread(begin, reused, n), *range(stop - rest, stop)])
            for n in (chosen, early)
        )
        if early_share is None:
            early_attention = stock_attention_s(device, begin, rows)
        head_bytes = max(0, min(exact, stop) - start) * 4 * KV_ROW_BYTES * LAYERS
        copy_s = (reused * 4 * KV_ROW_BYTES * above + head_bytes) / (
            0.8 * device.bytes_per_s
        ) + 10e-6
        copied += copy_s
        host += device.host_step_s
        device_s = max(device_s, host) + head_bytes / (0.8 * device.bytes_per_s)
        full_layer = linear_s(device, rows) + small_s(device, rows) + early_attention
        check_layer = (
            linear_s(device, rows, ["qkv"]) + 0.4 * small_s(device, rows) + 108e-6 + attention
            + linear_s(device, kept, ["o", "gate_up", "down"]) + 0.6 * small_s(device, kept)
        )  # fmt: skip
        parts = linear_s(device, kept), attention, small_s(device, kept)
        full += check * full_layer
        checking += check_layer
        shrunk = [sum_s + above * part for sum_s, part in zip(shrunk, parts, strict=True)]
        layers = [(full_layer, device.host_layer_s)] * check
        layers += [(check_layer, device.host_layer_s + 0.6e-3)]
        layers += [(0.7 * copy_s, 0.0)]  # what of the copy is not hidden
        layers += [(sum(parts), device.host_layer_s)] * above
        for work_s, host_s in layers:  # a layer begins when its first kernels are launched
            host += host_s
            device_s = max(device_s, host - 0.6 * host_s) + work_s
        host += ROUND_S if stop < prompt.tokens else 0.0
    return Estimate(
        stock=stock_s(device, prompt),
        blended=device.fixed_s + device_s + LOGITS_S,
        full=full,
        check=checking,
        shrunk=(shrunk[0], shrunk[1], shrunk[2]),
        copy=copied,
        ceiling=(prompt.tokens - prompt.system) * LAYERS / layer_rows,
    )


def _spread(begin: int, length: int, count: int) -> list[int]:
    """Return so many positions, spread evenly over a text of this length."""
    return [begin + int((i + 0.5) * length / count) for i in range(count)]


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def time_model() -> str:
    """Return the table of estimates; the column for what was measured is for whoever has a GPU."""
    rows = []
    with_fa3 = Device(**{**vars(H200), "stock_flop_per_s": FA3_FLOP_PER_S})
    for prompt, policy in product(PROMPTS, ("hkvd", "funnel")):
        share = POLICIES[policy].early_share
        found = estimate(H200, prompt, early_share=share)
        parts = (found.full, found.check, *found.shrunk, found.copy)
        milliseconds = [_ms(part) for part in (found.stock, found.blended, *parts)]
        speedups = (
            f"{found.speedup:.1f} ({estimate(with_fa3, prompt, early_share=share).speedup:.1f})"
        )
        rows.append(
            (prompt.name, policy, *milliseconds, speedups, f"{found.ceiling:.2f}", "none yet")
        )
    header = (
        *(
            "prompt",
            "policy",
            "stock",
            "blended",
            "full layers",
            "check layer",
            "linear",
            "attention",
        ),
        *("small kernels", "copy", "speed-up (stock with fa3)", "ceiling", "measured"),
    )
    return table(header, rows)

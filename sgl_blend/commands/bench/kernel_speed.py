"""Speed of each kernel against the roofline of the device it runs on.

A kernel must move so many bytes and do so many operations; the roofline is what a large ``copy_`` and
a large matrix product reach on the same device. The share of the roofline is the time these two would
need for the same work, the longer of them, over the time the kernel needed.

On CUDA the Triton kernels run, with L2 cleared before each call, and FlashInfer's attention beside
them; elsewhere the torch references.
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from sgl_blend.kernels.bin_scales import BinScales
from sgl_blend.kernels.delta_rope import LayerPools, copy_rotated_layers
from sgl_blend.kernels.kv_deviation import kv_deviation_at
from sgl_blend.kernels.ragged_attention import RaggedKernel, ragged_kernel
from sgl_blend.kernels.row_compaction import compact_rows
from sgl_blend.kernels.segmented_topk import Segments, segmented_topk, select_rows
from sgl_blend.kernels.unquantise import unquantise
from sgl_blend.kernels.upload import to_device

logger = logging.getLogger(__name__)

_L2_BYTES = 256 << 20
"""More than any L2."""
_PAGE_TOKENS = 64
"""Of coded KV; slots of the prompt that fill no page are left out."""
_HEAD_START_CYCLES = 1_000_000
"""About half a millisecond in which the host launches ahead: what is timed is the device."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a prompt.

    Attributes:
        num_layers: Layers whose KV is copied.
        num_tokens: Positions of the prompt, all of them reused but the question.
        num_question: Rows after the last chunk.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Dimensions of a head, all rotated.
        hidden: Width of the hidden state.
        ratio: Share of the reused tokens that is recomputed.
        dtype: Of the model and its KV.
    """

    num_layers: int
    num_tokens: int
    num_question: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    ratio: float
    dtype: torch.dtype

    @property
    def num_reused(self) -> int:
        """Tokens of the chunks."""
        return self.num_tokens - self.num_question

    @property
    def num_taken(self) -> int:
        """Reused tokens that are recomputed."""
        return max(1, int(self.ratio * self.num_reused))

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize


SHAPES = {
    "tiny": Shape(2, 512, 32, 4, 2, 64, 256, 0.15, torch.float32),
    "8b-8k": Shape(32, 8192, 256, 32, 8, 128, 4096, 0.15, torch.bfloat16),
    "8b-32k": Shape(32, 32_768, 256, 32, 8, 128, 4096, 0.15, torch.bfloat16),
}
"""By name; 8b is Llama-3.1-8B."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a device reaches: bytes per second of a copy (read and written), FLOP/s of a product."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a kernel and what it cannot do without.

    Attributes:
        kernel: Its name.
        call: Runs it once.
        num_bytes: Least bytes read and written.
        num_flop: Floating-point operations that have a matrix product's form.
    """

    kernel: str
    call: Callable[[], Any]
    num_bytes: int
    num_flop: int


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement; ms is the median of the repetitions, share is of the roofline."""

    kernel: str
    device: str
    shape: str
    dtype: str
    ms: float
    num_bytes: int
    num_flop: int
    roofline_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured, and one sentence for each kernel that failed."""

    rows: list[Speed]
    errors: list[str]


def measure(device: str, shapes: Sequence[str], *, compile_flashinfer: bool = False) -> Speeds:
    """Time every kernel.

    Args:
        device: A torch device, such as "cuda" or "cpu".
        shapes: Names from SHAPES; "tiny" suits a CPU.
        compile_flashinfer: Take the minutes that FlashInfer's variants need where they were never
            compiled; they are left out otherwise.

    Returns:
        One row or error per shape and kernel.

    Raises:
        ValueError: A shape is not known.
    """
    place = torch.device(device)
    label = torch.cuda.get_device_name(place) if place.type == "cuda" else device
    found = Speeds([], [])
    for name in shapes:
        if name not in SHAPES:
            raise ValueError(f"shapes: expected some of {', '.join(SHAPES)}, got {name!r}")
        shape = SHAPES[name]
        roofline = measure_roofline(place, shape.dtype)
        for work in works(shape, place, compile_flashinfer=compile_flashinfer):
            try:
                seconds = time_call(work.call, place)
            except (RuntimeError, TritonError) as err:
                found.errors.append(f"{work.kernel}, {name}: {str(err).splitlines()[0]}")
                continue
            roofline_s = max(
                work.num_bytes / roofline.bytes_per_s, work.num_flop / roofline.flop_per_s
            )
            speed = Speed(
                kernel=work.kernel,
                device=label,
                shape=name,
                dtype=str(shape.dtype).removeprefix("torch."),
                ms=seconds * 1e3,
                num_bytes=work.num_bytes,
                num_flop=work.num_flop,
                roofline_ms=roofline_s * 1e3,
                share=roofline_s / seconds,
            )
            found.rows.append(speed)
    return found


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure what a large copy and a large matrix product reach."""
    num_bytes, width = (2 << 30, 8192) if device.type == "cuda" else (64 << 20, 512)
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = time_call(lambda: target.copy_(source), device)
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product_s = time_call(lambda: a @ b, device)
    return Roofline(2 * num_bytes / copy_s, 2 * width**3 / product_s)


def time_call(call: Callable[[], Any], device: torch.device, repetitions: int = 20) -> float:
    """Return the median seconds of a call after a few that do not count."""
    for _ in range(3):
        call()
    if device.type == "cuda":
        return _time_on_cuda(call, device, repetitions)
    return statistics.median(_clock(call) for _ in range(repetitions))


def _clock(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _time_on_cuda(call: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    clear = torch.empty(_L2_BYTES, dtype=torch.int8, device=device)
    make_event: Any = torch.cuda.Event  # torch does not say its types
    spans = []
    for _ in range(repetitions):
        clear.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start, stop = (make_event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize(device)
    milliseconds = [float(start.elapsed_time(stop)) for start, stop in spans]
    return statistics.median(milliseconds) / 1e3


def works(shape: Shape, device: torch.device, *, compile_flashinfer: bool) -> Iterator[Work]:
    """Prepare each kernel for a shape, one at a time."""
    torch.manual_seed(0)
    k, v = (_pools(shape, device) for _ in range(2))
    # Stored chunks and the prompt's own slots, each scattered as after much traffic.
    slots = torch.randperm(2 * shape.num_tokens, device=device)
    stored, own = slots[: shape.num_tokens], slots[shape.num_tokens :]
    yield _copy_work(shape, LayerPools(k, v), stored, own)
    yield _deviation_work(shape, v[0], stored)
    yield _decoding_work(shape, k[0], own)
    yield _topk_work(shape, device)
    yield _selection_work(shape, device)
    yield _compaction_work(shape, device)
    for label, kernel in attention_kernels(shape, device, compile_missing=compile_flashinfer):
        yield _attention_work(shape, label, kernel, k[0], v[0], own)


def _pools(shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    rows = 2 * shape.num_tokens, shape.num_kv_heads, shape.head_dim
    return tuple(
        torch.randn(rows, device=device, dtype=shape.dtype) for _ in range(shape.num_layers)
    )


def _copy_work(shape: Shape, pools: LayerPools, stored: torch.Tensor, own: torch.Tensor) -> Work:
    count = shape.num_reused - shape.num_taken
    angle = torch.rand(count, shape.head_dim // 2, device=stored.device)
    source, dest, cos, sin = stored[:count], own[:count], angle.cos(), angle.sin()
    layers = range(shape.num_layers)

    def call() -> None:
        copy_rotated_layers(pools, layers, source, dest, cos, sin, neox=True)

    # K and V, read and written, and the tables once.
    num_bytes = 4 * shape.num_layers * count * shape.kv_row_bytes + 2 * angle.nbytes
    return Work("copy_rotated_layers", call, num_bytes, 0)


def _deviation_work(shape: Shape, pool: torch.Tensor, stored: torch.Tensor) -> Work:
    count, device = shape.num_reused, stored.device
    fresh = torch.randn(shape.num_tokens, *pool.shape[1:], device=device, dtype=shape.dtype)
    rows, slots = torch.arange(count, device=device), stored[:count]
    num_bytes = 2 * count * shape.kv_row_bytes + 4 * count
    return Work("kv_deviation_at", lambda: kv_deviation_at(fresh, rows, pool, slots), num_bytes, 0)


def _decoding_work(shape: Shape, pool: torch.Tensor, own: torch.Tensor) -> Work:
    """Keys of 4 bits with anchors: the coding that most levels choose, and the most work."""
    pages, device, heads = shape.num_reused // _PAGE_TOKENS, own.device, pool.shape[1:]
    step, base, low, anchor_step = steps = torch.rand(4, *heads, device=device)
    scales = BinScales(step, base, low, anchor_step, bits=4, has_anchors=True)
    size = (pages, scales.num_bytes(_PAGE_TOKENS))
    packed = torch.randint(256, size, device=device, dtype=torch.uint8)
    slots = own[: pages * _PAGE_TOKENS].view(pages, _PAGE_TOKENS)
    angle = torch.rand(*slots.shape, shape.head_dim // 2, device=device)
    rotation = angle.cos(), angle.sin(), True
    # Bins, slots, tables and scales read; keys written.
    num_bytes = packed.nbytes + slots.nbytes + 2 * angle.nbytes + steps.nbytes
    num_bytes += slots.numel() * shape.kv_row_bytes
    call = functools.partial(unquantise, packed, scales, rotation, slots, pool)
    return Work("unquantise", call, num_bytes, 0)


def _topk_work(shape: Shape, device: torch.device) -> Work:
    count = shape.num_reused
    scores = torch.rand(count, device=device)
    return Work(
        "segmented_topk",
        lambda: segmented_topk(scores, [count], [shape.num_taken]),
        (4 + 8) * count,
        0,
    )


def _selection_work(shape: Shape, device: torch.device) -> Work:
    count, num_taken = shape.num_reused, shape.num_taken
    scores = torch.rand(count, device=device)
    rows = torch.arange(count, device=device)
    segments = Segments((shape.num_tokens,), (count,), (num_taken,))
    bounds = to_device(torch.from_numpy(segments.bounds()), device)
    # Scores and row numbers, the rows that are kept, and two numbers for each candidate that is taken.
    num_bytes = (4 + 8) * count + 8 * (num_taken + shape.num_question) + 16 * num_taken
    return Work("select_rows", lambda: select_rows(scores, rows, segments, bounds), num_bytes, 0)


def _compaction_work(shape: Shape, device: torch.device) -> Work:
    kept = shape.num_taken + shape.num_question
    rows = torch.randperm(shape.num_tokens, device=device)[:kept].sort().values
    hidden, residual = (
        torch.randn(shape.num_tokens, shape.hidden, device=device, dtype=shape.dtype)
        for _ in range(2)
    )
    positions = torch.arange(shape.num_tokens, device=device)
    tensors = [hidden, residual, positions, positions.clone()]
    num_bytes = 2 * kept * sum(tensor[0].nbytes for tensor in tensors) + rows.nbytes
    return Work("compact_rows", lambda: compact_rows(rows, tensors), num_bytes, 0)


def attention_kernels(
    shape: Shape, device: torch.device, *, compile_missing: bool
) -> Iterator[tuple[str, RaggedKernel]]:
    """Start every attention kernel that runs on a device, one at a time; yield it and its name."""
    ours = ragged_kernel(device)
    yield ours.name, ours
    if device.type != "cuda":
        return
    from sgl_blend.kernels import ragged_attention_flashinfer as flashinfer

    heads = flashinfer.HeadLayout(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.dtype
    )
    for backend in dict.fromkeys((flashinfer.best_backend(device, heads), "fa2")):
        try:
            if compile_missing or flashinfer.is_compiled(backend, heads):
                kernel = flashinfer.FlashInferRagged(backend, heads, device)
                yield f"flashinfer {backend}", kernel
            else:
                logger.warning("flashinfer %s was never compiled and is left out", backend)
        except (ImportError, ValueError, RuntimeError) as err:
            logger.warning("flashinfer %s does not start here: %s", backend, err)


def _attention_work(
    shape: Shape,
    label: str,
    kernel: RaggedKernel,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    own: torch.Tensor,
) -> Work:
    device = own.device
    taken = torch.randperm(shape.num_reused, device=device)[: shape.num_taken]
    question = torch.arange(shape.num_reused, shape.num_tokens, device=device)
    positions = torch.cat([taken.sort().values, question])
    num_rows = positions.numel()
    q = torch.randn(num_rows, shape.num_heads, shape.head_dim, device=device, dtype=shape.dtype)
    # In the first call, where it may fail like everything else.
    plan = functools.cache(lambda: kernel.plan(positions, [num_rows], [own], shape.dtype))
    scale = shape.head_dim**-0.5
    seen = int((positions + 1).sum())
    return Work(
        f"ragged_attention ({label})",
        lambda: kernel.run(q, k_pool, v_pool, plan(), scale=scale),
        2 * q.nbytes + 2 * shape.num_tokens * shape.kv_row_bytes,
        4 * shape.num_heads * shape.head_dim * seen,
    )

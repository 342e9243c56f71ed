"""Attention of scattered queries through FlashInfer, which compiles the variants below.

What is computed is drawn in ragged_attention.py. A row's bound is its position, which FlashInfer's
masks do not know, so the variants read it from a tensor:

* fa3 (Hopper): has no mask hook; scores after the row's position become -inf in the transform of the
  scores. A thread owns two rows of a tile, 8 apart, whose positions it keeps in registers.
* fa2: the mask hook is called for every block only in the custom mask mode, which an (unread) packed
  mask of one byte switches on.

This module has not run on a GPU yet. The variants follow the interface of FlashInfer 0.6.15 to 0.6.18;
which rows a thread owns in fa3 is derived from the layout of the tensor-core instruction and must be
checked first (tests/test_ragged_attention_flashinfer.py, marked gpu).
"""

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Backend = Literal["fa2", "fa3"]

_WORKSPACE_BYTES = 256 << 20
_GROUP_ROWS = 128
"""Rows of one fa3 tile; a group of so many can have a bound of its own on the KV."""
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

_FA2_VARIANT = r"""
struct ScatteredCausal : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  const int32_t* row_position;

  template <typename Params>
  __device__ __host__ ScatteredCausal(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;  // otherwise blocks are skipped by the number of the row
    sm_scale_log2 = params.sm_scale * math::log2e;
    row_position = params.row_position + params.q_indptr[batch_idx];
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits;
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t row = min(qo_idx, qo_len - 1);  // a tile may reach past the last row
    return int32_t(kv_idx) <= __ldg(row_position + row);
  })
};
"""

# -math::inf and not -INFINITY: FlashInfer 0.6.15 means 5e4 by it and is not safe for real infinities.
_FA3_VARIANT = r"""
struct ScatteredCausal : AttentionVariantBase {
  float sm_scale_log2, scale_pv;
  int32_t upper_position, lower_position;

  template <typename MainloopParams, typename BlockCoord>
  __device__ ScatteredCausal(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx] =
        block_coord;
    const auto& more = params.additional_params;
    sm_scale_log2 = more.sm_scale * math::log2e;
    scale_pv = 1.f;
    constexpr int TILE_ROWS = HEAD_DIM_VO == 64 ? 192 : 128;
    // The first warpgroup loads; each of the others computes 64 rows, each of its warps 16 of them.
    const int thread = int(threadIdx.x) - 128;
    const int in_tile = (thread / 128) * 64 + ((thread % 128) / 32) * 16 + (thread % 32) / 4;
    const int row = q_tile_idx * TILE_ROWS + in_tile;
    const int last = max(int(qo_len) - 1, 0);
    const int32_t* position = more.row_position + qo_indptr;
    upper_position = __ldg(position + min(row, last));
    lower_position = __ldg(position + min(row + 8, last));
  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    static_assert(NUM_ROWS_PER_THREAD == 2);
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/true>(sm_scale_log2);
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t position = (qo_idx & 8) ? lower_position : upper_position;
    return int32_t(kv_idx) <= position ? logits : T(-math::inf);
  })
};
"""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """What a module is compiled for, and how many heads it will see.

    Attributes:
        num_heads: Query heads, on this rank.
        num_kv_heads: KV heads, on this rank.
        head_dim: 64, 128 or 256; the same for K and V.
        dtype: Of the queries and the result.
        kv_dtype: Of the pool; in fa3 that of the queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A batch for which the wrapper has been planned; int32 [T] positions."""

    positions: torch.Tensor


def jit_args(backend: Backend, heads: HeadLayout) -> list[Any]:
    """Return what FlashInfer compiles a module from; the first entry is the module's name.

    Raises:
        ValueError: A dtype has no module.
    """
    for dtype in (heads.dtype, heads.kv_dtype):
        if dtype not in _NAMES:
            raise ValueError(f"flashinfer: expected a 16- or 8-bit dtype, got {dtype}")
    if backend == "fa3" and heads.kv_dtype != heads.dtype:
        raise ValueError(f"flashinfer fa3: expected KV in {heads.dtype}, got {heads.kv_dtype}")
    kind = f"{_NAMES[heads.dtype]}_{_NAMES[heads.kv_dtype]}_d{heads.head_dim}"
    return [
        f"sgl_blend_scattered_causal_{backend}_{kind}",
        heads.dtype,
        heads.kv_dtype,
        heads.dtype,
        torch.int32,
        heads.head_dim,
        heads.head_dim,
        ["row_position"],
        ["int32_t"],
        ["sm_scale"],
        ["double"],
        "ScatteredCausal",
        _FA3_VARIANT if backend == "fa3" else _FA2_VARIANT,
    ]


def modules() -> Iterator[tuple[Backend, HeadLayout]]:
    """List the modules worth compiling ahead of time: minutes each, and no request should wait."""
    half = torch.bfloat16
    for head_dim in (128, 64):
        yield "fa3", HeadLayout(32, 8, head_dim, half, half)
        yield "fa2", HeadLayout(32, 8, head_dim, half, half)
    yield "fa2", HeadLayout(32, 8, 128, half, torch.float8_e4m3fn)


def precompile(backend: Backend, heads: HeadLayout) -> Any:
    """Compile a module, or load it if that was done before.

    Raises:
        ModuleNotFoundError: FlashInfer is not installed.
    """
    return _specification(backend, heads).build_and_load()


def is_compiled(backend: Backend, heads: HeadLayout) -> bool:
    """Tell whether a module can be loaded without minutes of compiling.

    Raises:
        ModuleNotFoundError: FlashInfer is not installed.
    """
    return bool(_specification(backend, heads).is_compiled)


def best_backend(device: torch.device, heads: HeadLayout) -> Backend:
    """Return fa3 where it runs: on Hopper, with KV of the queries' dtype."""
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if hopper and heads.kv_dtype == heads.dtype else "fa2"


def _specification(backend: Backend, heads: HeadLayout) -> Any:
    attention = _flashinfer("flashinfer.jit.attention.modules")
    return attention.gen_customize_batch_prefill_module(
        backend, *jit_args(backend, heads), use_logits_soft_cap=False
    )


def _flashinfer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ragged attention through FlashInfer needs the package flashinfer-python, which is not "
            "installed; the kernel 'triton' does without"
        ) from error


class FlashInferRagged:
    """A RaggedKernel of FlashInfer; owned by the thread that runs the forward, one per runner.

    The wrapper keeps the last plan, so a plan is good until the next one.
    """

    name = "flashinfer"

    def __init__(self, backend: Backend, heads: HeadLayout, device: torch.device) -> None:
        flashinfer = _flashinfer("flashinfer")
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._backend = backend
        self._heads = heads
        # Wanted as a tensor, never read: it switches the custom mask mode on.
        self._mask = torch.zeros(1, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            backend=backend,
            jit_args=jit_args(backend, heads),
            jit_kwargs={"use_logits_soft_cap": False},
        )
        self._plan_buffers = _PlanBuffers(device)

    def host_counts(self, num_rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Need nothing: FlashInfer sends its own plan, in copies of its own."""

    def plan(
        self,
        positions: torch.Tensor,
        num_rows: Sequence[int],
        kv_slots: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        counts: torch.Tensor | None = None,
        bounds: Sequence[Sequence[int]] | None = None,
    ) -> FlashInferPlan:
        """Prepare a batch; arguments as plan_ragged, and nothing is asked of the device.

        Args:
            positions: See plan_ragged.
            num_rows: See plan_ragged.
            kv_slots: See plan_ragged.
            dtype: Of the queries; the layout's.
            counts: There are none.
            bounds: Per request and group of 128 rows a position that no row of it reaches, if known
                on the host; KV after it is skipped. fa3 only: it alone lets groups share slots.

        Raises:
            ValueError: The dtype is another than was compiled for.
        """
        if dtype != self._heads.dtype:
            raise ValueError(f"q: expected {self._heads.dtype}, got {dtype}")
        self._plan_buffers.lend(self._wrapper)
        lengths = [slots.numel() for slots in kv_slots]
        starts = list(itertools.accumulate(lengths, initial=0))
        slots = torch.cat(list(kv_slots)).to(torch.int32)
        heads = self._heads
        shape = heads.num_heads, heads.num_kv_heads, heads.head_dim, 1
        types = {"q_data_type": heads.dtype, "kv_data_type": heads.kv_dtype}
        # Host tensors throughout: from a device tensor FlashInfer would read them back.
        if self._backend == "fa3":
            entries = list(_entries(num_rows, starts, lengths, bounds))
            first_row = list(itertools.accumulate((e.num_rows for e in entries), initial=0))
            self._wrapper.plan(
                _host(first_row), _host([*(e.start for e in entries), starts[-1]]), slots,
                _host([1] * len(entries)), *shape,
                seq_lens=_host([e.length for e in entries]), causal=False, **types,
            )  # fmt: skip
        else:
            first_row = list(itertools.accumulate(num_rows, initial=0))
            self._wrapper.plan(
                _host(first_row), _host(starts), slots, _host([1] * len(num_rows)), *shape,
                packed_custom_mask=self._mask, causal=False, **types,
            )  # fmt: skip
        self._plan_buffers.take_back()
        return FlashInferPlan(positions.to(torch.int32))

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        plan: FlashInferPlan,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attend in one layer; arguments as ragged_attention, the scale of fp8 keys inside scale."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if q.shape[0]:
            pools = k_pool.unsqueeze(1), v_pool.unsqueeze(1)  # pages of one slot
            self._wrapper.run(q, pools, plan.positions, scale, out=out)
        return out


class _PlanBuffers:
    """Pinned host memory for plans: one is written only when the device has read its last plan.

    A wrapper owns one such buffer, writes it on the host and queues a copy to the device. That is
    safe where every plan stands at the head of a forward, after the sampling of the one before. Ours
    stand in the middle, several in one forward under a gradual policy, and the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._used: list[tuple[torch.Tensor, Any]] = []
        self._lent: torch.Tensor | None = None

    def lend(self, wrapper: Any) -> None:
        """Give the wrapper a buffer that nobody reads any more."""
        if not self._on_cuda:
            return
        free = [i for i, (_, was_read) in enumerate(self._used) if was_read.query()]
        if free:
            buffer, _ = self._used.pop(free[0])
        else:
            buffer = torch.empty_like(wrapper._pin_memory_int_workspace_buffer, pin_memory=True)
        wrapper._pin_memory_int_workspace_buffer = self._lent = buffer

    def take_back(self) -> None:
        """Note what was lent, and when the device will have read it."""
        if self._lent is not None:
            make_event: Any = torch.cuda.Event  # torch does not say its types
            was_read = make_event()
            was_read.record()
            self._used.append((self._lent, was_read))
            self._lent = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """Rows that FlashInfer sees as a request: where their slots start and how many are visible."""

    num_rows: int
    start: int
    length: int


def _entries(
    num_rows: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    bounds: Sequence[Sequence[int]] | None,
) -> Iterator[_Entry]:
    for request, (count, length) in enumerate(zip(num_rows, lengths, strict=True)):
        if bounds is None or count == 0:
            yield _Entry(count, starts[request], length)
            continue
        groups = range(0, count, _GROUP_ROWS)
        for first, bound in zip(groups, bounds[request], strict=True):
            yield _Entry(min(_GROUP_ROWS, count - first), starts[request], min(bound, length))


def _host(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)

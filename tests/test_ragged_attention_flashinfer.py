"""What of the FlashInfer kernel can be seen without a GPU, and its check on one."""

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ragged_cases import dense, make_case

from sgl_blend.kernels.ragged_attention_flashinfer import (
    Backend,
    FlashInferRagged,
    HeadLayout,
    _PlanBuffers,
    jit_args,
    modules,
)
from support import DEVICE, assert_as_good_as

MISSING = importlib.util.find_spec("flashinfer") is None
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS = HeadLayout(4, 2, 64, BF16, BF16)


class RecordingWrapper:
    """Stands where FlashInfer's wrapper would and keeps what it was given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.made_with = options
        self.planned: tuple[Any, ...] = ()
        self.plan_options: dict[str, Any] = {}

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.planned, self.plan_options = arguments, options

    def run(self, q: Any, pools: Any, positions: Any, scale: float, *, out: Any) -> None:
        self.ran_with = (q, pools, positions, scale)


def make_kernel(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> tuple[FlashInferRagged, RecordingWrapper]:
    made = []

    def make_wrapper(*arguments: Any, **options: Any) -> RecordingWrapper:
        made.append(RecordingWrapper(*arguments, **options))
        return made[-1]

    package = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=make_wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    kernel = FlashInferRagged(backend, HEADS, torch.device("cpu"))
    return kernel, made[0]


@pytest.mark.skipif(not MISSING, reason="needs a machine without FlashInfer")
def test_without_flashinfer_it_says_what_is_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^ragged attention through FlashInfer needs"):
        FlashInferRagged("fa3", HEADS, torch.device("cpu"))


def test_every_module_has_a_name_of_its_own() -> None:
    names = [jit_args(backend, heads)[0] for backend, heads in modules()]

    assert len(set(names)) == len(names)


def test_dtypes_without_a_module_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^flashinfer fa3: expected KV in torch\.bfloat16, got"):
        jit_args("fa3", HeadLayout(4, 2, 64, BF16, FP8))
    with pytest.raises(ValueError, match=r"^flashinfer: expected a 16- or 8-bit dtype, got"):
        jit_args("fa2", HeadLayout(4, 2, 64, torch.float32, torch.float32))


def test_fa2_is_planned_with_one_entry_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, wrapper = make_kernel(monkeypatch, "fa2")
    case = make_case([5, 0, 3])
    rows = case.batch

    kernel.plan(rows.positions, rows.num_rows, rows.kv_slots, BF16)

    first_row, starts, slots, page_fill, *shape = wrapper.planned
    lengths = torch.tensor([len(s) for s in rows.kv_slots])
    assert first_row.tolist() == [0, 5, 5, 8]
    assert starts.diff().tolist() == lengths.tolist()
    assert slots.tolist() == torch.cat(rows.kv_slots).tolist()
    assert slots.dtype == first_row.dtype == torch.int32
    assert page_fill.tolist() == [1, 1, 1]
    assert shape == [4, 2, 64, 1]
    assert "packed_custom_mask" in wrapper.plan_options
    assert wrapper.plan_options["causal"] is False


def test_fa3_groups_share_their_slots_and_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, wrapper = make_kernel(monkeypatch, "fa3")
    slots = [torch.arange(400), torch.arange(400, 430)]
    positions = torch.cat([torch.arange(100, 400), torch.arange(30)])

    kernel.plan(positions, [300, 30], slots, BF16, bounds=[[228, 356, 500], [30]])

    first_row, starts, *_ = wrapper.planned
    assert first_row.tolist() == [0, 128, 256, 300, 330]
    assert starts.tolist() == [0, 0, 0, 400, 430]
    assert wrapper.plan_options["seq_lens"].tolist() == [228, 356, 400, 30]
    assert "packed_custom_mask" not in wrapper.plan_options

    kernel.plan(positions, [300, 30], slots, BF16)

    first_row, starts, *_ = wrapper.planned
    assert first_row.tolist() == [0, 300, 330]
    assert starts.tolist() == [0, 400, 430]
    assert wrapper.plan_options["seq_lens"].tolist() == [400, 30]


def test_a_layer_runs_on_pages_of_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, wrapper = make_kernel(monkeypatch, "fa3")
    case = make_case([5], head_dim=64)
    rows = case.batch
    plan = kernel.plan(rows.positions, rows.num_rows, rows.kv_slots, BF16)

    out = kernel.run(case.q, case.k_pool, case.v_pool, plan, scale=0.5)

    assert out.shape == case.q.shape
    _, (k, _), positions, scale = wrapper.ran_with
    assert k.shape == (case.k_pool.shape[0], 1, 2, 64)
    assert positions.dtype == torch.int32
    assert scale == 0.5


def test_queries_of_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = make_kernel(monkeypatch, "fa2")
    with pytest.raises(ValueError, match=r"^q: expected torch\.bfloat16, got torch\.float16$"):
        kernel.plan(torch.arange(1), [1], [torch.arange(1)], torch.float16)


def test_a_buffer_is_written_again_only_when_the_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: set[int] = set()

    class Event:
        def __init__(self) -> None:
            self.number = -1

        def record(self) -> None:
            self.number = len(lent) - 1

        def query(self) -> bool:
            return self.number in read

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty_like", lambda like, pin_memory: like.clone())
    wrapper = SimpleNamespace(_pin_memory_int_workspace_buffer=torch.zeros(8))
    buffers = _PlanBuffers(torch.device("cuda"))
    lent: list[int] = []

    def plan() -> int:
        buffers.lend(wrapper)
        lent.append(wrapper._pin_memory_int_workspace_buffer.data_ptr())
        buffers.take_back()
        return lent[-1]

    first, second = plan(), plan()
    assert first != second
    read.add(0)
    assert plan() == first
    assert plan() not in (first, second)


@pytest.mark.gpu
@pytest.mark.skipif(MISSING, reason="needs FlashInfer")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("counts", [[1], [63], [129, 1, 31], [200, 0, 130]], ids=str)
def test_it_is_softmax_attention_under_a_mask_by_position(
    counts: list[int], backend: Backend
) -> None:
    case = make_case(counts, head_dim=128).to(BF16).on(DEVICE)

    got = case.run(FlashInferRagged(backend, replace(HEADS, head_dim=128), DEVICE))

    assert_as_good_as(got, dense(case, BF16), dense(case, torch.float64), slack=2)


@pytest.mark.gpu
@pytest.mark.skipif(MISSING, reason="needs FlashInfer")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_plan_that_is_still_on_its_way_to_the_device_is_not_overwritten(backend: Backend) -> None:
    cases = [make_case([count], head_dim=128).to(BF16).on(DEVICE) for count in (200, 1, 77)]
    kernel = FlashInferRagged(backend, replace(HEADS, head_dim=128), DEVICE)

    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    found = [case.run(kernel) for case in cases]

    for case, got in zip(cases, found, strict=True):
        assert_as_good_as(got, dense(case, BF16), dense(case, torch.float64), slack=2)

"""The one-pass deviation against float64, on rows and slots that are scattered."""

import math

import pytest
import torch

from sgl_blend.kernels.kv_deviation import kv_deviation_at
from sgl_blend.kernels.kv_deviation_triton import kv_deviation_at_triton
from sgl_blend.kernels.rounding import Rounding
from support import DEVICE, KERNEL_DTYPES, assert_as_good_as

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [(1, 1, 16), (63, 3, 80), (100, 8, 128), (37, 7, 64), (5, 2, 256)]
Rotation = tuple[torch.Tensor, torch.Tensor, bool]


class Case:
    """Fresh rows inside a wider tensor, as they come out of a fused projection, and a pool."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        num_tokens, num_heads, head_dim = shape
        width = num_heads * head_dim
        num_rows = num_tokens + 9
        projected = torch.randn(num_rows, 3 * width, device=DEVICE).to(dtype)
        self.fresh = projected[:, width : 2 * width].view(num_rows, num_heads, head_dim)
        self.pool = torch.randn(2 * num_rows, num_heads, head_dim, device=DEVICE).to(dtype)
        self.rows = torch.randperm(num_rows, device=DEVICE)[:num_tokens].sort().values
        self.slots = torch.randperm(2 * num_rows, device=DEVICE)[:num_tokens]

    def rotation(self, rotary_dim: int, *, neox: bool) -> Rotation:
        angle = torch.rand(self.rows.shape[0], rotary_dim // 2, device=DEVICE) * 2 * math.pi
        return angle.cos(), angle.sin(), neox

    def run_triton(self, rotation: Rotation | None = None) -> torch.Tensor:
        got = kv_deviation_at_triton(self.fresh, self.rows, self.pool, self.slots, rotation)
        return got.cpu()

    def run_torch(self, rotation: Rotation | None = None) -> torch.Tensor:
        fresh, rows, pool, slots = (x.cpu() for x in (self.fresh, self.rows, self.pool, self.slots))
        moved = None if rotation is None else (rotation[0].cpu(), rotation[1].cpu(), rotation[2])
        return kv_deviation_at(fresh, rows, pool, slots, moved)

    def oracle(
        self, rotation: Rotation | None = None, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        """Expand the square, |a|^2 - 2ab + |b|^2; a rotation keeps |b| and turns ab."""
        a = self.fresh.cpu().to(dtype)[self.rows.cpu()]
        b = self.pool.cpu().to(dtype)[self.slots.cpu()]
        dot = a * b
        norm: torch.Tensor = (a * a).sum((1, 2)) + (b * b).sum((1, 2))
        if rotation is None:
            return norm - 2 * dot.sum((1, 2))
        cos, sin = (x.cpu().to(dtype)[:, None, :] for x in rotation[:2])
        half = cos.shape[-1]
        ax, ay, bx, by = (part for x in (a, b) for part in sides(x, half, neox=rotation[2]))
        turned = (ax * bx + ay * by) * cos + (ay * bx - ax * by) * sin
        # cos and sin are rounded to float32, so b is not exactly as long as it was.
        longer = (bx * bx + by * by) * (cos * cos + sin * sin - 1)
        tail = dot[..., 2 * half :].sum((1, 2))
        return norm + longer.sum((1, 2)) - 2 * (turned.sum((1, 2)) + tail)


def sides(x: torch.Tensor, half: int, *, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = x[..., : 2 * half]
    return (
        (rotary[..., :half], rotary[..., half:]) if neox else (rotary[..., ::2], rotary[..., 1::2])
    )


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_squared_distance(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = Case(shape, dtype)

    got = case.run_triton()

    assert got.dtype == torch.float32
    assert_as_good_as(got, case.run_torch(), case.oracle(), slack=2)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"), [((63, 3, 80), 32), ((100, 8, 128), 128), ((9, 1, 96), 96)], ids=str
)
def test_a_cached_key_is_moved_first(
    shape: tuple[int, int, int], rotary_dim: int, neox: bool, dtype: torch.dtype
) -> None:
    case = Case(shape, dtype)
    rotation = case.rotation(rotary_dim, neox=neox)

    got, want = case.run_triton(rotation), case.run_torch(rotation)

    assert_as_good_as(got, want, case.oracle(rotation), slack=2)
    assert_as_good_as(want, case.oracle(rotation, torch.float32), case.oracle(rotation))


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_pool_may_be_narrower_than_what_is_fresh(pool_dtype: torch.dtype) -> None:
    case = Case((63, 2, 64), torch.float16)
    case.pool = case.pool.to(pool_dtype)

    assert_as_good_as(case.run_triton(), case.run_torch(), case.oracle(), slack=2)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_equal_kv_deviates_by_exactly_nothing(neox: bool) -> None:
    case = Case((63, 2, 64), torch.float16)
    case.pool[case.slots] = case.fresh[case.rows]
    cos, sin, _ = case.rotation(32, neox=neox)
    still = torch.ones_like(cos), torch.zeros_like(sin), neox

    assert (case.run_triton() == 0).all()
    assert (case.run_triton(still) == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_rounding_explains_does_not_count(shape: tuple[int, int, int]) -> None:
    case = Case(shape, torch.float32)
    half_bins = torch.rand(shape[1:], device=DEVICE) * 2
    share = (torch.arange(shape[0], device=DEVICE) % 2).float()
    rounding = Rounding(share, half_bins)

    arguments = case.fresh, case.rows, case.pool, case.slots
    got = kv_deviation_at_triton(*arguments, None, rounding).cpu()

    apart = (case.fresh[case.rows].double() - case.pool[case.slots].double()).abs()
    beyond = (apart - share[:, None, None] * half_bins).clamp(min=0)
    torch.testing.assert_close(
        got.double(), beyond.square().sum((1, 2)).cpu(), rtol=1e-5, atol=1e-5
    )
    exact = case.run_triton()
    assert torch.equal(got[share.cpu() == 0], exact[share.cpu() == 0])
    assert (got <= exact).all()
    public = kv_deviation_at(*arguments, rounding=rounding)
    torch.testing.assert_close(public.cpu(), got, rtol=1e-5, atol=1e-5)


def test_rounding_goes_with_no_rotation() -> None:
    case = Case((5, 2, 16), torch.float32)
    rounding = Rounding(torch.ones(5), torch.ones(2, 16))
    fresh, rows, pool, slots = (x.cpu() for x in (case.fresh, case.rows, case.pool, case.slots))
    cos = torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"^rounding: expected None with a rotation$"):
        kv_deviation_at(fresh, rows, pool, slots, (cos, cos, True), rounding)
    wrong = Rounding(torch.ones(4), torch.ones(2, 16))
    with pytest.raises(ValueError, match=r"^share: expected shape \(5,\), got \(4,\)$"):
        kv_deviation_at(fresh, rows, pool, slots, None, wrong)


def test_no_rows_have_no_deviation() -> None:
    case = Case((0, 2, 64), torch.float32)

    assert case.run_triton().shape == (0,)
    assert case.run_torch().shape == (0,)


def test_the_public_function_measures_the_same() -> None:
    case = Case((20, 2, 64), torch.float32)

    got = kv_deviation_at(case.fresh, case.rows, case.pool, case.slots)

    assert_as_good_as(got.cpu(), case.run_torch(), case.oracle(), slack=2)


def test_sizes_that_do_not_fit_are_refused() -> None:
    fresh, pool, rows = torch.zeros(5, 2, 8), torch.zeros(9, 2, 8), torch.arange(3)
    with pytest.raises(ValueError, match=r"^slots: expected shape \(3,\), got \(4,\)$"):
        kv_deviation_at(fresh, rows, pool, torch.arange(4))
    with pytest.raises(ValueError, match=r"^pool: expected shape \(None, 2, 8\), got \(9, 1, 8\)$"):
        kv_deviation_at(fresh, rows, pool[:, :1], rows)
    with pytest.raises(ValueError, match=r"^rows: expected torch\.int64, got torch\.int32$"):
        kv_deviation_at(fresh, rows.int(), pool, rows)
    with pytest.raises(ValueError, match=r"^cos: expected shape \(3, 4\), got \(2, 4\)$"):
        kv_deviation_at(fresh, rows, pool, rows, (torch.ones(2, 4), torch.ones(2, 4), True))

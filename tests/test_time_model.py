"""What documents estimate of a GPU, and what the server would decide if it were so."""

import pytest

from sgl_blend.fusion.plan import LayerSplit
from sgl_blend.policies import POLICIES
from sgl_blend.tuning.cost_model import ROWS, CostModel, Times
from tools.time_model import (
    FA3_FLOP_PER_S,
    H200,
    KV_ROW_BYTES,
    PROMPTS,
    Device,
    Prompt,
    estimate,
    linear_s,
    scattered_attention_s,
)

LAYERS = LayerSplit(check=2, total=32)
H200_FA3 = Device(**{**vars(H200), "stock_flop_per_s": FA3_FLOP_PER_S})


LINEAR_MS = {384: 0.313, 448: 0.348, 512: 0.370, 1024: 0.650, 2624: 1.72, 8192: 4.98}


@pytest.mark.parametrize(("rows", "ms"), [*LINEAR_MS.items()], ids=str)
def test_linear_work_goes_in_waves_of_tiles(rows: int, ms: float) -> None:
    assert linear_s(H200, rows) * 1e3 == pytest.approx(ms, rel=0.005)
    assert linear_s(H200, rows) >= rows / 8192 * linear_s(H200, 8192)


@pytest.mark.parametrize(
    ("prompt", "stock_ms", "blended_ms", "ceiling", "with_fa3"),
    [
        (PROMPTS[0], 86.5, 24.2, 4.81, 3.5),
        (PROMPTS[1], 511, 131, 4.41, 3.6),
        (PROMPTS[2], 1363, 347, 4.39, 3.4),
    ],
    ids=["3.2k", "16k", "32k"],
)
def test_the_estimates_of_whole_prompts(
    prompt: Prompt, stock_ms: float, blended_ms: float, ceiling: float, with_fa3: float
) -> None:
    found = estimate(H200, prompt)
    assert found.stock * 1e3 == pytest.approx(stock_ms, rel=0.005)
    assert found.blended * 1e3 == pytest.approx(blended_ms, rel=0.005)
    assert found.ceiling == pytest.approx(ceiling, abs=0.01)
    parts = found.full + found.check + sum(found.shrunk)
    assert parts < found.blended < parts + 8e-3, "fixed costs and the copy are what is left"
    assert estimate(H200_FA3, prompt).speedup == pytest.approx(with_fa3, abs=0.06)


def test_a_funnel_saves_some_of_the_full_layers_and_nothing_else() -> None:
    share = POLICIES["funnel"].early_share
    for prompt in PROMPTS:
        every, few = estimate(H200, prompt), estimate(H200, prompt, early_share=share)
        assert estimate(H200, prompt, early_share=1.0).ceiling == every.ceiling
        assert 0.35 * every.full < few.full < 0.75 * every.full
        assert (few.shrunk, few.copy, few.stock) == (every.shrunk, every.copy, every.stock)
        assert every.blended - few.blended > 0.8 * (every.full - few.full)
        assert few.ceiling > 1.15 * every.ceiling


def estimated_times(device: Device) -> Times:
    """Return what a server on such a device would measure at its start."""
    copies = (10e-6 + 4 * KV_ROW_BYTES * rows / (0.8 * device.bytes_per_s) for rows in ROWS)
    return Times(
        layer=tuple(linear_s(device, rows) for rows in ROWS),
        copy=tuple(copies),
        select=tuple(60e-6 + 12e-9 * rows for rows in ROWS),
        attend=0.3e-3,
        attend_layer=scattered_attention_s(device, range(8)),
    )


def test_on_such_a_gpu_the_server_blends_from_some_hundred_rows_on() -> None:
    model = CostModel(estimated_times(H200), LAYERS)

    # A product of 32 rows takes as long as one of 128: the weights have to be read.
    assert model.saves_s(128, 96, 81) < 0
    assert model.least_rows(0.15) == 256
    (paper, *_) = PROMPTS
    rows = paper.tokens - paper.system - paper.chunk
    reused = rows - paper.question
    dropped = int(0.85 * reused)
    saved = model.saves_s(rows, reused, dropped)
    found = estimate(H200, paper)
    # What is left out here, attention above all, makes a plan better than it looks.
    assert 0.5 * (found.stock - found.blended) < saved < found.stock - found.blended
    early = model.saves_s(rows, reused, dropped, num_dropped_early=dropped)
    assert early - saved == pytest.approx(3 * (1.72e-3 - 0.348e-3), rel=0.1)

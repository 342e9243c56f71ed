"""What the benchmarks make of replies: figures, knees and reports."""

import itertools
import json
import math
import random
import statistics
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.commands.bench.client import Reply
from sgl_blend.commands.bench.knees import (
    Load,
    Point,
    conclude,
    find_ceiling,
    find_knee,
    find_rate_at,
    next_rate,
)
from sgl_blend.commands.bench.report import Circumstances, TtftReport, errors, make_ttft_table
from sgl_blend.commands.bench.throughput import draw_arrivals
from sgl_blend.commands.bench.ttft import TtftRow, find_shortfall, summarise
from sgl_blend.commands.common.bootstrap import mean_interval, median_interval
from sgl_blend.commands.common.records import describe_machine, to_json, without_folders
from sgl_blend.fusion.plan import LayerSplit

# --- figures of ttft ----------------------------------------------------------------------------


def make_reply(ttft_s: float, *, kept: int, reused: int, layers: LayerSplit | None) -> Reply:
    """Make the reply to a prompt of 20 exact tokens, and kept and reused ones after them."""
    if layers is None:
        return Reply(ttft_s, 0.0, 100, 20, {})
    report = {
        "prompt_tokens": 20 + kept + reused,
        "prefix_tokens": 20,
        "reused_tokens": reused,
        "recomputed_tokens": kept - 10,
        "computed_tokens": 10,
        "layer_rows": (layers.check + 1) * (kept + reused) + layers.above * kept,
        "fallback": None,
    }
    return Reply(ttft_s, 0.0, 100, 20, report)


@pytest.mark.parametrize(("kept", "reused"), [(10, 90), (25, 75), (100, 0)])
def test_the_ceiling_is_that_of_linear_work(kept: int, reused: int) -> None:
    layers = LayerSplit(check=2, total=32)
    stock = [[make_reply(1.0, kept=kept, reused=reused, layers=None)]]
    blended = [[make_reply(0.5, kept=kept, reused=reused, layers=layers)]]
    found = summarise(stock, blended, num_layers=32, seed=0)
    share = kept / (kept + reused)
    assert found.ceiling == pytest.approx(32 / (3 + 29 * share))
    assert found.ceiling_share == pytest.approx(2.0 / found.ceiling)
    assert found.reused_share == pytest.approx(reused / (120))


def test_the_speed_up_is_taken_repeat_by_repeat() -> None:
    def replies(*times: float) -> list[list[Reply]]:
        layers = LayerSplit(check=1, total=4)
        return [[make_reply(t, kept=20, reused=80, layers=layers)] for t in times]

    # The machine slows down threefold in the middle; both servers feel it.
    found = summarise(replies(1.0, 3.0, 1.1), replies(0.5, 1.5, 0.5), num_layers=4, seed=0)
    assert found.speedup == pytest.approx(2.0)
    assert found.speedup_ci95 == pytest.approx((2.0, 2.2))
    assert found.stock_ttfts_s == [[1.0], [3.0], [1.1]]


def test_in_a_batch_the_median_request_counts() -> None:
    layers = LayerSplit(check=1, total=4)
    batch = [make_reply(t, kept=20, reused=80, layers=layers) for t in (1.0, 2.0, 9.0)]
    found = summarise([batch], [batch], num_layers=4, seed=0)
    assert found.stock_ttft_s == 2.0
    assert found.speedup == 1.0


def test_a_request_that_found_less_than_planned_is_named() -> None:
    layers = LayerSplit(check=1, total=4)
    reply = make_reply(1.0, kept=20, reused=80, layers=layers)
    assert find_shortfall(110, reply) is None
    assert find_shortfall(111, reply) == "a request found 110 of 111 tokens stored"
    reply.report["fallback"] = "no_hit"
    reply.report["fallback_message"] = "no chunk of the prompt is stored"
    assert find_shortfall(110, reply) == (
        "a request was not blended: no chunk of the prompt is stored"
    )


def test_the_interval_of_a_median_is_not_that_of_the_mean() -> None:
    values = [1.0] * 20 + [100.0]
    assert median_interval(values, 0) == (1.0, 1.0)
    assert mean_interval(values, 0)[1] > 5.0


# --- throughput ---------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process_and_the_same_for_the_same_seed() -> None:
    arrivals = draw_arrivals(50.0, 100.0, random.Random(1))
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert arrivals == draw_arrivals(50.0, 100.0, random.Random(1))
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < 100.0
    # Five standard deviations of the count; gaps of an exponential vary as much as their mean.
    assert abs(len(arrivals) - 5000) < 5 * math.sqrt(5000)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)


def test_a_block_is_never_empty() -> None:
    for seed in range(20):
        (arrival,) = draw_arrivals(1e-6, 2.0, random.Random(seed))
        assert 0 <= arrival < 2.0


def make_load(p50_s: float, rows: float = 100.0) -> Load:
    return Load(
        requests=1,
        ttft_p50_s=p50_s,
        ttft_p50_ci95=(p50_s, p50_s),
        ttft_p90_s=p50_s,
        completed_rate=1.0,
        reused_share=0.5,
        computed_rows=rows,
        fallbacks={},
    )


def make_points(stock: list[float], blend: list[float]) -> list[Point]:
    """Make points at the rates 1, 2, 4, …; a shorter list ends where its server was too slow."""
    loads = itertools.zip_longest(*(map(make_load, times) for times in (stock, blend)))
    return [Point(rate=2.0**i, stock=one, blend=other) for i, (one, other) in enumerate(loads)]


def test_the_knee_is_the_last_rate_before_the_first_that_is_too_slow() -> None:
    points = make_points([0.1, 0.2, 0.9, 0.2], [0.1, 0.1, 0.2, 0.3])
    assert find_knee(points, "stock", 0.3) == 2.0
    assert find_knee(points, "blend", 0.3) == 8.0
    assert find_knee(points, "stock", 0.05) is None


def test_the_rate_at_a_bound_lies_between_the_measured_ones() -> None:
    points = make_points([0.1, 0.2, 0.6], [0.1, 0.1, 0.1])
    assert find_rate_at(points, "stock", 0.3) == pytest.approx(2.0 + 2.0 * 0.25)
    assert find_rate_at(points, "blend", 0.3) is None
    assert find_rate_at(points, "stock", 0.05) is None


def test_the_ceiling_is_that_of_requests_that_both_servers_saw() -> None:
    points = [
        Point(rate=1.0, stock=make_load(0.1, 900.0), blend=make_load(0.1, 300.0)),
        Point(rate=2.0, stock=make_load(0.2, 700.0), blend=make_load(0.1, 100.0)),
        Point(rate=4.0, stock=None, blend=make_load(0.1, 1.0)),
    ]
    assert find_ceiling(points) == pytest.approx(1600 / 400)
    assert find_ceiling(points[2:]) is None


def test_the_gain_compares_rates_at_the_same_ttft() -> None:
    points = make_points([0.1, 0.5], [0.05, 0.1, 0.3, 0.5])
    outcome = conclude(points[::-1], {"stock": 0.1, "blend": 0.04}, slo=3.0)
    assert outcome.bound_s == pytest.approx(0.3)
    assert [point.rate for point in outcome.points] == [1.0, 2.0, 4.0, 8.0]
    assert outcome.knees == {"stock": 1.0, "blend": 4.0}
    assert outcome.gain == pytest.approx(outcome.rates_at_bound["blend"] / 1.5)  # type: ignore[operator]


@given(limit=st.floats(0.01, 1000), first=st.floats(0.1, 10))
def test_rates_close_in_on_what_a_server_can_do(limit: float, first: float) -> None:
    within: dict[float, bool] = {}
    while (rate := next_rate(within, first)) is not None:
        assert rate not in within
        within[rate] = rate <= limit
    fast = max(rate for rate, ok in within.items() if ok)
    slow = min(rate for rate, ok in within.items() if not ok)
    assert fast <= limit < slow <= 1.25 * fast


# --- reports ------------------------------------------------------------------------------------


def make_report(**changes: Any) -> TtftReport:
    circumstances = Circumstances(
        command="sgl-blend bench ttft --shape tiny",
        date="2026-01-01T00:00:00+00:00",
        model="tiny",
        versions={"sglang": "0.5.21"},
        commit=None,
        machine=describe_machine(),
        servers={"stock": "a", "blend": "b"},
        num_tokens=1000,
    )
    layers = LayerSplit(check=1, total=4)
    replies = [[make_reply(1.0, kept=20, reused=80, layers=layers)]]
    row = {
        "case": "600 tokens",
        "prompt_tokens": 600,
        "num_chunks": 4,
        "chunk_tokens": 136,
        "nominal_chunk_tokens": 128,
        "batch": 1,
        "ratio": 0.15,
        "policy": "hkvd",
        "figures": msgspec.to_builtins(summarise(replies, replies, num_layers=4, seed=0)),
        "error": None,
        **changes,
    }
    return TtftReport(
        circumstances=circumstances,
        repeats=1,
        seed=0,
        rows=msgspec.convert([row], list[TtftRow]),
    )


def test_the_json_holds_what_the_report_holds() -> None:
    report = make_report()
    assert msgspec.json.decode(to_json(report), type=TtftReport) == report
    assert json.loads(to_json(report))["rows"][0]["figures"]["speedup"] == 1.0


def test_a_row_without_figures_says_why() -> None:
    report = make_report(figures=None, error="a request found 1 of 2 tokens stored")
    assert errors(report) == [
        "600 tokens, 4 x 136, batch 1, hkvd, ratio 0.15: a request found 1 of 2 tokens stored"
    ]
    assert make_ttft_table(report).row_count == 1
    assert errors(make_report()) == []


def test_recorded_command_lines_hold_no_folders() -> None:
    words = ["--json", "/where/a/b.json", "--json=/where/b.json", "--lengths", "3k", "a/b.json"]
    assert [without_folders(word) for word in words] == [
        *("--json", "b.json", "--json=b.json", "--lengths", "3k", "a/b.json"),
    ]

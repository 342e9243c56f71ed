"""The benchmarks: what they send, what they make of it, and both through real servers."""

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked import run_program
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.commands.bench.cases import PAPER, make_case, make_cases
from sgl_blend.commands.bench.client import Reply
from sgl_blend.commands.bench.prompts import Library, to_body
from sgl_blend.commands.bench.report import (
    Circumstances,
    TtftReport,
    errors,
    make_ttft_table,
)
from sgl_blend.commands.bench.shapes import SHAPES, read_shape, write_shape
from sgl_blend.commands.bench.throughput import (
    Load,
    Point,
    conclude,
    draw_arrivals,
    find_knee,
    find_rate_at,
    next_rate,
)
from sgl_blend.commands.bench.ttft import TtftRow, find_shortfall, summarise
from sgl_blend.commands.cli import main
from sgl_blend.commands.common.bootstrap import mean_interval, median_interval
from sgl_blend.commands.common.records import describe_machine, to_json, without_folders
from sgl_blend.fusion.plan import LayerSplit

LIMIT = {"system_tokens": 20, "question_tokens": 10}


def make_library(num_documents: int = 5, seed: int = 0) -> Library:
    return Library(
        random.Random(seed), 1000, system_tokens=20, chunk_tokens=40, num_documents=num_documents
    )


# --- prompts ------------------------------------------------------------------------------------


def test_prompts_share_system_prompt_and_documents_but_no_question() -> None:
    library = make_library()
    one, other = library.prompt([0, 1, 2], 10), library.prompt([2, 0, 1], 10)
    assert one.spans == [20, 60, 60, 100, 100, 140]
    assert one.num_reusable == 140
    assert one.token_ids[:20] == other.token_ids[:20]
    assert one.token_ids[20:60] == other.token_ids[60:100]
    assert one.token_ids[140:] != other.token_ids[140:]
    assert len(one.token_ids) == 150
    assert all(100 <= token < 900 for token in one.token_ids)


def test_an_order_begins_with_the_document_that_is_asked_for() -> None:
    library = make_library()
    for first in range(5):
        order = library.order(3, first)
        assert order[0] == first
        assert len(set(order)) == 3


def test_introductions_show_every_document() -> None:
    library = make_library(5)
    shown = [
        tuple(prompt.token_ids[start:stop])
        for prompt in library.introductions(3, 10)
        for start, stop in zip(prompt.spans[0::2], prompt.spans[1::2], strict=True)
    ]
    assert len(set(shown)) == 5


def test_a_stock_server_is_told_nothing_of_chunks() -> None:
    prompt = make_library().prompt([0, 1], 10)
    plain = json.loads(to_body(prompt, None, 3))
    marked = json.loads(to_body(prompt, {"sgl_blend_ratio": 0.3}, 3))
    assert plain["input_ids"] == marked["input_ids"] == prompt.token_ids
    assert "custom_params" not in plain["sampling_params"]
    assert marked["sampling_params"]["custom_params"] == {
        "sgl_blend_ratio": 0.3,
        "sgl_blend_spans": prompt.spans,
    }
    assert plain["sampling_params"]["max_new_tokens"] == 3


@given(length=st.integers(400, 40_000), chunk=st.integers(32, 150))
def test_a_case_has_the_length_that_is_asked_for(length: int, chunk: int) -> None:
    case = make_case(length, chunk, 1, **LIMIT)
    assert case.prompt_tokens == length
    assert case.num_chunks >= 2
    assert chunk * 2 / 3 <= case.chunk_tokens <= chunk * 4 / 3
    assert case.question_tokens >= 10


def test_the_papers_setting_is_one_case_per_batch() -> None:
    cases = make_cases([PAPER, 3000], [256, 512], [1, 8], **LIMIT)
    paper = [case for case in cases if "paper" in case.name]
    assert len(cases) == 2 + 4
    assert [(case.num_chunks, case.chunk_tokens, case.batch) for case in paper] == [
        (6, 512, 1),
        (6, 512, 8),
    ]


def test_there_are_documents_for_every_prompt_of_a_batch_to_begin_with() -> None:
    assert make_case(1000, 256, 8, **LIMIT).num_documents == 8
    assert make_case(40_000, 64, 1, **LIMIT).num_documents >= 600


def test_a_renewed_library_keeps_its_system_prompt_alone() -> None:
    library = make_library()
    before = library.prompt([0], 10)
    library.renew()
    after = library.prompt([0], 10)
    assert before.token_ids[:20] == after.token_ids[:20]
    assert before.token_ids[20:60] != after.token_ids[20:60]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_model_that_transformers_reads(name: str, tmp_path: Path) -> None:
    shape = read_shape(write_shape(name, tmp_path))
    assert shape.num_layers == SHAPES[name]["num_hidden_layers"]
    assert shape.vocab_size == SHAPES[name]["vocab_size"]
    assert shape.num_positions == SHAPES[name]["max_position_embeddings"]


# --- figures of ttft ----------------------------------------------------------------------------


def make_reply(ttft_s: float, *, kept: int, reused: int, layers: LayerSplit | None) -> Reply:
    """Make the reply to a prompt of 20 exact tokens, and kept and reused ones behind them."""
    if layers is None:
        return Reply(ttft_s, 0.0, 20, {})
    report = {
        "prompt_tokens": 20 + kept + reused,
        "prefix_tokens": 20,
        "reused_tokens": reused,
        "recomputed_tokens": kept - 10,
        "computed_tokens": 10,
        "layer_rows": (layers.check + 1) * (kept + reused) + layers.above * kept,
        "fallback": None,
    }
    return Reply(ttft_s, 0.0, 20, report)


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


def make_load(p50_s: float) -> Load:
    return Load(
        requests=1,
        ttft_p50_s=p50_s,
        ttft_p50_ci95=(p50_s, p50_s),
        ttft_p90_s=p50_s,
        completed_rate=1.0,
        reused_share=0.5,
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
        "600 tokens, 4 x 136, batch 1, ratio 0.15: a request found 1 of 2 tokens stored"
    ]
    assert make_ttft_table(report).row_count == 1
    assert errors(make_report()) == []


def test_recorded_command_lines_hold_no_folders() -> None:
    words = ["--json", "/where/a/b.json", "--json=/where/b.json", "--lengths", "3k", "a/b.json"]
    assert [without_folders(word) for word in words] == [
        *("--json", "b.json", "--json=b.json", "--lengths", "3k", "a/b.json"),
    ]


# --- the command line ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    "ratio": (["ttft", "--ratios", "0,2"], "--ratios must be a number in [0, 1], got 2.0"),
    "repeats": (["ttft", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    "batch": (["ttft", "--batches", "1,0"], "--batches must be at least 1, got 0"),
    "chunk": (["ttft", "--chunk-tokens", "8"], "--chunk-tokens must be at least 32, got 8"),
    "short": (["ttft", "--lengths", "500"], "a prompt of 500 tokens must have room for 2 chunks"),
    "long": (["ttft", "--lengths", "200k"], "must fit the model's 131072 positions, got 200001"),
    "policy": (["ttft", "--policy", "best"], "--policy must be one of hkvd, "),
    "oracle": (["ttft", "--policy", "oracle"], "needs a server that was started with --blend-eval"),
    "folder": (["ttft", "--json", "no/such/out.json"], "no/such is not a folder"),
    "rate": (["throughput", "--rates", "1,0"], "--rates must be a positive number, got 0.0"),
    "not a number": (["throughput", "--slo", "nan"], "--slo must be at least 1, got nan"),
    "seconds": (["throughput", "--seconds", "0"], "--seconds must be a positive number, got 0.0"),
    "documents": (["throughput", "--documents", "5"], "--documents must be at least 6, got 5"),
    "one ratio": (["throughput", "--ratio", "-1"], "--ratio must be a number in [0, 1], got -1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_one_sentence(capsys: pytest.CaptureFixture[str], name: str) -> None:
    (what, *arguments), sentence = REFUSED[name]
    assert main(["bench", what, "--shape", "tiny", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("sgl-blend: ")
    assert sentence in captured.err


@pytest.mark.parametrize("package", ["httpx", "rich", "matplotlib"])
def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["bench", "ttft", "--shape", "tiny", "--plot", "a.png"]) == 2
    assert capsys.readouterr().err == (
        f"sgl-blend: sgl-blend bench needs {package}; install them with "
        "`pip install 'sgl-blend[bench,sglang]'`\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "long"], ["--batches", "1.5"], ["--shape", "gpt-2"], ["--server-arg=--tp=2"]],
    ids=" ".join,
)
def test_what_argparse_refuses_has_the_same_status(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "ttft", "--shape", "tiny", *arguments])
    assert stopped.value.code == 2
    flag, _, _ = arguments[0].partition("=")
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize("what", ["ttft", "throughput"])
def test_the_help_needs_none_of_the_packages(what: str) -> None:
    program = (
        "import sys\n"
        "for name in ('rich', 'httpx', 'matplotlib', 'sglang', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from sgl_blend.commands.cli import main\n"
        f"main(['bench', '{what}', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--work-folder" in done.stdout


# --- real servers -------------------------------------------------------------------------------


def run_bench(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark of the tiny shape and return its JSON, and what it printed beside it."""
    command = [sys.executable, "-m", "sgl_blend", "bench", arguments[0], "--shape", "tiny"]
    done = run_program(
        [*command, *arguments[1:], "--json", str(folder / "out.json"), "--plot", "out.png"],
        folder,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "out.json").read_text()
    assert os.sep + "tmp" not in text
    assert str(folder) not in text
    report: dict[str, Any] = json.loads(text)
    found = report["circumstances"]
    assert found["command"].startswith(f"sgl-blend bench {arguments[0]} --shape tiny")
    assert {"sgl-blend", "sglang", "torch"} <= found["versions"].keys()
    assert "--enable-blend" not in found["servers"]["stock"]
    assert "--enable-blend --blend-when always" in found["servers"]["blend"]
    return {**report, "printed": done.stdout}


@pytest.mark.engine
def test_ttft_end_to_end(tmp_path: Path) -> None:
    report = run_bench(
        tmp_path,
        *("ttft", "--lengths", "800", "--chunk-tokens", "128", "--batches", "1,2"),
        *("--ratios", "0,0.5,1", "--repeats", "2"),
    )
    assert [(row["batch"], row["ratio"]) for row in report["rows"]] == [
        *((1, 0.0), (1, 0.5), (1, 1.0), (2, 0.0), (2, 0.5), (2, 1.0)),
    ]
    for row in report["rows"]:
        assert row["error"] is None
        found = row["figures"]
        num_chunks, chunk_tokens = row["num_chunks"], row["chunk_tokens"]
        assert (row["prompt_tokens"], num_chunks) == (800, 5)
        # Stock finds the system prompt alone; behind it the blending server's first chunk is exact.
        assert found["stock_prefix_tokens"] == 128
        assert found["tokens"]["prefix_tokens"] == 128 + chunk_tokens
        others = (num_chunks - 1) * chunk_tokens
        reused = others - math.ceil(row["ratio"] * others)
        assert found["tokens"]["reused_tokens"] == reused
        assert found["reused_share"] == pytest.approx(reused / 800)
        rows, kept = 800 - 128 - chunk_tokens, 800 - 128 - chunk_tokens - reused
        assert found["ceiling"] == pytest.approx((800 - 128) * 8 / (3 * rows + 5 * kept))
        for name in ("stock", "blended"):
            times = found[f"{name}_ttfts_s"]
            assert [len(batch) for batch in times] == [row["batch"]] * 2
            assert found[f"{name}_ttft_s"] == statistics.median(map(statistics.median, times))
        low, high = found["speedup_ci95"]
        assert 0 < low <= found["speedup"] <= high
    # A title may break anywhere.
    assert "--blend-when always" in " ".join(report["printed"].split())


@pytest.mark.engine
def test_throughput_end_to_end(tmp_path: Path) -> None:
    report = run_bench(
        tmp_path,
        *("throughput", "--rates", "1,8", "--seconds", "2", "--blocks", "2", "--documents", "6"),
        *("--chunks", "4", "--chunk-tokens", "128", "--output-tokens", "2"),
    )
    outcome = report["outcome"]
    assert outcome["bound_s"] == pytest.approx(3 * outcome["idle_ttft_s"]["stock"])
    assert [point["rate"] for point in outcome["points"]] == [1.0, 8.0]
    for point in outcome["points"]:
        stock, blend = point["stock"], point["blend"]
        assert stock["requests"] == blend["requests"] >= 2
        assert stock["reused_share"] == 0.0
        for load in (stock, blend):
            assert 0 < load["ttft_p50_s"] <= load["ttft_p90_s"]
            assert load["completed_rate"] > 0
    assert max(point["blend"]["reused_share"] for point in outcome["points"]) > 0.1
    (sentence,) = [line for line in report["printed"].splitlines() if line.startswith("Idle")]
    assert "gain in throughput at equal TTFT" in sentence

"""The benchmarks: what they send, what they make of it, and both through real servers."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_program
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.commands.bench.cases import PAPER, make_case, make_cases
from sgl_blend.commands.bench.prompts import Library, to_body
from sgl_blend.commands.bench.shapes import SHAPES, read_shape, write_shape
from sgl_blend.commands.cli import main

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


# --- the command line ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    "ratio": (["ttft", "--ratios", "0,2"], "--ratios must be a number in [0, 1], got 2.0"),
    "repeats": (["ttft", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    "batch": (["ttft", "--batches", "1,0"], "--batches must be at least 1, got 0"),
    "chunk": (["ttft", "--chunk-tokens", "8"], "--chunk-tokens must be at least 32, got 8"),
    "short": (["ttft", "--lengths", "500"], "a prompt of 500 tokens must have room for 2 chunks"),
    "long": (["ttft", "--lengths", "200k"], "must fit the model's 131072 positions, got 200001"),
    "policy": (["ttft", "--policies", "best"], "--policies must be one of hkvd, "),
    "oracle": (
        ["ttft", "--policies", "hkvd,oracle"],
        "needs a server that was started with --blend-eval",
    ),
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


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.engine
def test_ttft_end_to_end(tmp_path: Path) -> None:
    report = run_bench(
        tmp_path,
        *("ttft", "--lengths", "800", "--chunk-tokens", "128", "--batches", "1,2"),
        *("--ratios", "0,0.5,1", "--repeats", "2", "--policies", "hkvd,remembered"),
    )
    assert [(row["batch"], row["policy"], row["ratio"]) for row in report["rows"]] == [
        (batch, policy, ratio)
        for batch in (1, 2)
        for policy in ("hkvd", "remembered")
        for ratio in (0.0, 0.5, 1.0)
    ]
    for row in report["rows"]:
        assert row["error"] is None
        found = row["figures"]
        num_chunks, chunk_tokens = row["num_chunks"], row["chunk_tokens"]
        assert (row["prompt_tokens"], num_chunks) == (800, 5)
        # Stock finds the system prompt alone; after it the blending server's first chunk is exact.
        assert found["stock_prefix_tokens"] == 128
        assert found["tokens"]["prefix_tokens"] == 128 + chunk_tokens
        others = (num_chunks - 1) * chunk_tokens
        reused = others - math.ceil(row["ratio"] * others)
        assert found["tokens"]["reused_tokens"] == reused
        assert found["reused_share"] == pytest.approx(reused / 800)
        rows, kept = 800 - 128 - chunk_tokens, 800 - 128 - chunk_tokens - reused
        # Documents are probed before requests are measured that drop rows by what is remembered.
        full = 0 if row["policy"] == "remembered" else 3
        layer_rows = full * rows + (8 - full) * kept
        assert found["ceiling"] == pytest.approx((800 - 128) * 8 / layer_rows)
        for name in ("stock", "blended"):
            times = found[f"{name}_ttfts_s"]
            assert [len(batch) for batch in times] == [row["batch"]] * 2
            assert found[f"{name}_ttft_s"] == statistics.median(map(statistics.median, times))
        low, high = found["speedup_ci95"]
        assert 0 < low <= found["speedup"] <= high
    # A title may break anywhere.
    assert "--blend-when always" in " ".join(report["printed"].split())


@pytest.mark.slow  # .ci/run runs it
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
    assert report["client_rate"] > 8
    assert "The client alone sends and reads" in report["printed"]

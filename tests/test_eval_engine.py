"""The evaluation through the real engine: one command line, and answers that stand alone."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_program
from tiny_models import make_text_model

pytestmark = pytest.mark.engine

NUM_ITEMS = 8
WAYS = {("hkvd", 0.3), ("hkvd", 1.0), ("random", 0.3), ("random", 1.0), ("none", 0.0), ("all", 1.0)}
NOISE = 1e-6
"""Nats between two full prefills in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model("llama", tmp_path_factory.mktemp("eval-model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["harbour", "copper", "grass", "roof", "sea", "layer", "green", "swims", "dredged"]
    lines = [
        {
            "system": "You answer from the documents.\n",
            "chunks": [" ".join(draw.choices(words, k=draw.randint(7, 12))) for _ in range(3)],
            "question": f"Which {draw.choice(words)}?",
            "answers": [draw.choice(words)],
            "kind": "odd" if number % 2 else "even",
        }
        for number in range(NUM_ITEMS)
    ]
    path = tmp_path_factory.mktemp("eval-data") / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def written(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command wrote, and beside it what it printed and where it drew."""
    folder = tmp_path_factory.mktemp("eval-out")
    done = run_program(
        [
            *(sys.executable, "-m", "sgl_blend", "eval", "--model-path", str(model)),
            *("--data", str(data), "--policies", "hkvd,random,none,all", "--ratios", "0.3,1"),
            *("--check-layers", "1,2", "--max-new-tokens", "3", "--json", "out.json"),
            *("--plot", "out.png", "--engine-arg", "max_total_tokens=8000"),
        ],
        folder,
        timeout_s=400,
        OMP_NUM_THREADS="1",  # the matrices are tiny; threads would only wait for each other
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return {**report, "printed": done.stdout, "folder": folder, "stderr": done.stderr}


def test_every_way_has_a_row_after_full_prefill(written: dict[str, Any]) -> None:
    full, *rows = written["rows"]
    assert full["policy"] == "full"
    assert (full["recomputed_share"], full["layer_rows_share"]) == (1.0, 1.0)
    assert [row["check_layer"] for row in rows] == [1] * len(WAYS) + [2] * len(WAYS)
    for check_layer in (1, 2):
        found = {(r["policy"], r["ratio"]) for r in rows if r["check_layer"] == check_layer}
        assert found == WAYS
    assert {row["build_prefix"] for row in rows} == {"first"}
    assert {row["n"] for row in written["rows"]} == {NUM_ITEMS}


def test_the_figures_are_within_their_bounds(written: dict[str, Any]) -> None:
    for row in written["rows"]:
        for name in ("accuracy", "f1", "rouge_l", "top1", "recomputed_share", "layer_rows_share"):
            assert 0.0 <= row[name] <= 1.0, (name, row)
        assert row["kl"] >= 0.0
        for mean, interval in (("accuracy", "ci95"), ("f1", "f1_ci95"), ("kl", "kl_ci95")):
            low, high = row[interval]
            assert low <= row[mean] <= high
        assert row["by_kind"].keys() == {"even", "odd"}
        assert row["fallbacks"] == 0
        tokens = row["tokens"]
        assert tokens["prompt"] == sum(tokens.values()) - tokens["prompt"]


def test_recomputing_everything_is_full_prefill(written: dict[str, Any]) -> None:
    everything = [row for row in written["rows"] if row["ratio"] == 1.0]
    assert len(everything) == 1 + 2 * 3
    for row in everything:
        assert row["kl"] <= NOISE, row
        assert row["top1"] == 1.0
        assert row["recomputed_share"] == 1.0
        assert row["layer_rows_share"] == pytest.approx(1.0)
        assert row["accuracy_diff_ci95"] == [0.0, 0.0]


def test_recomputing_nothing_differs_and_costs_least(written: dict[str, Any]) -> None:
    for check_layer in (1, 2):
        rows = [row for row in written["rows"] if row["check_layer"] == check_layer]
        cost = {(row["policy"], row["ratio"]): row["layer_rows_share"] for row in rows}
        (none,) = (row for row in rows if row["policy"] == "none")
        assert none["kl"] > 1000 * NOISE
        assert none["recomputed_share"] == 0.0
        assert min(cost.values()) == cost["none", 0.0]
        assert cost["none", 0.0] < cost["hkvd", 0.3] < cost["hkvd", 1.0]
        # All layers up to the check layer are computed, of 4.
        assert cost["none", 0.0] > (check_layer + 1) / 4


def test_the_report_says_what_was_run(written: dict[str, Any], data: Path) -> None:
    import hashlib

    assert written["command"].startswith("sgl-blend eval --model-path ")
    assert str(data.parent) not in written["command"] + written["model"]
    assert written["data"]["file"] == "items.jsonl"
    assert written["data"]["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()


def test_the_table_is_printed_and_the_plot_drawn(written: dict[str, Any]) -> None:
    printed = [line.split()[:1] for line in written["printed"].splitlines()]
    printed = printed[printed.index(["policy"]) :]  # after the title, which may break anywhere
    assert printed.count(["hkvd"]) == 4
    assert printed.count(["full"]) == 1
    assert (written["folder"] / "out.png").read_bytes().startswith(b"\x89PNG")


BATCHES_PROGRAM = """
import json, sys
from pathlib import Path
from sgl_blend.commands.evaluation.converters import read_items
from sgl_blend.commands.evaluation.prompts import Templates, load_encoder, make_prompt
from sgl_blend.commands.evaluation.runner import BlendEngine

def ask(engine, prompts, full):
    ids = [answer.first.token_ids for answer in full]
    return engine.ask(prompts, "hkvd", [0.3] * len(prompts), max_new_tokens=3, reference_ids=ids)

def figures(answers):
    return [(a.text, list(a.first.token_ids), list(a.first.logprobs), a.report) for a in answers]

if __name__ == "__main__":
    model, data = sys.argv[1:]
    encode = load_encoder(model)
    prompts = [make_prompt(item, Templates(), encode) for item in read_items(Path(data))]
    args = {"max_total_tokens": 8000}
    with BlendEngine(model, check_layer=1, build_prefix="bos", engine_args=args) as engine:
        full = engine.ask_full(prompts, max_new_tokens=3, num_top=10)
        together = ask(engine, prompts, full)
        alone = [ask(engine, [p], [f])[0] for p, f in zip(prompts, full)]
        info = engine.server_info()
    print("FOUND", json.dumps([figures(full), figures(together), figures(alone), info]))
"""


def test_an_answer_does_not_depend_on_its_batch(model: Path, data: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BATCHES_PROGRAM)
    command = [sys.executable, str(program), str(model), str(data)]
    done = run_program(command, tmp_path, OMP_NUM_THREADS="1")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    full, together, alone, info = json.loads(lines[0].removeprefix("FOUND "))

    assert info["blend_build_prefix"] == "bos"
    for (_, likely, logprobs, report), one, other in zip(full, together, alone, strict=True):
        assert logprobs == sorted(logprobs, reverse=True)
        assert report["fallback"] == "disabled"
        assert one[1] == other[1] == likely
        assert one[0] == other[0]
        assert one[3] == other[3]
        assert one[2] == pytest.approx(other[2], abs=1e-4)
        assert one[2] != pytest.approx(logprobs, abs=1e-2)

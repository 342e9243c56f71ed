"""``sgl-blend codec profile``: what it refuses, and a profile of the test model end to end."""

import json
from pathlib import Path

import pytest

from sgl_blend.commands.cli import main
from sgl_blend.commands.codec.profile import judge_level
from sgl_blend.storage.codec.levels import LevelFigures, read_profile

MODEL = Path(__file__).parents[1] / "examples" / "tinyrag" / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    from examples.tinyrag.held_out import write_items
    from examples.tinyrag.world import make_held_out

    path = tmp_path / "items.jsonl"
    write_items(path, make_held_out(11, 24))
    return path


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--levels", "q5"], "--levels: unknown level 'q5', expected q8, q4, q4-1.5, q4-2.0"),
        (["--max-loss", "1"], "--max-loss must be in [0, 1), got 1.0"),
        (["--max-loss", "-0.1"], "--max-loss must be in [0, 1), got -0.1"),
        (["--page-size", "8"], "--page-size must be at least 16, got 8"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--out", "no/such/folder/p"], "cannot write no/such/folder/p"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    command = ["codec", "profile", "--model-path", str(MODEL), "--data", str(data)]
    assert main([*command, "--out", str(data.parent / "p"), *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_profile_end_to_end(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = data.parent / "p", data.parent / "figures.json"
    command = ["codec", "profile", "--model-path", str(MODEL), "--data", str(data)]
    command += ["--out", str(out), "--json", str(figures), "--page-size", "16"]
    status = main([*command, "--levels", "q8,q4-2.0", "--max-loss", "0.1"])
    told = capsys.readouterr().out
    profile = read_profile(out)
    assert status == 0
    assert list(profile.levels) == ["q8", "q4-2.0"]
    found = json.loads(figures.read_text())
    assert [row["level"] for row in found["levels"]] == ["q8", "q4-2.0"]
    assert found["levels"][1]["bits"] < 2 < found["levels"][0]["bits"] < 8
    assert 0 < found["levels"][0]["kl"] < found["levels"][1]["kl"]
    assert "q4-2.0" in told
    assert profile.max_loss == 0.1
    assert profile.data == "items.jsonl"


@pytest.mark.parametrize(("wrong", "is_within"), [(0, True), (10, True), (11, False)])
def test_a_level_beyond_the_budget_is_left_out(wrong: int, is_within: bool) -> None:
    row = judge_level(
        "q4",
        LevelFigures([1, 0], 2.0, 0.0, 0.0, 0.0),
        [1.0] * 1000,
        [0.0] * wrong + [1.0] * (1000 - wrong),
        [0.1] * 1000,
        what="accuracy",
        max_loss=0.01,
    )
    assert row.is_within is is_within
    assert row.loss == pytest.approx(wrong / 1000)
    assert row.loss_ci95[0] <= row.loss <= row.loss_ci95[1]
    assert row.anchor_share == 0.5
    assert row.kl == pytest.approx(0.1)

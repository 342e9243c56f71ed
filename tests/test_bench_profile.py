"""``sgl-blend bench profile`` and ``bench kernels``."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_program

from sgl_blend.commands.bench.phase_times import add_up, read_trace
from sgl_blend.commands.cli import main
from sgl_blend.fusion.phases import Phase


def span(name: str, start: float, length: float, cat: str = "user_annotation") -> dict[str, Any]:
    where = {"pid": 1, "tid": 2 if cat == "user_annotation" else 7}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, **where}


def test_an_inner_phase_is_not_counted_in_the_outer_one() -> None:
    events = [
        span("sgl_blend.selection", 100, 10),  # begins with the one it lies in
        span("sgl_blend.check layer", 100, 50),
        span("sgl_blend.selection", 130, 5),
        span("sgl_blend.copy", 150, 7),
        span("aten::mm", 112, 3),
        span("sgl_blend.copy", 300, 9, "gpu_user_annotation"),
        span("sgl_blend.copy", 300, 9, "cpu_op"),
    ]
    found = add_up(events)
    assert found["host"] == pytest.approx({"check layer": 35e-6, "selection": 15e-6, "copy": 7e-6})
    assert found["device"] == pytest.approx({"copy": 9e-6})


def test_threads_do_not_lie_inside_each_other() -> None:
    other = {**span("sgl_blend.match", 10, 5), "tid": 99}
    found = add_up([span("sgl_blend.plan", 0, 100), other])
    assert found["host"] == pytest.approx({"plan": 100e-6, "match": 5e-6})


def test_a_trace_may_be_gzipped(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [span("sgl_blend.copy", 0, 1)], "other": 1}).encode()
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "b.json.gz")


def test_kernels_are_timed_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    command = ["bench", "kernels", "--device", "cpu", "--shapes", "tiny", "--json", str(out)]
    assert main([*command, "--plot", str(tmp_path / "kernels.png")]) == 0
    assert "copy_rotated_layers" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["circumstances"]["command"].startswith("sgl-blend bench kernels --device cpu")
    assert str(tmp_path) not in out.read_text()
    assert len(report["speeds"]["rows"]) == 7
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_shape_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", "--shapes", "huge"]) == 2
    assert capsys.readouterr().err.startswith("sgl-blend: bench kernels: shapes: expected some of")


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.engine
def test_profile_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sgl_blend", "bench", "profile", "--shape", "tiny"]
    sizes = ["--length", "800", "--chunk-tokens", "128", "--repeats", "2"]
    out = tmp_path / "out.json"
    done = run_program([*command, *sizes, "--json", str(out)], tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    phases = report["phases"]["host"]
    assert set(phases) == {str(phase) for phase in Phase}
    assert all(seconds > 0 for seconds in phases.values())
    # Nothing is counted twice. A lower bound would measure what else the machine does.
    assert sum(phases.values()) < report["traced_ttft_s"]
    assert "shrunk layers" in done.stdout

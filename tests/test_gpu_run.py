"""The first half hour on a GPU is planned so that its calls end in time."""

import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import head_dim_for, make_model

from tools.gpu_run import (
    CUDA_ENGINE,
    DEADLINE_S,
    GRACE_S,
    NO_BLEND_GRAPH,
    NO_PREFILL_GRAPH,
    Step,
    Steps,
    main,
    run,
    run_or_retry,
)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_the_limits_of_a_call_fit_its_deadline(call: int, tmp_path: Path) -> None:
    steps = Steps(tmp_path, tiny=False).of(call)

    assert DEADLINE_S == 540
    assert sum(step.limit_s for step in steps) + GRACE_S <= DEADLINE_S
    assert len({step.name for step in steps}) == len(steps)


def test_the_smoke_test_comes_first_and_the_tests_last(tmp_path: Path) -> None:
    steps = Steps(tmp_path, tiny=False).of(1)

    assert [step.name for step in steps] == [
        *("smoke", "gpu-first", "kernels", "verify-bf16", "no-sync", "law-l2", "kernel-tests"),
    ]
    for flag in (NO_PREFILL_GRAPH, NO_BLEND_GRAPH):
        assert flag in steps[0].command, "what may fail in a start is no part of it"


def test_graphs_are_captured_by_one_test_alone_before_they_are_timed(tmp_path: Path) -> None:
    engines = [step for call in (1, 2, 3) for step in Steps(tmp_path, tiny=False).of(call)]
    with_engine = [step for step in engines if step.environment]

    assert CUDA_ENGINE["blend_cuda_graph"] == "off"
    assert [step.name for step in with_engine] == ["no-sync", "law-l2", "graphs"]
    assert "captured_graphs" in with_engine[-1].command
    names = [step.name for step in engines]
    assert names.index("graphs") < names.index("ttft-paper")


def test_graphs_and_no_graphs_are_of_the_same_kernel(tmp_path: Path) -> None:
    timed = {step.name: step.command for step in Steps(tmp_path, tiny=False).of(2)}

    for name in ("ttft-paper", "ttft-no-graphs"):
        assert "--blend-arg=blend-attention=triton" in timed[name]
    assert NO_BLEND_GRAPH not in timed["ttft-paper"]
    assert NO_BLEND_GRAPH in timed["ttft-no-graphs"]


def test_what_is_tried_again_has_no_graphs(tmp_path: Path) -> None:
    (paper,) = [s for s in Steps(tmp_path, tiny=False).of(2) if s.name == "ttft-paper"]
    again = paper.without_graphs()

    assert again.command[-2:] == [NO_PREFILL_GRAPH, NO_BLEND_GRAPH]
    assert again.without_graphs().command == again.command


def test_every_policy_is_timed_with_the_same_servers(tmp_path: Path) -> None:
    (paper,) = [s for s in Steps(tmp_path, tiny=False).of(2) if s.name == "ttft-paper"]

    assert paper.command[paper.command.index("--policies") + 1] == "hkvd,funnel,remembered"
    assert paper.command[paper.command.index("--ratios") + 1] == "0,0.15"


def test_engines_on_a_gpu_get_models_that_take_the_path_of_served_ones(tmp_path: Path) -> None:
    assert (head_dim_for(CUDA_ENGINE), head_dim_for({"device": "cpu"})) == (64, 16)

    path = make_model("qwen2", tmp_path, head_dim=64)

    assert json.loads((path / "config.json").read_text())["head_dim"] == 64
    assert path != make_model("qwen2", tmp_path)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


GRAPHS_FAIL = f"import sys; print('try'); sys.exit({NO_PREFILL_GRAPH!r} not in sys.argv)"


def test_servers_that_fail_are_tried_once_more_without_graphs(tmp_path: Path) -> None:
    step = Step("one", python(GRAPHS_FAIL), 60.0, starts_servers=True)

    assert run_or_retry(step, tmp_path, time.monotonic() + 200) == (
        "ok without graphs, status 1 with"
    )
    assert (tmp_path / "one.log").read_text() == "try\ntry\n"


def test_a_status_that_is_expected_is_no_failure(tmp_path: Path) -> None:
    step = Step("one", python("import sys; sys.exit(3)"), 60.0, good=(0, 3))

    assert run_or_retry(step, tmp_path, time.monotonic() + 200) == "ok"
    assert run_or_retry(replace(step, good=(0,)), tmp_path, time.monotonic() + 200) == "status 3"


def test_what_starts_no_server_is_not_tried_again(tmp_path: Path) -> None:
    step = Step("one", python(GRAPHS_FAIL), 60.0)

    assert run_or_retry(step, tmp_path, time.monotonic() + 200) == "status 1"
    assert (tmp_path / "one.log").read_text() == "try\n"


def test_a_step_is_ended_at_its_limit_and_not_begun_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.gpu_run.LEAST_S", 0.5)
    step = Step("one", python("import time; time.sleep(60)"), 1.0, starts_servers=True)

    assert run_or_retry(step, tmp_path, time.monotonic() + 200) == "over 1 s"
    assert run_or_retry(step, tmp_path, time.monotonic() + GRACE_S) == "no time left"


def test_a_step_of_a_background_job_obeys_the_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.gpu_run.LEAST_S", 0.5)
    begun = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = run(Step("one", python("import time; time.sleep(60)"), 1.0), tmp_path, 1.0)
    finally:
        signal.signal(signal.SIGINT, before)

    assert ended == "over 1 s"
    assert time.monotonic() - begun < GRACE_S / 2


def test_each_step_is_saved_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = f"print(open({str(tmp_path / 'summary.json')!r}).read())"
    made = [Step("one", python("print('hello')"), 30.0), Step("two", python(look), 30.0)]
    monkeypatch.setattr(Steps, "of", lambda self, call: made)
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "1", "--tiny", "--out", str(tmp_path)])

    assert main() == 0

    (seen,) = json.loads((tmp_path / "two.log").read_text())
    assert (seen["step"], seen["ended"]) == ("one", "ok")
    assert "=== one: ok" in capsys.readouterr().out

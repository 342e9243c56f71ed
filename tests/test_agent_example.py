"""The agent of the examples: its prompts, what it is judged by, and its short form."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from programs import run_program

from benchmarks.repeats import Repeats
from examples.agent import measure
from examples.agent.conversation import NOTE, STEPS, TASK, Agent, Call, Message, Tools
from examples.agent.material import DOCUMENTS, make_workspace
from examples.agent.measure import Turn
from examples.agent.report import figures, make_table, shortfalls
from sgl_blend.commands.common.server import Server

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prompts(tmp_path: Path) -> list[list[Message]]:
    make_workspace(tmp_path / "files")
    documents = {name: f"All about {name}.\n" for name in DOCUMENTS}
    return [*Agent(Tools(tmp_path / "files", documents)).prompts()]


def results(messages: list[Message]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "tool"]


def test_each_turn_has_another_clock_and_the_same_task(prompts: list[list[Message]]) -> None:
    assert len(prompts) == len(STEPS) >= 8
    clocks = [messages[0]["content"].splitlines()[0] for messages in prompts]
    assert len(set(clocks)) == len(prompts)
    assert len({messages[0]["content"].split("\n", 1)[1] for messages in prompts}) == 1
    assert {messages[1]["content"] for messages in prompts} == {TASK}


def test_documents_come_go_and_change_order(prompts: list[list[Message]]) -> None:
    shown = [[one for one in results(turn) if one.startswith("<document")] for turn in prompts]
    retrievals = [now for before, now in pairwise([[], *shown]) if now != before]
    assert len(retrievals) == sum(step.retrieves for step in STEPS)
    for before, now in pairwise(retrievals):
        assert set(now) - set(before) or set(before) - set(now)
        stayed = [one for one in now if one in before]
        assert stayed != [one for one in before if one in now]


def test_an_edited_file_is_read_again(prompts: list[list[Message]]) -> None:
    reads = [one for one in results(prompts[-1]) if one.startswith('<file path="queue.py"')]
    before, after = reads
    assert NOTE not in before
    assert after.replace(NOTE + "\n", "") == before


def test_each_result_answers_a_call(prompts: list[list[Message]]) -> None:
    for messages in prompts:
        called = [call["id"] for one in messages for call in one.get("tool_calls", ())]
        assert called == [one["tool_call_id"] for one in messages if one["role"] == "tool"]
        for one in messages:
            for call in one.get("tool_calls", ()):
                json.loads(call["function"]["arguments"])


def test_a_tool_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tool 'shell'"):
        Tools(tmp_path, {}).use(Call("shell", {}))


def turn(computed: int, blend_s: float = 1.0) -> Turn:
    kinds = {"prefix_tokens": 10, "reused_tokens": 0, "recomputed_tokens": 0}
    tokens = {"prompt_tokens": 1000, "found_tokens": 0, **kinds, "computed_tokens": computed}
    return Turn(tokens, Repeats(exact=10, repeated=900), blend_s, 4.0)


class FakeServer:
    """Builds something after each of its requests, until it is waited for."""

    def __init__(self, name: str) -> None:
        self.url = name
        self.is_building = False

    def wait_for_builds(self) -> None:
        self.is_building = False

    def info(self) -> dict[str, int]:
        return dict.fromkeys(measure.COUNTED, 0)


def test_nothing_is_built_while_a_server_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    blend, stock = FakeServer("blend"), FakeServer("stock")
    order: list[str] = []

    def first_token(server: FakeServer, messages: list[Message]) -> float:
        assert not blend.is_building
        blend.is_building = server is blend
        order.append(server.url)
        return 1.0

    monkeypatch.setattr(measure, "first_token", first_token)
    monkeypatch.setattr(measure, "tokenize", lambda server, messages: np.arange(40))
    measure.play(cast(Server, blend), cast(Server, stock), [[], []])
    assert order == ["blend", "stock", "stock", "blend"]


def told(*later: Turn) -> dict[str, Any]:
    return figures([*(turn(990, 9.0) for _ in range(3)), *later])


def test_turns_count_from_the_fourth_on() -> None:
    found = told(turn(90), turn(180))
    assert found["found_of_repeated"] == pytest.approx((900 + 810) / 1800)
    assert found["faster_than_stock"] == 4.0
    assert shortfalls(found, any_speed=False) == []


def test_each_bound_is_held() -> None:
    assert len(shortfalls(told(turn(240)), any_speed=False)) == 1
    slow = told(turn(90, 2.0))
    assert len(shortfalls(slow, any_speed=False)) == 1
    assert shortfalls(slow, any_speed=True) == []


def test_a_turn_without_repeats_has_no_share() -> None:
    first = Turn(turn(1000).tokens, Repeats(0, 0), 1.0, 1.0)
    assert make_table([first], ["I begin."]).row_count == 1


@pytest.mark.engine
@pytest.mark.slow  # .ci/run plays the short form by itself
def test_the_short_form_finds_what_repeats(tmp_path: Path) -> None:
    record, plot = tmp_path / "agent.json", tmp_path / "agent.png"
    command = [sys.executable, "-m", "examples.agent", "--short"]
    done = run_program([*command, "--json", str(record), "--plot", str(plot)], ROOT, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert found["found_of_repeated"] >= 0.85
    assert len(found["turns"]) == len(STEPS)
    assert plot.stat().st_size > 10_000

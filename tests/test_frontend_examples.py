"""The frontend programs of the examples, with a server of a tiny model: a given one and their own."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_program

from examples.demo.material import prepare
from examples.frontend.serving import FLAGS, KINDS, SHORT, documents
from sgl_blend.commands.common.server import running

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^ (\S.*?)" + r" +(\d+)" * len(KINDS) + r" *$", re.MULTILINE)


def test_documents_are_of_a_size() -> None:
    sizes = [len(text.split()) for text in documents(4)]
    assert len(sizes) == 4
    assert all(200 <= size <= 400 for size in sizes)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("frontend")
    material = prepare(folder, SHORT, lambda line: None)
    with running(material.model, FLAGS, folder / "server.log") as server:
        yield server.url


def rows(program: str, *flags: str) -> dict[str, dict[str, int]]:
    """Run a program and return what it printed of each call."""
    command = [sys.executable, "-m", f"examples.frontend.{program}", *flags]
    done = run_program(command, ROOT, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = ROW.findall(done.stdout)
    return {name: dict(zip(KINDS, map(int, counts), strict=True)) for name, *counts in found}


@pytest.mark.engine
@pytest.mark.slow  # .ci/run runs it
def test_the_reduce_step_reuses_what_the_map_step_stored(url: str) -> None:
    calls = rows("map_reduce", "--url", url)
    assert list(calls) == ["map 1", "map 2", "map 3", "map 4", "reduce"]
    last = calls["reduce"]
    assert last["computed"] < 0.1 * last["prompt"]
    assert last["reused"] + last["recomputed"] > 0.5 * last["prompt"]


@pytest.mark.engine
@pytest.mark.slow  # .ci/run runs it
def test_a_judge_with_a_server_of_its_own_computes_answers_once() -> None:
    calls = list(rows("judge", "--short").values())
    assert len(calls) == 4
    for call in calls:
        assert call["computed"] < 0.1 * call["prompt"]
    assert sum(call["reused"] for call in calls[1:]) > 0.3 * sum(
        call["prompt"] for call in calls[1:]
    )

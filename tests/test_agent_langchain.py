"""The agent's conversation through LangChain: what comes again is found."""

import json
import re
from pathlib import Path

import pytest
from programs import run_program

from examples.agent.__main__ import FLAGS, SHORT
from examples.agent.conversation import Agent, Tools
from examples.agent.material import make_documents, make_workspace, prepare_model
from sgl_blend.commands.common.server import running

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build" / "langchain" / "bin" / "python"
NUM_TURNS = 5
TURN = re.compile(r"^turn (\d+): (\d+) of (\d+) tokens found$", re.MULTILINE)


@pytest.mark.engine
@pytest.mark.slow  # .ci/run runs it
@pytest.mark.skipif(not PYTHON.exists(), reason="LangChain is not installed: make langchain")
def test_what_comes_again_is_found(tmp_path: Path) -> None:
    model = prepare_model(tmp_path, SHORT, lambda line: None)
    make_workspace(tmp_path / "files")
    agent = Agent(Tools(tmp_path / "files", make_documents(model)))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([*agent.prompts()][:NUM_TURNS]))
    program = str(ROOT / "examples" / "agent" / "langchain_agent.py")
    flags = [*FLAGS, "--blend-when", "always"]
    with running(model, flags, tmp_path / "server.log") as server:
        done = run_program([str(PYTHON), program, server.url, str(prompts)], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    turns = [tuple(map(int, told)) for told in TURN.findall(done.stdout)]
    assert [number for number, _, _ in turns] == [*range(1, NUM_TURNS + 1)]
    shares = [found / prompt for _, found, prompt in turns]
    assert shares[0] == shares[1] == 0.0  # one visit shows a text, the next one builds it
    assert min(shares[3:]) > 0.7

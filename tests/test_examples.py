"""The examples, as a reader runs them."""

import json
import sys
from pathlib import Path

import pytest
from programs import run_program
from servers import start_server, stop
from tiny_models import make_text_model

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[1]


def test_the_openai_example_reuses_documents_in_another_order(tmp_path: Path) -> None:
    model = make_text_model("llama", tmp_path)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    flags = ["--enable-blend", "--blend-when", "always", "--enable-cache-report"]
    server = start_server([*command, *flags], tmp_path / "log", tmp_path)
    try:
        done = run_program(
            [sys.executable, str(ROOT / "examples" / "openai_rag.py"), server.url], ROOT
        )
    finally:
        stop(server)

    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    first, second = (json.loads(line.removeprefix("usage: ")) for line in told)
    assert (first.get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > 0.6 * second["prompt_tokens"]
    assert done.stdout.count("answer: ") == 2

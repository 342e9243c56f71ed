"""What operators see of finding and learning: reuse of learned chunks, and a real server's metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Prompt, rag_prompt, random_tokens
from servers import Server, start_server, stop
from tiny_models import make_text_model

from sgl_blend.metrics import FINDING_COUNTERS, FINDING_GAUGES

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

MARKED, LEARNED = random_tokens(1700, 150), random_tokens(1701, 170)
PASSAGES = [
    "The harbour of Varna lies on the Black Sea, was dredged in 1906 and takes ships of six metres. ",
    "A capybara eats up to three kilograms of grass a day, swims well and sleeps in the afternoon. ",
]


def _reuse(driver: Driver) -> list[dict[str, int]]:
    """Mark one document, let the other be learned, and tell totals after each of four prompts."""
    driver.settle()
    driver.flush()
    bos = driver.runtime.intake._bos_token_id
    orders = [[LEARNED], [LEARNED], [MARKED], [MARKED, LEARNED]]
    seen = []
    driver.ask(rag_prompt([bos], [MARKED], random_tokens(9, 20)))
    driver.settle()
    for seed, order in enumerate(orders, start=1):
        texts = [[*document, *random_tokens(100 * seed + n, 9)] for n, document in enumerate(order)]
        (answer,) = driver.ask(Prompt([random_tokens(10_000 + seed, 20), *texts]))
        driver.settle()
        finding: dict[str, int] = driver.runtime.describe()["finding"]
        seen.append({"found": answer.report["found_tokens"], **finding})
    return seen


def test_reuse_is_counted_of_chunks_that_were_learned(start_engine: StartEngine) -> None:
    engine = start_engine(blend_find="learned", blend_learn_share=1.0)
    first, second, marked, both = engine.call(_reuse)
    assert (first["found"], second["found"]) == (0, 0)
    assert second["learned_chunks"] - first["learned_chunks"] == 1
    assert marked["found"] == len(MARKED)
    assert marked["learned_hits"] == first["learned_hits"], "it was marked, not learned"
    assert both["learned_hits"] - marked["learned_hits"] == 1
    of_learned = both["learned_hit_tokens"] - marked["learned_hit_tokens"]
    assert of_learned == both["found"] - len(MARKED) >= len(LEARNED)


def _figures(server: Server) -> dict[str, float]:
    """Return the server's metrics of finding and learning, and those of found tokens."""
    names = {f"sgl_blend:{name}_total" for name in (*FINDING_COUNTERS, "found_tokens")}
    names |= {f"sgl_blend:{name}" for name in FINDING_GAUGES}
    lines = server.request("/metrics")[1].splitlines()
    figures = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    return {name: figures[name] for name in names & figures.keys()}


def _served(folder: Path, *flags: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Send texts without a mark in three orders; return /server_info's totals, and the metrics."""
    model = make_text_model("llama", folder / "model")
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--enable-metrics", "--enable-blend", "--blend-when", "always", *flags]
    server = start_server(command, folder / "log", folder)
    try:
        for number, order in enumerate(((0, 1), (1, 0), (0, 1))):
            texts = "\n\n".join(2 * PASSAGES[place] for place in order)
            server.generate(f"Note {number}{number}{number}.\n\n{texts}\n\nQuestion {number}?")
            server.wait_for_builds()
        server.generate("Thanks.")  # what was built since is published with the next request
        return server.totals(), _figures(server)
    finally:
        stop(server)


def test_a_server_that_learns_publishes_what_server_info_tells(tmp_path: Path) -> None:
    totals, figures = _served(tmp_path, "--blend-find", "learned", "--blend-learn-share", "1")
    finding = totals["finding"]
    assert finding["learned_hits"] > 0
    assert finding["learned_hit_tokens"] == totals["found_tokens"]
    expected = {f"sgl_blend:{name}_total": finding[name] for name in FINDING_COUNTERS}
    expected |= {f"sgl_blend:{name}": finding[name] for name in FINDING_GAUGES}
    assert figures == expected | {"sgl_blend:found_tokens_total": totals["found_tokens"]}


def test_a_server_of_marks_publishes_nothing_of_finding(tmp_path: Path) -> None:
    totals, figures = _served(tmp_path)
    assert totals["finding"] is None
    assert figures == {"sgl_blend:found_tokens_total": 0}

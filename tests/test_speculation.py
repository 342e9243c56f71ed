"""n-gram speculation: drafts of what was said before, which the model verifies in one forward."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Engine, Prompt, random_tokens
from law_prompts import CHUNKS, QUESTION, SYSTEM, scattered
from servers import Server, rag_text, start_server, stop
from sparse_path import (
    assert_drops_and_is_full_prefill,
    assert_keeps_all_and_is_full_prefill,
    on_all_rows,
    on_true_kv,
)
from tiny_models import make_text_model

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 8,
    "speculative_ngram_capacity": 10_000,  # nodes of its tree, which takes 1.8 GB by default
    "blend_on_miss": "build",
}


@pytest.fixture(params=[False, True], ids=["no-overlap", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    wanted: bool = request.param
    return wanted


def start(start_engine: StartEngine, overlap: bool, **settings: Any) -> Engine:
    return start_engine(disable_overlap_schedule=not overlap, **{**NGRAM, **settings})


def several(**rest: Any) -> list[Prompt]:
    """Requests of different chunks, lengths and ratios, and one without any chunk."""
    prompts = [
        Prompt(
            [SYSTEM, CHUNKS[first], CHUNKS[second], QUESTION],
            [1, 2],
            params={"sgl_blend_ratio": ratio},
            logprobs=False,
            max_new_tokens=length,
            **rest,
        )
        for first, second, ratio, length in ((2, 4, 0.15, 60), (5, 1, 0.5, 30), (3, 0, 0.0, 45))
    ]
    plain = Prompt([random_tokens(7, 90)], logprobs=False, max_new_tokens=50, **rest)
    return [*prompts, plain]


def say(driver: Driver, prompts: list[Prompt]) -> tuple[list[list[int]], list[Any], int]:
    """Return what was said, of whom chunks were reused, and how many batches that took."""
    before = driver.num_batches
    answers = driver.ask(*prompts)
    batches = driver.num_batches - before
    driver.settle()
    reused = [answer.report.get("reused_tokens", 0) > 0 for answer in answers]
    return [answer.output_ids for answer in answers], reused, batches


def test_drafts_are_accepted_and_change_no_blended_answer(
    start_engine: StartEngine, overlap: bool
) -> None:
    want, reused, _ = start_engine(blend_on_miss="build").call(say, several())
    assert reused == [True, True, True, False]
    engine = start(start_engine, overlap)
    first = engine.call(say, several(salt="one"))
    again = engine.call(say, several(salt="two"))
    assert first[:2] == again[:2] == (want, reused)
    # What was said the first time is drafted the second time, seven tokens at once.
    assert again[2] < 0.4 * first[2]


@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_l1_holds_with_drafts(start_engine: StartEngine, overlap: bool, ratio: float) -> None:
    engine = start(start_engine, overlap)
    prompt = scattered(params={"sgl_blend_ratio": ratio}, max_new_tokens=12)
    assert_drops_and_is_full_prefill(engine.call(on_true_kv, [prompt]))
    assert_keeps_all_and_is_full_prefill(engine.call(on_all_rows, [prompt]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("speculation")
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(make_text_model("llama", folder))),
        *("--enable-blend", "--blend-when", "always", "--blend-check-layer", "1"),
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"),
        *("--speculative-ngram-capacity", "10000"),
    ]
    running = start_server(command, folder / "log", Path(__file__).parents[1])
    yield running
    stop(running)


def ask(server: Server, text: str, length: int, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    body = {"text": text, "sampling_params": {**sampling, "custom_params": params}}
    status, answer = server.request("/generate", body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def test_a_server_drafts_and_blends_at_once(server: Server) -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)]
    with ThreadPoolExecutor(4) as pool:
        for length in (3, 40):
            list(pool.map(lambda order, n=length: ask(server, rag_text(*order), n), orders * 3))
        server.wait_for_builds()
    text = rag_text(2, 0, 1)
    blended = ask(server, text, 40, sgl_blend_ratio=1.0)
    full = ask(server, text, 40, sgl_blend=False)
    assert blended["meta_info"]["sgl_blend"][0]["chunk_hits"] >= 2  # the first is its prefix
    assert blended["output_ids"] == full["output_ids"]
    again = ask(server, text, 40, sgl_blend=False)
    assert again["output_ids"] == full["output_ids"]
    assert again["meta_info"]["spec_verify_ct"] < 20  # 40 tokens that were said before

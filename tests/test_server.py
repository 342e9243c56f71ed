"""The real HTTP server, as a client sees it: every API, every malformed value, metrics."""

import itertools
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from servers import DOCUMENTS, RESERVED, SEP, SYSTEM, Server, rag_text, start_server, stop
from tiny_models import make_text_model

from sgl_blend.commands.bench import prompts as benchmark

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model("llama", tmp_path_factory.mktemp("server-model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    running = start_server(
        [
            *(*command, "--enable-blend", "--blend-when", "always"),
            *("--enable-metrics", "--enable-cache-report"),
        ],
        folder / "log",
        folder,
    )
    yield running
    stop(running)


def test_generate_reuses_chunks_in_another_order(server: Server) -> None:
    cold = server.generate(rag_text(0, 1, 2))
    server.wait_for_builds()

    warm = server.generate(rag_text(2, 0, 1))

    report = warm["meta_info"]["sgl_blend"]
    assert len(report) == 1
    assert cold["meta_info"]["sgl_blend"][0]["chunk_misses"] == 3
    assert report[0]["chunk_hits"] == 3
    assert report[0]["fallback"] is None
    kinds = [report[0][f"{kind}_tokens"] for kind in ("prefix", "reused", "recomputed", "computed")]
    assert sum(kinds) == report[0]["prompt_tokens"] == warm["meta_info"]["prompt_tokens"]
    assert report[0]["reused_tokens"] > 100


def test_separators_are_not_part_of_the_prompt(server: Server) -> None:
    plain = server.generate(rag_text(0, 1).replace(SEP, ""))
    marked = server.generate(rag_text(0, 1), sgl_blend=False)

    assert marked["meta_info"]["prompt_tokens"] == plain["meta_info"]["prompt_tokens"]
    assert marked["text"] == plain["text"]
    assert marked["meta_info"]["sgl_blend"][0]["fallback"] == "disabled"
    assert plain["meta_info"]["sgl_blend"][0]["fallback"] == "no_chunks"


def test_ratio_one_answers_as_without_blending(server: Server) -> None:
    server.generate(rag_text(0, 1, 2))
    server.wait_for_builds()
    exact = server.generate(rag_text(1, 2, 0), sgl_blend=False)
    full = server.generate(rag_text(1, 2, 0), sgl_blend_ratio=1.0, sgl_blend_policy="hkvd-k")
    assert full["meta_info"]["sgl_blend"][0]["policy"] == "hkvd-k"
    assert full["text"] == exact["text"]


def test_chat_and_completions_of_the_openai_client(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    before = server.totals()
    for numbers in ((0, 1), (1, 0)):
        client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": rag_text(*numbers)},
            ],
            max_tokens=2,
            temperature=0,
            extra_body={"custom_params": {"sgl_blend_ratio": 0.3}},
        )
        server.wait_for_builds()
    completion = client.completions.create(
        model="default", prompt=rag_text(1, 0), max_tokens=2, temperature=0
    )
    after = server.totals()
    assert completion.usage is not None
    assert after["chunk_hits"] - before["chunk_hits"] >= 2
    assert after["blended"] > before["blended"]


def test_usage_counts_what_was_copied(server: Server) -> None:
    documents = ["A tram crosses the old bridge twice a day. " * 3, "Moss grows on slate. " * 6]
    answers = []
    for first, second in (documents, documents[::-1]):
        text = f"{SYSTEM}{SEP}{first}{SEP}{second}{SEP}Where does moss grow?"
        body = {"model": "default", "max_tokens": 2, "temperature": 0, "prompt": text}
        server.wait_for_builds()
        before = server.totals()
        answers.append(server.request("/v1/completions", body))
    status, said = answers[1]
    after = server.totals()
    assert status == 200, said
    reused = after["reused_tokens"] - before["reused_tokens"]
    exact = after["prefix_tokens"] - before["prefix_tokens"]
    assert reused > 0
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == exact + reused


def test_streaming_reports_once(server: Server) -> None:
    body = {
        "text": rag_text(2, 1, 0),
        "sampling_params": {"temperature": 0, "max_new_tokens": 4},
        "stream": True,
    }
    request = urllib.request.Request(
        server.url + "/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line[6:] for line in response.read().decode().splitlines() if line[:6] == "data: "]
    last = json.loads(lines[-2])
    assert lines[-1] == "[DONE]"
    assert last["meta_info"]["sgl_blend"][0]["prompt_tokens"] == last["meta_info"]["prompt_tokens"]


def test_two_samples_share_one_blended_prompt(server: Server) -> None:
    server.generate(rag_text(0, 1, 2))
    server.wait_for_builds()
    body = {
        "text": rag_text(2, 0, 1, question="Twice?"),
        "sampling_params": {"temperature": 0.9, "max_new_tokens": 5, "n": 2},
    }
    status, answers = server.request("/generate", body)
    assert status == 200, answers
    reports = [answer["meta_info"]["sgl_blend"][0] for answer in answers]
    assert len(reports) == 2
    for report in reports:
        kinds = ("prefix", "reused", "recomputed", "computed")
        assert sum(report[f"{kind}_tokens"] for kind in kinds) == report["prompt_tokens"]
        assert report["reused_tokens"] + report["prefix_tokens"] > 0.7 * report["prompt_tokens"]


def test_constrained_decoding_after_a_blended_prompt(server: Server) -> None:
    server.generate(rag_text(0, 1, 2))
    server.wait_for_builds()
    body = {
        "text": rag_text(1, 2, 0, question="Yes or no?"),
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "regex": "(yes|no)"},
    }
    status, answer = server.request("/generate", body)
    assert status == 200, answer
    assert answer["text"] in ("yes", "no")
    report = answer["meta_info"]["sgl_blend"][0]
    assert report["reused_tokens"] + report["prefix_tokens"] > 0.7 * report["prompt_tokens"]


def test_frontend_language_programs_mark_chunks(server: Server) -> None:
    import sglang as sgl

    import sgl_blend

    separator = sgl_blend.configure(server.url)
    assert separator == SEP

    @sgl.function  # type: ignore[untyped-decorator, unused-ignore]
    def program(s: Any, first: str, second: str) -> None:
        s += f"Frontend. {SYSTEM}"
        s += sgl_blend.chunk(first) + sgl_blend.chunk(second)
        s += "Where is Varna?"
        s += sgl.gen("answer", max_tokens=2, temperature=0)

    sgl.set_default_backend(sgl.RuntimeEndpoint(server.url))
    before = server.totals()
    assert program.run(first=DOCUMENTS[0], second=DOCUMENTS[2])["answer"]
    server.wait_for_builds()
    assert program.run(first=DOCUMENTS[2], second=DOCUMENTS[0])["answer"]
    assert server.totals()["chunk_hits"] >= before["chunk_hits"] + 2


def test_explicit_spans_of_token_ids(server: Server) -> None:
    ids = [1, *range(50, 90), *range(60, 130), *range(40, 110), 9, 8, 7]
    spans = [41, 111, 111, 181]
    for _ in range(2):
        body = {
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": 2,
                "custom_params": {"sgl_blend_spans": spans, "sgl_blend_policy": "first-k"},
            },
        }
        status, answer = server.request("/generate", body)
        assert status == 200, answer
        server.wait_for_builds()
    report = answer["meta_info"]["sgl_blend"][0]
    assert report["prompt_tokens"] == len(ids)


MALFORMED: dict[str, Any] = {
    "nested list": {"sgl_blend_spans": [[0, 5], [6, 9]]},
    "deeply nested under another name": {"mine": [[[1]]]},
    "nested object": {"mine": {"a": {"b": 1}}},
    "negative": {"sgl_blend_spans": [-4, 9]},
    "overlapping": {"sgl_blend_spans": [0, 50, 40, 80]},
    "descending": {"sgl_blend_spans": [40, 80, 0, 20]},
    "empty span": {"sgl_blend_spans": [5, 5]},
    "out of range": {"sgl_blend_spans": [0, 100000]},
    "odd": {"sgl_blend_spans": [0, 5, 9]},
    "a million spans": {"sgl_blend_spans": list(range(2_000_000))},
    "text in spans": {"sgl_blend_spans": ["0", "5"]},
    "booleans in spans": {"sgl_blend_spans": [False, True]},
    "spans as text": {"sgl_blend_spans": "0,5"},
    "ratio as text": {"sgl_blend_ratio": "0.5"},
    "ratio above one": {"sgl_blend_ratio": 1.5},
    "ratio as boolean": {"sgl_blend_ratio": True},
    "unknown policy": {"sgl_blend_policy": "best"},
    "policy as list": {"sgl_blend_policy": ["hkvd"]},
    "switch as text": {"sgl_blend": "no"},
    "unknown name": {"sgl_blend_ration": 0.5},
    "custom_params as list": [1, 2],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parameters_are_400_and_the_server_lives(server: Server, name: str) -> None:
    body = {
        "text": "x" * 200,
        "sampling_params": {"max_new_tokens": 1, "custom_params": MALFORMED[name]},
    }

    status, answer = server.request("/generate", body)

    assert status == 400, answer
    message = answer["error"]["message"]
    assert message
    assert "\n" not in message
    assert server.process.poll() is None
    assert server.generate("still there?")["meta_info"]["completion_tokens"] > 0


def test_malformed_parameters_are_400_on_the_openai_api(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100}]}),
    ):
        malformed = {"model": "default", "custom_params": {"sgl_blend_ratio": 2}, "max_tokens": 1}
        status, answer = server.request(path, {**body, **malformed})
        assert status == 400, answer
        assert "sgl_blend_ratio" in json.dumps(answer)


def test_a_reserved_cache_salt_is_400(server: Server) -> None:
    body = {"text": "hello", "cache_salt": RESERVED, "extra_key": RESERVED, "sampling_params": {}}
    status, answer = server.request("/generate", body)
    assert status == 400, answer


def test_server_info_and_metrics_show_totals(server: Server) -> None:
    server.generate(rag_text(0, 1))
    totals = server.totals()
    assert totals["separator"] == SEP
    assert totals["enable_blend"] is True
    assert totals["requests"] > 0
    kinds = [totals[f"{kind}_tokens"] for kind in ("prefix", "reused", "recomputed", "computed")]
    assert sum(kinds) == totals["prompt_tokens"]
    _, metrics = server.request("/metrics")
    for name in ("reused_tokens", "recomputed_tokens", "chunk_hits", "chunk_misses", "requests"):
        assert f"sgl_blend:{name}_total" in metrics
    assert "sgl_blend:fallback_total{" in metrics
    (stock,) = {
        line.partition('model_name="')[2].partition('"')[0]
        for line in metrics.splitlines()
        if line.startswith("sglang:num_requests_total{")
    }
    assert f'sgl_blend:requests_total{{model_name="{stock}"}}' in metrics


def test_a_health_check_is_no_request(server: Server) -> None:
    before = server.totals()["requests"]
    for _ in range(3):
        assert server.request("/health_generate")[0] == 200
    server.generate("A plain prompt.")
    assert server.totals()["requests"] == before + 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("together", [False, True])
def test_a_returned_prompt_is_what_the_model_saw(
    server: Server, count: int, together: bool
) -> None:
    marked, plain = rag_text(0, 1), rag_text(0, 1).replace(SEP, "")
    returned = []
    for text in (marked, plain):
        sampling = {"max_new_tokens": 3, "n": count, "temperature": 0}
        asked = {"text": [text] * 2 if together else text, "sampling_params": sampling}
        body = server.request("/generate", {**asked, "return_prompt_token_ids": True})[1]
        answers = body if isinstance(body, list) else [body]
        assert len(answers) == count * (1 + together)
        for answer in answers:
            assert len(answer["prompt_token_ids"]) == answer["meta_info"]["prompt_tokens"]
        returned.append([answer["prompt_token_ids"] for answer in answers])
    assert returned[0] == returned[1]


def test_flush_and_abort_over_http_leave_no_leak(server: Server) -> None:
    server.generate(rag_text(0, 1, 2))
    server.wait_for_builds()
    status, _ = server.request("/flush_cache", {})
    assert status == 200
    again = server.generate(rag_text(1, 0, 2))
    assert again["meta_info"]["sgl_blend"][0]["chunk_hits"] == 0
    assert server.request("/abort_request", {"rid": "", "abort_all": True})[0] == 200
    assert server.process.poll() is None


def wait_for_canary(server: Server, num_picked: int) -> dict[str, Any]:
    for _ in range(200):
        canary: dict[str, Any] = server.totals()["canary"]
        if canary["compared"] + canary["skipped"] >= num_picked:
            return canary
        time.sleep(0.1)
    raise AssertionError(f"{num_picked} requests were not compared: {canary}")


@pytest.mark.slow  # .ci/run runs it
def test_sglang_serve_takes_the_flags_and_its_canary_trips(model: Path, tmp_path: Path) -> None:
    serve = Path(sys.executable).with_name("sglang")
    flags = ["--enable-blend", "--blend-when", "always", "--blend-recompute-ratio", "0"]
    flags += ["--blend-canary-rate", "1", "--blend-canary-max-kl", "1e-9"]
    running = start_server(
        [str(serve), "serve", "--model-path", str(model), "--enable-metrics", *flags],
        tmp_path / "log",
        tmp_path,
        subprocess.Popen,
    )
    try:
        assert running.totals()["separator"] == SEP
        running.generate(rag_text(0, 1, 2))
        running.wait_for_builds()
        orders = [*itertools.permutations(range(3), 2), *itertools.permutations(range(3))]
        fresh = [order for order in orders if order[:2] != (0, 1)]  # those are in the first prompt
        for number, order in enumerate(fresh[:8]):
            answer = running.generate(rag_text(*order))
            assert answer["meta_info"]["sgl_blend"][0]["reused_tokens"] > 0
            canary = wait_for_canary(running, number + 1)
        late = running.generate(rag_text(2, 1, 0))["meta_info"]["sgl_blend"][0]
        _, metrics = running.request("/metrics")
    finally:
        stop(running)

    assert (canary["compared"], canary["tripped"]) == (8, True)
    assert late["fallback"] == "canary"
    assert "the canary switched blending off, because" in running.log.read_text()
    figures = {
        line.partition("{")[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("sgl_blend:canary_")
    }
    assert figures["sgl_blend:canary_compared_total"] == figures["sgl_blend:canary_kl_count"] == 8
    assert figures["sgl_blend:canary_kl_sum"] == pytest.approx(8 * canary["mean_kl"])
    assert figures["sgl_blend:canary_tripped"] == 1


def test_a_benchmark_reads_an_answer_in_two_pieces(server: Server) -> None:
    prompt = benchmark.Prompt(token_ids=list(range(10, 60)), spans=[])
    body = benchmark.to_body(prompt, None, 200, first_and_last=True)
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/generate"
    with httpx.stream("POST", url, content=body, headers=headers, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line.removeprefix("data: "))["meta_info"] for line in lines]
    # So many that one piece is gone before the other comes: SGLang sends what waits as one.
    assert [piece["completion_tokens"] for piece in pieces] == [1, 200]


def test_a_request_with_penalties_decodes_beside_builds(server: Server) -> None:
    more = {"min_new_tokens": 3, "frequency_penalty": 0.1, "max_new_tokens": 1500}
    with ThreadPoolExecutor() as pool:
        decoding = pool.submit(server.sample, "x", ignore_eos=True, **more)
        while not decoding.done():  # builds join the batch that is decoded, and end in it
            server.generate(rag_text(0, 1, 2).replace(SEP, SEP + uuid4().hex))
    status, body = decoding.result()
    assert (status, body["meta_info"]["completion_tokens"]) == (200, 1500)
    server.wait_for_builds()

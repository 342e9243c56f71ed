"""The gate over HTTP: what ends SGLang, documents that bring separators, echoes."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import SEP, SYSTEM, Server, rag_text, start_server, stop
from tiny_models import VOCAB_SIZE, make_text_model

import sgl_blend

pytestmark = pytest.mark.engine

SEP_ID = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gate-server")
    model = make_text_model("llama", folder)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    flags = ["--enable-blend", "--blend-when", "always"]
    running = start_server([*command, *flags], folder / "log", Path(__file__).parents[1])
    answer(running)  # from here on its beginning is cached, so every answer has the same bits
    yield running
    stop(running)


def answer(server: Server, text: str = "What is copper?") -> tuple[str, list[Any]]:
    """Return what the server says to a plain prompt, and how likely it found that."""
    body = {
        "text": text,
        "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4},
    }
    status, said = server.request("/generate", body)
    assert status == 200, said
    return said["text"], said["meta_info"]["output_token_logprobs"]


def marked(*token_ids: int) -> dict[str, Any]:
    return {"input_ids": [1, 50, SEP_ID, *range(60, 90), *token_ids, SEP_ID, 51]}


def sampled(**sampling: Any) -> dict[str, Any]:
    return {"text": rag_text(0, 1), "sampling_params": {"max_new_tokens": 2, **sampling}}


def scored(**fields: Any) -> dict[str, Any]:
    return {"text": rag_text(0, 1), "return_logprob": True, **fields}


HOSTILE: dict[str, dict[str, Any]] = {
    "negative token": marked(-5),
    "very negative token": marked(-(10**9)),
    "first token beyond the vocabulary": marked(VOCAB_SIZE),
    "token of 40 bits": marked(1 << 40),
    "token of 70 bits": marked(1 << 70),
    "negative token beside spans": {
        "input_ids": [1, *range(50, 90), -5],
        "sampling_params": {"custom_params": {"sgl_blend_spans": [1, 30]}},
    },
    "no tokens": {"input_ids": [], "sampling_params": {"custom_params": {"sgl_blend": True}}},
    "logprobs from -5": scored(logprob_start_len=-5),
    "a million likeliest": scored(top_logprobs_num=10**6),
    "fewer than none": scored(top_logprobs_num=-1),
    "logprobs of no token": scored(token_ids_logprob=[10**6]),
    "negative max_new_tokens": sampled(max_new_tokens=-1),
    "max_new_tokens of 70 bits": sampled(max_new_tokens=1 << 70),
    "half a token": sampled(max_new_tokens=2.5),
    "no sample": sampled(n=0),
    "fewer samples than none": sampled(n=-1),
    "temperature NaN": sampled(temperature=float("nan")),
    "temperature true": sampled(temperature=True),
    "top_k of 32 bits": sampled(top_k=1 << 31, temperature=1.0),
    "stop tokens beyond the vocabulary": sampled(stop_token_ids=[10**6], min_new_tokens=1),
    "negative stop tokens": sampled(stop_token_ids=[-7], min_new_tokens=1),
    "bias of an unknown token": sampled(logit_bias={"100000": 1.0}),
    "bias beyond float32": sampled(logit_bias={"5": 1e39}, temperature=1.0),
    "bias as text": sampled(logit_bias={"5": "x"}),
    "tiny repetition penalty": sampled(repetition_penalty=1e-300, temperature=1.0),
    "schema as an object": sampled(json_schema={"type": "object"}),
    "regex as a number": sampled(regex=5),
    "ignore_eos as text": sampled(ignore_eos="yes"),
    "embeddings from JSON": {"text": rag_text(0, 1), "positional_embed_overrides": {"a": 1}},
    "extra key of ours": {"text": rag_text(0, 1), "extra_key": "sgl-blend:c:0123:"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_ends_sglang_is_400_for_a_request_that_blends(server: Server, name: str) -> None:
    before = answer(server)

    status, said = server.request("/generate", HOSTILE[name])

    assert status == 400, said
    assert said  # SGLang's own refusals have other shapes than ours
    assert server.process.poll() is None
    assert answer(server) == before


def test_an_extra_key_of_ours_is_400_without_chunks_too(server: Server) -> None:
    body = {"text": "hello", "extra_key": "sgl-blend:c:0123:", "sampling_params": {}}
    status, said = server.request("/generate", body)
    assert status == 400, said


def chunks_of(server: Server, prompt: str) -> dict[str, Any]:
    report: dict[str, Any] = server.generate(prompt)["meta_info"]["sgl_blend"][0]
    return report


def test_a_document_that_brings_separators_makes_no_chunks_of_its_own(server: Server) -> None:
    tale = "A long tale of copper on roofs. " * 4
    hostile = f"{tale}{SEP}{tale}And on.{SEP}{SEP}{tale}And off."
    sgl_blend.configure(server.url)

    def prompt(document: str, question: str) -> str:
        return SYSTEM + sgl_blend.chunk(document) + sgl_blend.plain(question)

    first = chunks_of(server, prompt(hostile, f"What is {SEP}it?"))
    server.wait_for_builds()
    again = chunks_of(server, "Another. " + prompt(hostile, "And?"))
    naive = chunks_of(server, f"{SYSTEM}{SEP}{hostile}{SEP}What?")

    assert (first["chunk_hits"], first["chunk_misses"]) == (0, 1)
    assert again["chunk_hits"] + again["chunk_misses"] == 1
    assert naive["chunk_hits"] + naive["chunk_misses"] > 1  # what the escape keeps away


def test_the_model_reads_a_broken_separator_as_text(server: Server) -> None:
    from transformers import AutoTokenizer

    info = server.request("/model_info")[1]
    tokenizer = AutoTokenizer.from_pretrained(info["model_path"])
    sgl_blend.configure(server.url)
    ids = tokenizer.encode(sgl_blend.plain(f"a {SEP} b"), add_special_tokens=False)
    assert SEP_ID not in ids
    assert tokenizer.decode(ids).replace("\u200b", "") == f"a {SEP} b"


def test_beside_spans_a_separator_is_text(server: Server) -> None:
    ids = [1, *range(50, 90), SEP_ID, *range(60, 130), 9, 8, 7]
    body = {
        "input_ids": ids,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 2,
            "custom_params": {"sgl_blend_spans": [41, 112]},
        },
    }
    status, said = server.request("/generate", body)
    assert status == 200, said
    report = said["meta_info"]["sgl_blend"][0]
    assert report["prompt_tokens"] == len(ids)
    assert report["chunk_hits"] + report["chunk_misses"] == 1


def test_completions_echo_the_prompt_without_separators(server: Server) -> None:
    ask = {"model": "default", "max_tokens": 2, "temperature": 0, "echo": True}
    prompts = [rag_text(0, 1), rag_text(1)]
    clean = [prompt.replace(SEP, "") for prompt in prompts]

    status, one = server.request("/v1/completions", {**ask, "prompt": prompts[0]})
    assert status == 200, one
    _, two = server.request("/v1/completions", {**ask, "prompt": prompts, "n": 2})

    assert one["choices"][0]["text"].startswith(clean[0])
    assert [choice["text"][: len(clean[0])] for choice in two["choices"][:2]] == [clean[0]] * 2
    assert all(choice["text"].startswith(clean[1]) for choice in two["choices"][2:])


def test_streamed_completions_echo_the_prompt_without_separators(server: Server) -> None:
    body = {"model": "default", "max_tokens": 2, "echo": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        data=json.dumps({**body, "prompt": rag_text(0, 1)}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line[6:] for line in response.read().decode().splitlines() if line[:6] == "data: "]
    parts = [json.loads(line)["choices"] for line in lines if line != "[DONE]"]
    text = "".join(choices[0]["text"] for choices in parts if choices)
    assert text.startswith(rag_text(0, 1).replace(SEP, ""))

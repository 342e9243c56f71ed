"""LoRA over HTTP: two adapters and the base model at once, and an adapter that is replaced."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, rag_text, start_server, stop
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from test_adapters import NAMES, make_adapter
from tiny_models import make_text_model

from sgl_blend.engine.versions import features

pytestmark = pytest.mark.engine

BASE = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    if not features().keys_have_salt:
        pytest.skip("adapters are refused in this SGLang")
    model = make_text_model("llama", folder)
    paths = [f"{name}={make_adapter(folder / name, seed)}" for seed, name in enumerate(NAMES)]
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--enable-blend", "--blend-when", "always", "--blend-check-layer", "1"),
        *("--lora-paths", *paths, "--lora-backend", "torch_native", "--max-loras-per-batch", "3"),
    ]
    running = start_server(command, folder / "log", Path(__file__).parents[1])
    yield running
    stop(running)


def ask(server: Server, adapter: str | None, text: str, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": params or None}
    body = {"text": text, "lora_path": adapter, "return_logprob": True, "sampling_params": sampling}
    status, answer = server.request("/generate", body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def logprobs(answer: dict[str, Any]) -> list[tuple[int, float]]:
    return [(token, logprob) for logprob, token, _ in answer["meta_info"]["output_token_logprobs"]]


def assert_is_full_prefill(server: Server, adapter: str | None) -> None:
    """Check that ratio 1 answers as the adapter does without blending."""
    text = rag_text(2, 0, 1)
    blended = ask(server, adapter, text, sgl_blend_ratio=1.0)
    full = ask(server, adapter, text, sgl_blend=False)
    for (token, logprob), (want_token, want) in zip(logprobs(blended), logprobs(full), strict=True):
        assert token == want_token
        assert abs(logprob - want) < 1e-3


def test_adapters_and_the_base_are_served_at_once(server: Server) -> None:
    users = [*NAMES, BASE] * 4
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)]
    with ThreadPoolExecutor(6) as pool:
        for order in orders:
            list(pool.map(lambda user, order=order: ask(server, user, rag_text(*order)), users))
            server.wait_for_builds()
    answers = {user: ask(server, user, rag_text(2, 0, 1)) for user in (*NAMES, BASE)}
    for answer in answers.values():
        assert answer["meta_info"]["sgl_blend"][0]["chunk_hits"] >= 2  # the first is its prefix
    assert len({str(logprobs(answer)) for answer in answers.values()}) == 3
    for user in answers:
        assert_is_full_prefill(server, user)


def test_a_replaced_adapter_meets_nothing_of_the_old_one(server: Server, folder: Path) -> None:
    assert server.request("/flush_cache", {})[0] == 200
    ask(server, "two", rag_text(0, 1, 2))
    server.wait_for_builds()
    old = ask(server, "two", rag_text(1, 0, 2))
    assert old["meta_info"]["sgl_blend"][0]["reused_tokens"] > 0

    assert server.request("/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    other = {"lora_name": "two", "lora_path": str(make_adapter(folder / "other", 9))}
    assert server.request("/load_lora_adapter", other)[0] == 200

    first = ask(server, "two", rag_text(0, 1, 2))
    assert first["meta_info"]["sgl_blend"][0]["chunk_hits"] == 0
    server.wait_for_builds()
    again = ask(server, "two", rag_text(1, 0, 2))
    assert again["meta_info"]["sgl_blend"][0]["chunk_hits"] == 3
    assert logprobs(again) != logprobs(old)
    assert_is_full_prefill(server, "two")
    assert_is_full_prefill(server, "one")


def _post(server: Server, path: str, body: dict[str, Any], patience_s: float = 20.0) -> int:
    """Send a request; return its status, or 0 if it was given up."""
    try:
        return httpx.post(server.url + path, json=body, timeout=patience_s).status_code
    except httpx.TimeoutException:
        return 0


def test_requests_that_failed_do_not_keep_an_adapter(server: Server, folder: Path) -> None:
    """An adapter is unloaded when its last user ended: one that was refused is none."""
    text, wrong = rag_text(0, 1), {"custom_params": {"sgl_blend_ratio": 7}}
    body: dict[str, Any] = {"text": text, "lora_path": "two", "sampling_params": wrong}
    refused: list[dict[str, Any]] = [
        body,
        {**body, "text": [text, text], "lora_path": ["two", "one"], "sampling_params": [{}, wrong]},
        {**body, "sampling_params": {**wrong, "n": 2}},
        {**body, "text": text * 200, "sampling_params": {}},  # too long, as on stock
    ]
    assert [_post(server, "/generate", one) for one in refused] == [400] * len(refused)
    if hasattr(TokenizerManager, "_release_lora_once"):  # SGLang 0.5.21 itself counts n > 1 wrongly
        several = {"max_new_tokens": 2, "n": 2, "temperature": 0.5}
        assert _post(server, "/generate", {**body, "sampling_params": several}) == 200
    long = {"max_new_tokens": 4_000, "ignore_eos": True}
    assert _post(server, "/generate", {**body, "sampling_params": long}, 0.5) == 0
    queued = [{**body, "text": f"{n} {text}", "sampling_params": {}} for n in range(60)]
    with ThreadPoolExecutor(60) as pool:
        statuses = list(pool.map(lambda one: _post(server, "/generate", one, 0.3), queued))
    assert 0 in statuses, "nobody hung up"
    for name in ("two", "one"):
        assert _post(server, "/unload_lora_adapter", {"lora_name": name}) == 200
        path = str(make_adapter(folder / f"{name} again", 3))
        assert _post(server, "/load_lora_adapter", {"lora_name": name, "lora_path": path}) == 200
        assert_is_full_prefill(server, name)

"""A model with a vision tower over HTTP: text is blended, and images are SGLang's own business."""

import base64
import io
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from servers import Server, rag_text, start_server, stop
from test_images import IS_REFUSED
from tiny_models import VISION, make_text_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(IS_REFUSED, reason="vision models are refused with this SGLang"),
]

BLEND = ("--enable-blend", "--blend-when", "always", "--blend-check-layer", "1")


def serve(flags: tuple[str, ...], folder: Path) -> Iterator[Server]:
    model = make_text_model("mistral3", folder.parent)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags]
    command.append("--disable-fast-image-processor")  # SGLang 0.5.17 would take a GPU for it
    running = start_server(command, folder / "log", Path(__file__).parents[1])
    yield running
    stop(running)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for running in serve(BLEND, tmp_path_factory.mktemp("blending")):
        for number in range(3):  # every document is stored then
            answered(running, rag_text(number))
        running.wait_for_builds()
        yield running


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve((), tmp_path_factory.mktemp("stock"))


def picture(seed: int) -> str:
    """Return a small picture of noise, as a client puts it into a request."""
    from PIL import Image

    side = VISION["image_size"]
    noise = random.Random(seed).randbytes(3 * side * side)
    content = io.BytesIO()
    Image.frombytes("RGB", (side, side), noise).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def ask(server: Server, text: str, *pictures: Any, **params: Any) -> tuple[int, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": params or None}
    body: dict[str, Any] = {"text": text, "return_logprob": True, "sampling_params": sampling}
    return server.request("/generate", body | ({"image_data": list(pictures)} if pictures else {}))


def answered(server: Server, text: str, *pictures: str, **params: Any) -> dict[str, Any]:
    status, answer = ask(server, text, *pictures, **params)
    assert status == 200, answer
    found: dict[str, Any] = answer["meta_info"]
    return found


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    for one, other in zip(
        found["output_token_logprobs"], want["output_token_logprobs"], strict=True
    ):
        assert one[1] == other[1]
        assert one[0] == pytest.approx(other[0], abs=1e-3)


def test_text_is_blended(server: Server, stock: Server) -> None:
    text = rag_text(1, 0, question="And where is Burgas?")
    found = answered(server, text, sgl_blend_ratio=1.0)
    assert found["sgl_blend"][0]["chunk_hits"] >= 1, found
    assert_same(found, answered(server, text, sgl_blend=False))


def test_an_image_is_answered_as_by_stock(server: Server, stock: Server) -> None:
    """Other pictures under the same text, and text with chunks around them, also at the same time."""
    text = "What is this? [IMG] " + rag_text(0, 1)
    without = "What is this? [IMG] " + "Answer in one word. " * 8
    cases = [(text, picture(seed)) for seed in (1, 2, 1)] + [(without, picture(3))]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: answered(server, *case), cases))
    for case, told in zip(cases, found, strict=True):
        assert told["sgl_blend"][0]["fallback"] == "multimodal"
        assert told["sgl_blend"][0]["recomputed_tokens"] == 0
        plain = case[0].replace("<|reserved_0|>", "")
        assert_same(told, answered(stock, plain, case[1]))
    assert found[0]["output_token_logprobs"] != found[1]["output_token_logprobs"]


def test_a_chat_with_an_image_is_answered_as_by_stock(server: Server, stock: Server) -> None:
    content = [
        {"type": "text", "text": "Tell me. "},
        {"type": "image_url", "image_url": {"url": picture(4)}},
    ]
    body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    body |= {"temperature": 0}
    answers = [one.request("/v1/chat/completions", body) for one in (server, stock)]
    assert [status for status, _ in answers] == [200, 200], answers
    ours, theirs = (told["choices"][0]["message"]["content"] for _, told in answers)
    assert ours == theirs


WRONG: list[Any] = [
    "data:image/png;base64,AAAA",
    "/nowhere.png",
    "x" * 10_000,
    7,
    [[]],
    {"format": "processor_output"},
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_no_image_harms_nobody(server: Server, stock: Server, number: int) -> None:
    text = "What is this? [IMG] Answer in one word. "
    assert ask(server, text, WRONG[number])[0] == ask(stock, text, WRONG[number])[0]
    # An image without its place, and a place without its image.
    ask(server, rag_text(1, 2), picture(5))
    ask(server, "[IMG]" * 7 + rag_text(2, 0))
    server.wait_for_builds()
    text = rag_text(*list(permutations(range(3)))[number])  # in an order of its own
    found = answered(server, text, sgl_blend_ratio=1.0)
    assert found["sgl_blend"][0]["chunk_hits"] >= 1
    assert_same(found, answered(server, text, sgl_blend=False))

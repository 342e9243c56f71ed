"""Models with a vision tower: text is blended, and a prompt with an image is SGLang's own business."""

from array import array
from importlib.metadata import version
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Prompt, largest_difference, rag_prompt
from law_prompts import CHUNKS, QUESTION, SYSTEM
from sparse_path import TOLERANCE
from tiny_models import IMAGE_TOKEN, VISION, class_of

from sgl_blend.engine.compatibility import NOT_TESTED
from sgl_blend.engine.requests import take_out

__all__ = ["model_folder", "start_engine"]  # fixtures

IS_REFUSED = version("sglang") in NOT_TESTED[class_of("mistral3")]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(IS_REFUSED, reason="vision models are refused with this SGLang"),
]

SIDE = VISION["image_size"] // VISION["patch_size"] // 2  # patches are merged two by two
IMAGE = [IMAGE_TOKEN] * (SIDE * SIDE)


def _with_image(driver: Driver, prompt: Prompt, seed: int) -> Any:
    """Return a request as SGLang's processor sends it: pixels, and where their tokens stand."""
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )

    received = driver.receive(prompt)
    size = VISION["image_size"]
    start = prompt.tokens.index(IMAGE_TOKEN)
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(seed))
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=pixels,
        offsets=[(start, start + len(IMAGE) - 1)],
        model_specific_data={"image_sizes": [(size, size)]},
    )
    item.set_pad_value()
    received.mm_inputs = MultimodalProcessorOutput(mm_items=[item], im_token_id=IMAGE_TOKEN)
    received.input_ids = array("q", prompt.tokens)
    return received


def _ask(
    driver: Driver, seeds: list[int], prompts: list[Prompt], beside: list[Prompt]
) -> tuple[list[Answer], list[Answer]]:
    """Ask prompts with images in one batch with others, of which the first was asked before."""
    driver.settle()
    driver.flush()
    for prompt in beside[:1]:
        driver.ask(prompt)
        driver.settle()
    others = [driver.submit(prompt) for prompt in beside]
    reqs = [
        driver.hand_over(_with_image(driver, prompt, seed))
        for seed, prompt in zip(seeds, prompts, strict=True)
    ]
    driver.run_until(lambda: all(req.finished() for req in [*others, *reqs]))
    driver.settle()
    return [driver.answer(req) for req in reqs], [driver.answer(req) for req in others]


def _shows_image(*chunks: int, **rest: Any) -> Prompt:
    segments = [SYSTEM, IMAGE, *(CHUNKS[number] for number in chunks), QUESTION]
    return Prompt(segments, list(range(2, 2 + len(chunks))), max_new_tokens=2, **rest)


def test_a_prompt_with_an_image_is_answered_as_by_stock(start_engine: StartEngine) -> None:
    blending = start_engine("mistral3", chunked_prefill_size=-1)
    stock = start_engine("mistral3", enable_blend=None, chunked_prefill_size=-1)
    prompts = [_shows_image(0, 1), _shows_image(0, 1)]
    moved = rag_prompt(SYSTEM, [CHUNKS[2], CHUNKS[0], CHUNKS[1]], QUESTION)
    first = rag_prompt(SYSTEM, [CHUNKS[0], CHUNKS[1], CHUNKS[2]], QUESTION)

    got, others = blending.call(_ask, [1, 2], prompts, [first, moved])

    plain = [Prompt([prompt.tokens], max_new_tokens=2) for prompt in prompts]
    want, _ = stock.call(_ask, [1, 2], plain, [])
    assert largest_difference(want[0].logprobs[0], want[1].logprobs[0]) > 1, "images go unseen"
    for mine, theirs in zip(got, want, strict=True):
        assert mine.report["fallback"] == "multimodal"
        assert mine.report["reused_tokens"] == 0
        assert mine.output_ids == theirs.output_ids
        assert largest_difference(mine.logprobs[0], theirs.logprobs[0]) <= TOLERANCE
    # Whoever shares a batch with an image is computed in full, and still answered rightly.
    assert others[1].report["chunk_hits"] == 3
    assert others[1].report["reused_tokens"] == 0
    full = blending.ask(Prompt([moved.tokens], salt="full"))[0]
    assert largest_difference(others[1].logprobs[0], full.logprobs[0]) <= TOLERANCE


def _ask_with_separator(driver: Driver, prompt: Prompt) -> Answer:
    driver.runtime.intake._separator_id = 7
    try:
        return _ask(driver, [5], [prompt], [])[0][0]
    finally:
        driver.runtime.intake._separator_id = None


def test_separators_are_taken_out_around_an_image(start_engine: StartEngine) -> None:
    # SGLang's processor has noted where the image stands, which is another place without them.
    blending = start_engine("mistral3", chunked_prefill_size=-1)
    stock = start_engine("mistral3", enable_blend=None, chunked_prefill_size=-1)
    marked = Prompt([SYSTEM, [7], CHUNKS[0], [7], IMAGE, [7], CHUNKS[1], [7], QUESTION])
    plain = Prompt([SYSTEM, CHUNKS[0], IMAGE, CHUNKS[1], QUESTION])

    got = blending.call(_ask_with_separator, marked)

    (want,), _ = stock.call(_ask, [5], [plain], [])
    assert got.report["prompt_tokens"] == len(plain.tokens)
    assert got.report["fallback"] == "multimodal"
    assert largest_difference(got.logprobs[0], want.logprobs[0]) <= TOLERANCE


def test_with_offsets_separators_are_tokens_like_others(start_engine: StartEngine) -> None:
    blending = start_engine("mistral3", chunked_prefill_size=-1)
    stock = start_engine("mistral3", enable_blend=None, chunked_prefill_size=-1)
    segments = [SYSTEM, [7], CHUNKS[0], IMAGE, QUESTION]

    got = blending.call(_ask_with_separator, Prompt(segments, [2]))

    (want,), _ = stock.call(_ask, [5], [Prompt(segments)], [])
    assert got.report["prompt_tokens"] == len(Prompt(segments).tokens)
    assert largest_difference(got.logprobs[0], want.logprobs[0]) <= TOLERANCE


def _with_failed_image(driver: Driver, prompt: Prompt) -> str:
    """Hand over a request whose image SGLang could not read; return how it ended."""
    from sglang.srt.managers.io_struct import MMInputsProcessError

    received = driver.receive(prompt)
    received.input_ids = array("q", prompt.tokens)
    received.mm_inputs = MMInputsProcessError("no memory to share")
    driver.runtime.intake._separator_id = 7
    try:
        req = driver.hand_over(received)
    finally:
        driver.runtime.intake._separator_id = None
    message: str = (req.finished_reason or req.to_finish).message
    return message


@pytest.mark.skipif(version("sglang") == "0.5.17", reason="a later SGLang reports such images")
def test_an_image_that_failed_ends_its_request_alone(start_engine: StartEngine) -> None:
    engine = start_engine("mistral3", chunked_prefill_size=-1)
    prompt = Prompt([SYSTEM, [7], CHUNKS[0], [7], QUESTION])
    assert "no memory to share" in engine.call(_with_failed_image, prompt)
    engine.ask(rag_prompt(SYSTEM, [CHUNKS[0]], QUESTION))


def _taken_out(driver: Driver) -> Any:
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )

    tokens = [7, 1, 50, 50, 7, 7, 2, 51, 3, 7]
    offsets = [[(2, 3)], [(7, 7)], None]
    received = driver.receive(Prompt([tokens]))
    received.input_ids = array("q", tokens)
    received.mm_inputs = MultimodalProcessorOutput(
        mm_items=[MultimodalDataItem(modality=Modality.IMAGE, offsets=one) for one in offsets]
    )
    received.mm_inputs.input_ids = tokens[:-1]  # no twin of the prompt
    received.mm_inputs.padded_input_ids = [7, 1, 900, 900, 7, 7, 2, 901, 3, 7]
    take_out(received, 7)
    images = received.mm_inputs
    places = [item.offsets for item in images.mm_items]
    return received.input_ids.tolist(), places, images.input_ids, images.padded_input_ids


def test_places_of_images_move_with_what_is_taken_out(start_engine: StartEngine) -> None:
    ids, places, other, padded = start_engine("mistral3", chunked_prefill_size=-1).call(_taken_out)
    assert ids == [1, 50, 50, 2, 51, 3]
    assert places == [[(1, 2)], [(4, 4)], None]
    assert padded == [1, 900, 900, 2, 901, 3]
    assert other == [7, 1, 50, 50, 7, 7, 2, 51, 3]


def test_text_is_blended_after_images_were_there(start_engine: StartEngine) -> None:
    engine = start_engine("mistral3", chunked_prefill_size=-1)
    engine.call(_ask, [3], [_shows_image(3)], [])
    prompt = rag_prompt(SYSTEM, [CHUNKS[4], CHUNKS[5]], QUESTION)
    engine.ask(prompt)
    engine.settle()

    report = engine.ask(rag_prompt(SYSTEM, [CHUNKS[5], CHUNKS[4]], QUESTION))[0].report

    assert report["fallback"] is None
    assert report["reused_tokens"] > 0


def test_a_prompt_with_an_image_reads_nothing_of_chunks(start_engine: StartEngine) -> None:
    engine = start_engine("mistral3", chunked_prefill_size=-1)
    engine.ask(rag_prompt(SYSTEM, [CHUNKS[0]], QUESTION))
    engine.settle()
    forged = _shows_image(0, salt=engine.call(Driver.chunk_salt))

    (answer,), _ = engine.call(_ask, [4], [forged], [])

    assert answer.report["prefix_tokens"] == 0
    assert answer.report["fallback"] == "malformed"


def test_adapters_of_a_vision_model_are_refused(start_engine: StartEngine) -> None:
    with pytest.raises(AssertionError, match=r"--enable-lora is not supported .* vision model"):
        start_engine(
            "mistral3",
            enable_lora=True,
            lora_paths=[],
            lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            max_lora_rank=4,
            lora_backend="torch_native",
        )

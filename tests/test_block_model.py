"""Models that were trained with chunks that see only themselves, and ``--blend-preset block``."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from harness import Driver, Engine, largest_difference
from harness import Prompt as Request

from examples.tinyrag.network import TinyLlama, load_hf, seen_in_blocks, shape_of
from examples.tinyrag.train import ASK_ID, CHUNK_ID
from examples.tinyrag.words import vocabulary
from examples.tinyrag.world import BLOCK_KINDS, FULL, make_example, make_held_out
from sgl_blend.commands.evaluation.items import ItemLine
from sgl_blend.commands.evaluation.prompts import find_templates, load_encoder, make_prompt
from sgl_blend.errors import ConfigError
from sgl_blend.settings.config import BlendConfig

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parents[1] / "examples" / "tinyrag"
BLOCK, USUAL = FOLDER / "block", FOLDER / "model"
NUM_LAYERS = 6
TOLERANCE = 1e-4
"""Of log-probabilities in float32, as in law L1."""


def requests(seed: int, count: int) -> tuple[list[Request], list[int]]:
    """Write held-out prompts that a question can answer by itself; return them and their answers."""
    templates, encode = find_templates(str(BLOCK)), load_encoder(str(BLOCK))
    found, answers = [], []
    for item in make_held_out(seed, count, BLOCK_KINDS):
        prompt = make_prompt(msgspec.convert(item, ItemLine).to_item(), templates, encode)
        edges = [0, *dict.fromkeys(prompt.spans), len(prompt.token_ids)]
        segments = [list(prompt.token_ids[a:b]) for a, b in itertools.pairwise(edges)]
        found.append(Request(segments, list(range(1, len(segments) - 1))))
        answers.append(vocabulary().index(msgspec.convert(item["answers"], list[str])[0]))
    return found, answers


def in_blocks(folder: Path, tokens: Sequence[int]) -> list[float]:
    """Return the log-probabilities after a prompt whose chunks see only themselves, by plain torch."""
    model = TinyLlama(shape_of({"vocab_size": len(vocabulary()), "num_layers": NUM_LAYERS}))
    load_hf(model, folder)
    model.double()
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = model(ids, None, seen_in_blocks(ids, CHUNK_ID, ASK_ID))[0][0, -1]
    after: list[float] = logits.log_softmax(-1).tolist()
    return after


@pytest.fixture(scope="module", params=[BLOCK, USUAL], ids=["trained in blocks", "usual"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    running = Engine(folder, enable_blend=True, blend_preset="block")
    yield running
    running.close()


def test_a_preset_with_a_name_fills_in_what_was_not_given() -> None:
    given = {"enable_blend": True, "blend_preset": "block"}

    filled = BlendConfig.resolve({**given, "blend_min_chunk_tokens": 32})

    assert (filled.blend_policy, filled.blend_recompute_ratio) == ("block", 0.0)
    assert (filled.blend_build_prefix, filled.blend_on_miss) == ("none", "build")
    assert filled.blend_min_chunk_tokens == BlendConfig().blend_min_chunk_tokens == 32
    assert BlendConfig.resolve(given).blend_min_chunk_tokens == 1
    with pytest.raises(ConfigError, match="blend_preset blocks: there is no such file"):
        BlendConfig.resolve({**given, "blend_preset": "blocks"})


def test_a_preset_without_blending_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^blend_preset has no effect without enable_blend"):
        BlendConfig.resolve({"blend_preset": "block"})


def test_a_canary_has_nothing_to_compare_with() -> None:
    given = {"enable_blend": True, "blend_preset": "block", "blend_canary_rate": 0.1}
    with pytest.raises(ConfigError, match="blend_canary_rate compares with a full prefill"):
        BlendConfig.resolve(given)


def test_chunks_see_only_themselves_and_questions_see_all() -> None:
    tokens = make_example(random.Random(1), FULL, 2, BLOCK_KINDS).tokens
    seen = seen_in_blocks(torch.tensor([tokens]), CHUNK_ID, ASK_ID)[0, 0]
    chunks = [place for place, token in enumerate(tokens) if token == CHUNK_ID]
    ask = tokens.index(ASK_ID)
    assert seen[chunks[0] - 1].tolist() == [True] * chunks[0] + [False] * (len(tokens) - chunks[0])
    for start, stop in zip(chunks, [*chunks[1:], ask], strict=True):
        for row in range(start, stop):
            assert torch.nonzero(seen[row]).flatten().tolist() == list(range(start, row + 1))
    for row in range(ask, len(tokens)):
        assert torch.nonzero(seen[row]).flatten().tolist() == list(range(row + 1))


def test_the_answer_is_that_of_a_forward_in_blocks(engine: Engine, folder: Path) -> None:
    prompts, _ = requests(seed=11, count=6)
    prompts[1].segments[2] = prompts[1].segments[2][:1]  # a chunk of a single token is one, too

    for prompt in prompts:
        answer = engine.ask(prompt)[0]

        want = in_blocks(folder, prompt.tokens)
        assert largest_difference(answer.logprobs[0], want) <= TOLERANCE
        report = answer.report
        chunk_tokens = sum(len(prompt.segments[index]) for index in prompt.chunk_at)
        assert report["fallback"] is None
        assert (report["reused_tokens"], report["recomputed_tokens"]) == (chunk_tokens, 0)
        # None of their rows runs in any layer, the check layer included.
        assert report["layer_rows"] == NUM_LAYERS * report["computed_tokens"]


def _first_tokens(driver: Driver, prompts: list[Request]) -> list[int]:
    return [answer.output_ids[0] for prompt in prompts for answer in driver.ask(prompt)]


def test_only_a_model_that_was_trained_so_answers_rightly(engine: Engine, folder: Path) -> None:
    prompts, answers = requests(seed=12, count=100)

    given = engine.call(_first_tokens, prompts)

    right = sum(got == want for got, want in zip(given, answers, strict=True)) / len(answers)
    if folder == BLOCK:
        assert right >= 0.97
    else:
        assert right <= 0.7

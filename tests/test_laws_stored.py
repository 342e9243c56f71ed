"""The laws of docs/laws.md about what is stored, and for whom; L8 beside them."""

from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Answer, Driver, Engine, Prompt, namespace_of, rag_prompt, random_tokens
from law_prompts import CHUNKS, QUESTION, SYSTEM, same_bits, served_kind

from sgl_blend.commands.common.server import stock_environment

__all__ = ["model_folder", "served_kind", "start_engine"]  # fixtures

NEIGHBOURS = {"llama-partial-gptj", "glm4"}
"""Kinds whose rotated pairs are neighbours, not the halves of a head."""

pytestmark = pytest.mark.engine

# --- rotation, against frequencies that transformers computes ---


def _reused_and_stored(driver: Driver, prompt: Prompt, chunk: list[int]) -> tuple[Any, Any, Any]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    req = driver.submit(prompt)
    salt = namespace_of(req)
    driver.run_until(req.finished)
    config = driver.scheduler.model_config.hf_config
    kind = config.rope_parameters["rope_type"]
    rotary_dim = int(config.head_dim * getattr(config, "partial_rotary_factor", 1.0))
    if kind == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        frequencies = config.rope_parameters["rope_theta"] ** -exponents
    else:
        frequencies = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].double()
    blended = driver.kv(prompt.tokens, salt)
    return blended, driver.kv([*SYSTEM, *chunk], driver.chunk_salt()), frequencies


def _rotate_by_complex_numbers(
    k: torch.Tensor, delta: int, frequencies: torch.Tensor, *, neox: bool
) -> torch.Tensor:
    half = frequencies.numel()
    rotary = k[..., : 2 * half].double()
    x, y = (
        (rotary[..., :half], rotary[..., half:]) if neox else (rotary[..., ::2], rotary[..., 1::2])
    )
    z = torch.complex(x, y) * torch.polar(
        torch.ones(half, dtype=torch.float64), delta * frequencies
    )
    parts = [z.real, z.imag] if neox else [torch.stack([z.real, z.imag], -1).flatten(-2)]
    return torch.cat([*parts, k[..., 2 * half :].double()], dim=-1)


def test_reused_keys_are_the_stored_keys_at_their_new_position(
    start_engine: StartEngine, served_kind: str
) -> None:
    engine = start_engine(served_kind, blend_on_miss="build", chunked_prefill_size=-1)
    far = random_tokens(55, 900)
    prompt = rag_prompt(SYSTEM, [far, CHUNKS[2]], QUESTION, params={"sgl_blend_policy": "none"})

    blended, stored, frequencies = engine.call(_reused_and_stored, prompt, CHUNKS[2])

    start, length = len(SYSTEM) + len(far), len(CHUNKS[2])
    for layer in (2, 3):  # above the check layer, where KV is copied
        k, v = (kv[start : start + length] for kv in blended[layer])
        stored_k, stored_v = (kv[len(SYSTEM) :] for kv in stored[layer])
        moved = _rotate_by_complex_numbers(
            stored_k, len(far), frequencies, neox=served_kind.partition("+")[0] not in NEIGHBOURS
        )
        assert torch.equal(v, stored_v)
        error = (k.double() - moved).abs().max() / moved.abs().max()
        rounding = torch.finfo(k.dtype).eps / 2 if k.dtype.itemsize == 1 else 0.0
        assert error < 1e-4 + rounding, f"layer {layer}: {error}"


# --- L3: exact requests never see blended KV ---


def test_l3_exact_requests_are_bit_equal_to_a_cold_server(
    start_engine: StartEngine, served_kind: str
) -> None:
    engine = start_engine(served_kind, blend_on_miss="compute")
    exact = [
        Prompt([SYSTEM, CHUNKS[i], CHUNKS[j], QUESTION], max_new_tokens=3)
        for i, j in ((0, 1), (1, 0), (4, 2))
    ]
    engine.flush()
    cold = engine.call(_ask_in_turn, exact)
    engine.flush()
    for round_ in range(3):
        for i, j in ((0, 1), (1, 0), (4, 2)):
            params = {"sgl_blend_ratio": (0.0, 0.15, 1.0)[round_]}
            engine.ask(rag_prompt(SYSTEM, [CHUNKS[i], CHUNKS[j]], QUESTION, params=params))
        engine.settle()

    warm = engine.call(_ask_in_turn, exact)

    assert warm[0].report["prefix_tokens"] == 0, "an exact request matched a blended path"
    assert [answer.report for answer in warm] == [answer.report for answer in cold]
    assert [answer.logprobs for answer in warm] == [answer.logprobs for answer in cold]


def _ask_in_turn(driver: Driver, prompts: list[Prompt]) -> list[Answer]:
    return [driver.ask(prompt)[0] for prompt in prompts]


# --- L4: chunk KV is canonical ---


def _stored_chunk(
    driver: Driver, prefix: list[int], chunk: list[int]
) -> list[tuple[torch.Tensor, ...]]:
    return driver.kv([*prefix, *chunk], driver.chunk_salt())


def _assert_l4(engine: Engine, chunk: list[int]) -> None:
    """Store a chunk on an empty server, and again among everything that could change its KV."""
    engine.flush()
    engine.ask(rag_prompt(SYSTEM, [chunk], QUESTION))
    engine.settle()
    cold = engine.call(_stored_chunk, SYSTEM, chunk)
    engine.flush()

    # An attacker's text before the document, other documents, plain traffic, all in one batch.
    engine.ask(
        rag_prompt(SYSTEM, [random_tokens(666, 80), chunk], random_tokens(5, 9)),
        rag_prompt(SYSTEM, [CHUNKS[1], chunk, CHUNKS[0]], QUESTION),
        rag_prompt(random_tokens(8, 21), [chunk], QUESTION),
        Prompt([random_tokens(3, 130)]),
    )
    engine.settle()

    warm = engine.call(_stored_chunk, SYSTEM, chunk)
    for (k1, v1), (k2, v2) in zip(cold, warm, strict=True):
        assert same_bits(k1, k2)
        assert same_bits(v1, v2)


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_l4_chunk_kv_is_bit_equal_whatever_was_served_before(
    start_engine: StartEngine, on_miss: str
) -> None:
    # So wide a model, and so short a chunk, that rounding depends on the rows of a forward: KV
    # computed in one forward with anything else would differ in its last bits.
    engine = start_engine("llama-wide", blend_on_miss=on_miss, blend_min_chunk_tokens=4)
    _assert_l4(engine, random_tokens(77, 12))


def test_l4_chunk_kv_is_bit_equal_in_every_model(
    start_engine: StartEngine, served_kind: str
) -> None:
    _assert_l4(start_engine(served_kind, blend_on_miss="compute"), random_tokens(77, 45))


def test_l4_holds_where_chunked_prefill_cuts_the_batch_of_builds(start_engine: StartEngine) -> None:
    engine = start_engine("llama-wide", blend_on_miss="build", chunked_prefill_size=100)
    chunks = [random_tokens(80 + i, 90) for i in range(3)]
    engine.flush()
    engine.ask(rag_prompt(SYSTEM, [chunks[1]], QUESTION))
    alone = engine.call(_stored_chunk, SYSTEM, chunks[1])
    engine.flush()

    engine.ask(rag_prompt(SYSTEM, chunks, QUESTION))

    together = engine.call(_stored_chunk, SYSTEM, chunks[1])
    for (k1, v1), (k2, v2) in zip(alone, together, strict=True):
        assert same_bits(k1, k2)
        assert same_bits(v1, v2)


def test_l4_chunk_kv_is_that_of_the_chunk_prefilled_alone(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build")
    engine.ask(rag_prompt(SYSTEM, [CHUNKS[0], CHUNKS[4]], QUESTION))
    engine.ask(Prompt([SYSTEM, CHUNKS[4]], salt="alone"))

    built = engine.call(_stored_chunk, SYSTEM, CHUNKS[4])
    alone = engine.call(Driver.kv, [*SYSTEM, *CHUNKS[4]], "alone")

    for (k1, v1), (k2, v2) in zip(built, alone, strict=True):
        torch.testing.assert_close(k1, k2, rtol=0, atol=1e-4)
        torch.testing.assert_close(v1, v2, rtol=0, atol=1e-4)


def test_l4_with_build_an_answer_does_not_depend_on_the_cache(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build")
    prompt = rag_prompt(SYSTEM, [CHUNKS[i] for i in (3, 0, 2)], QUESTION, max_new_tokens=3)
    engine.flush()
    cold = engine.ask(prompt)[0]
    again = engine.ask(prompt)[0]
    engine.flush()
    engine.ask(Prompt([prompt.tokens], max_new_tokens=3))  # the exact namespace knows it all
    engine.ask(rag_prompt(SYSTEM, [CHUNKS[2], CHUNKS[5]], QUESTION))

    warm = engine.ask(prompt)[0]

    assert cold.report == again.report == warm.report
    assert cold.logprobs == again.logprobs == warm.logprobs


# --- L7: tenants ---


def test_l7_two_tenants_never_share_chunks(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="compute")
    engine.flush()
    prompt = rag_prompt(SYSTEM, [CHUNKS[0], CHUNKS[1]], QUESTION, salt="tenant-a")
    engine.ask(prompt)
    engine.settle()
    again = rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[0]], QUESTION, salt="tenant-a")
    other = rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[0]], QUESTION, salt="tenant-b")

    assert engine.ask(again)[0].report["chunk_hits"] == 2
    report = engine.ask(other)[0].report
    assert report["chunk_hits"] == 0
    assert report["prefix_tokens"] == 0


def test_l7_a_client_cannot_name_a_chunk_namespace(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="compute")
    engine.flush()
    engine.ask(rag_prompt(SYSTEM, [CHUNKS[0]], QUESTION))
    engine.settle()
    salt = engine.call(Driver.chunk_salt)

    forged = engine.ask(Prompt([SYSTEM, CHUNKS[0], QUESTION], salt=salt))[0]

    assert forged.report["fallback"] == "malformed"
    assert forged.report["prefix_tokens"] == 0


# --- L8: off means off ---


def test_l8_with_blend_off_nothing_is_attached_and_answers_are_stock(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = start_engine(enable_blend=False)
    monkeypatch.setenv(*stock_environment()[0].split("="))
    stock = start_engine(enable_blend=None)
    assert off.call(_modules_of_ours)
    assert stock.call(_modules_of_ours) == [], "the stock engine runs lines of ours"
    prompts = [Prompt([SYSTEM, CHUNKS[i], QUESTION], max_new_tokens=5, salt="a") for i in range(4)]

    with_plugin = off.ask(*prompts)
    without = stock.ask(*prompts)

    assert off.call(_attached) == []
    assert [a.logprobs for a in with_plugin] == [a.logprobs for a in without]
    assert all(answer.report == {} for answer in with_plugin)


def _modules_of_ours(driver: Driver) -> list[str]:
    return driver.modules_of_ours


def _attached(driver: Driver) -> list[str]:
    scheduler = driver.scheduler
    owners = (scheduler, scheduler.tree_cache, scheduler.tp_worker.model_runner)
    return [type(owner).__name__ for owner in owners if hasattr(owner, "sgl_blend")]

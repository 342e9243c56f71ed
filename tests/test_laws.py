"""The laws of docs/laws.md about what is computed, on SGLang's real scheduler, pool and model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import (
    Answer,
    Driver,
    Prompt,
    largest_difference,
    namespace_of,
    rag_prompt,
    random_tokens,
)
from law_prompts import (
    CHUNKS,
    HOLE,
    QUESTION,
    SYSTEM,
    full_prefill,
    same_bits,
    scattered,
    served_kind,
)
from sparse_path import (
    TOLERANCE,
    Comparison,
    assert_drops_and_is_full_prefill,
    assert_keeps_all_and_is_full_prefill,
    assert_same,
    on_all_rows,
    on_true_kv,
)
from tiny_models import NUM_LAYERS, has_experts

from sgl_blend.policies import NAMED, POLICIES, recompute_budget
from sgl_blend.policies.spec import Sees
from sgl_blend.settings.config import BlendConfig

__all__ = ["model_folder", "served_kind", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

# --- L1: what blending computes is full prefill ---


def test_l1_rows_dropped_for_true_kv_change_nothing(
    start_engine: StartEngine, served_kind: str
) -> None:
    engine = start_engine(served_kind, blend_on_miss="build", chunked_prefill_size=-1)
    for ratio in (0.0, 0.15, 0.5):
        prompt = scattered(params={"sgl_blend_ratio": ratio}, max_new_tokens=4)

        got = engine.call(on_true_kv, [prompt])

        assert_drops_and_is_full_prefill(got)
        assert got.blended[0].report["prefix_tokens"] == len(SYSTEM) + len(CHUNKS[3])


def test_l1_rows_kept_in_the_sparse_path_are_full_prefill(
    start_engine: StartEngine, served_kind: str
) -> None:
    engine = start_engine(served_kind, blend_on_miss="build", chunked_prefill_size=-1)

    got = engine.call(on_all_rows, [scattered(max_new_tokens=4)])

    assert_keeps_all_and_is_full_prefill(got)


def test_reuse_is_visible_in_the_logits(start_engine: StartEngine, served_kind: str) -> None:
    # Without this, L1 would also hold for a model whose logits do not depend on the chunks.
    engine = start_engine(served_kind, blend_on_miss="build", chunked_prefill_size=-1)
    prompt = rag_prompt(SYSTEM, [CHUNKS[i] for i in (3, 0, 2)], QUESTION)
    prompt.params = {"sgl_blend_ratio": 0.0}

    blended = engine.ask(prompt)[0]

    full = full_prefill(engine, prompt)
    assert largest_difference(blended.logprobs[0], full.logprobs[0]) > 100 * TOLERANCE


def test_ratio_one_computes_every_token_of_moved_chunks(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build", chunked_prefill_size=-1)
    prompt = scattered(params={"sgl_blend_ratio": 1.0}, max_new_tokens=4)

    blended = engine.ask(prompt)[0]

    report = blended.report
    assert report["reused_tokens"] == 0
    assert report["recomputed_tokens"] == len(CHUNKS[0]) + len(CHUNKS[2])
    assert report["computed_tokens"] == len(HOLE) + len(QUESTION)
    assert_same(blended, full_prefill(engine, prompt))


FINDS_WRONG_KV = {"hkvd", "hkvd-k", "gradual", "hybrid", "funnel", "remembered", "oracle"}
"""Policies that must recompute rows whose stored KV is far from the fresh one."""


def rows_to_recompute(policy: str, ratio: float) -> list[int]:
    """Return positions of ``scattered`` that a policy surely recomputes in every layer.

    Those that compare KV are given few rows where it is wrong, which they must find. Those that see
    nothing are told by what they take anyway. Others may leave wrong KV, and are given none.
    """
    starts = [len(SYSTEM) + len(CHUNKS[3]) + len(HOLE)]
    starts.append(starts[0] + len(CHUNKS[0]))
    lengths = [len(CHUNKS[0]), len(CHUNKS[2])]
    positions = range(starts[0], starts[1] + lengths[1])
    kind = POLICIES[policy]
    if kind.sees is not Sees.NOTHING:
        return list(positions[5::11]) if policy in FINDS_WRONG_KV else []
    chosen = kind.select(None, lengths, recompute_budget(policy, ratio, sum(lengths)))
    return [positions[row] for row in chosen.tolist()]


@pytest.mark.parametrize("policy", sorted(set(NAMED) - {"all"}))
@pytest.mark.parametrize("check_layer", [1, 2])
def test_l1_every_policy_recomputes_what_is_stored_wrong(
    start_engine: StartEngine, policy: str, check_layer: int
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=check_layer)
    params = {"sgl_blend_ratio": 0.4, "sgl_blend_policy": policy}
    wrong = rows_to_recompute(policy, 0.4)
    assert wrong or policy in ("none", "block") or POLICIES[policy].sees is not Sees.NOTHING

    got = engine.call(on_true_kv, [scattered(params=params, max_new_tokens=2)], None, wrong)

    assert_drops_and_is_full_prefill(got)


@pytest.mark.parametrize("policy", ["hkvd", "hkvd-k", "gradual", "hybrid"])
def test_scores_that_are_no_numbers_push_no_other_row_out(
    start_engine: StartEngine, policy: str
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=1)
    params = {"sgl_blend_ratio": 0.15, "sgl_blend_policy": policy}

    got = engine.call(on_true_kv, [scattered(params=params)], None, (), 1)

    assert_drops_and_is_full_prefill(got)


@pytest.mark.parametrize("policy", sorted(NAMED))
@pytest.mark.parametrize("check_layer", [1, 2])
def test_l1_every_policy_may_keep_all_rows(
    start_engine: StartEngine, policy: str, check_layer: int
) -> None:
    engine = start_engine(blend_on_miss="build", blend_eval=True, blend_check_layer=check_layer)
    params = {"sgl_blend_ratio": 0.4, "sgl_blend_policy": policy}

    got = engine.call(on_all_rows, [scattered(params=params, max_new_tokens=2)])

    assert_keeps_all_and_is_full_prefill(got)
    late = 0 if POLICIES[policy].skips_full_layers else NUM_LAYERS - 1 - check_layer
    early = POLICIES[policy].skips_full_layers or POLICIES[policy].trusts_memory
    assert len(got.reductions) == early + late


def test_a_larger_ratio_comes_nearer_to_full_prefill(start_engine: StartEngine) -> None:
    # hkvd, because in random weights every row that skips the lower layers costs something.
    engine = start_engine(blend_on_miss="build", blend_policy="hkvd")
    distance: dict[float, float] = {}
    for ratio in (0.0, 0.5, 0.9, 1.0):
        total = 0.0
        for shift in range(6):
            order = [CHUNKS[(i + shift) % 6] for i in (3, 0, 2, 5)]
            prompt = rag_prompt(SYSTEM, order, QUESTION, params={"sgl_blend_ratio": ratio})
            blended = torch.tensor(engine.ask(prompt)[0].logprobs[0], dtype=torch.float64)
            full = torch.tensor(full_prefill(engine, prompt).logprobs[0], dtype=torch.float64)
            total += float((full.exp() * (full - blended)).sum())
        distance[ratio] = total / 6
    assert distance[0.0] > distance[0.5] > distance[0.9] > distance[1.0]
    assert distance[1.0] < 1e-6


@pytest.mark.parametrize("kind", ["llama", "llama-mha-tied", "qwen3-yarn"])
def test_l1_holds_in_a_batch_of_blended_and_plain_requests(
    start_engine: StartEngine, kind: str
) -> None:
    # At ratio 1 nothing is dropped and all layers are stock. Beside a request that drops rows, the
    # exact ones go through ragged attention with it, and must not notice.
    engine = start_engine(kind, blend_on_miss="build", chunked_prefill_size=-1)
    one = {"sgl_blend_ratio": 1.0}
    partner = rag_prompt(SYSTEM, [CHUNKS[4], CHUNKS[1]], QUESTION)
    exact = [
        rag_prompt(SYSTEM, [CHUNKS[0], CHUNKS[1]], QUESTION, params=one, max_new_tokens=3),
        Prompt([random_tokens(500, 90)], salt="plain", max_new_tokens=3),
        rag_prompt(SYSTEM, [CHUNKS[1], CHUNKS[0]], QUESTION, params=one, max_new_tokens=3),
        rag_prompt(random_tokens(7, 33), [CHUNKS[5]], QUESTION, params=one, max_new_tokens=3),
        Prompt([[9, 8, 7]], salt="plain", max_new_tokens=3),
    ]
    engine.flush()
    for prompt in (partner, *exact[:4:2], exact[3]):
        engine.ask(prompt)  # so that every chunk is stored and all six share one batch

    blended, *answers = engine.call(_ask_in_one_batch, [partner, *exact])

    assert blended.report["reused_tokens"] > 0
    for prompt, answer in zip(exact, answers, strict=True):
        assert_same(answer, full_prefill(engine, prompt))


def _ask_in_one_batch(driver: Driver, prompts: list[Prompt]) -> list[Answer]:
    reqs = [driver.submit(prompt) for prompt in prompts]
    driver.step()
    assert all(req.output_ids for req in reqs), "the requests did not share a batch"
    driver.run_until(lambda: all(req.finished() for req in reqs))
    return [driver.answer(req) for req in reqs]


# Settings under which SGLang puts the rows of a prefill together in other ways.
LAYOUTS = [
    pytest.param({"chunked_prefill_size": 48}, id="chunked prefill"),
    pytest.param({"page_size": 16}, id="pages of 16"),
    pytest.param({"page_size": 16, "chunked_prefill_size": 48}, id="both"),
    pytest.param({"blend_max_build_prefix": 0}, id="built after BOS"),
]


@pytest.mark.parametrize("settings", LAYOUTS)
@pytest.mark.parametrize("policy", ["hkvd", "gradual", "query-aware", "first-k"])
def test_l1_holds_in_every_layout(
    start_engine: StartEngine, settings: dict[str, Any], policy: str
) -> None:
    engine = start_engine(blend_on_miss="build", **settings)
    # A prompt is cut by the rows that enter its first layer: with first-k, those that it chooses.
    ratio = 0.6 if POLICIES[policy].skips_full_layers else 0.15
    params = {"sgl_blend_ratio": ratio, "sgl_blend_policy": policy}
    prompt = scattered(params=params, max_new_tokens=3)

    dropped, kept = engine.call(on_true_kv, [prompt]), engine.call(on_all_rows, [prompt])

    assert_drops_and_is_full_prefill(dropped)
    assert_keeps_all_and_is_full_prefill(kept)
    if settings.get("chunked_prefill_size"):
        # Every step that holds rows of a moved chunk drops its share of them.
        assert len(dropped.reductions) >= 3


def _ask_beside_a_decode(driver: Driver, prompts: list[Prompt]) -> list[Answer]:
    """Prefill all but the first in one batch with a decode step of the first."""
    reqs = [driver.submit(prompts[0])]
    driver.run_until(lambda: len(reqs[0].output_ids) > 2)
    reqs += [driver.submit(prompt) for prompt in prompts[1:]]
    driver.step()
    assert driver.scheduler.last_batch.forward_mode.name == "MIXED"
    assert all(req.output_ids for req in reqs), "the requests did not share a batch"
    driver.run_until(lambda: all(req.finished() for req in reqs))
    return [driver.answer(req) for req in reqs]


@pytest.mark.parametrize("way", [on_true_kv, on_all_rows])
def test_l1_holds_in_a_batch_that_mixes_prefill_and_decode(
    start_engine: StartEngine, way: Callable[..., Comparison]
) -> None:
    engine = start_engine(blend_on_miss="build", chunked_prefill_size=2048, enable_mixed_chunk=True)
    decoding = Prompt([random_tokens(3, 30)], salt="d", max_new_tokens=30, logprobs=False)
    blended = [
        rag_prompt(
            SYSTEM,
            [CHUNKS[i] for i in order],
            QUESTION,
            params={"sgl_blend_ratio": ratio},
            max_new_tokens=12,
            logprobs=False,
        )
        for order, ratio in (((3, 1, 2), 0.15), ((5, 4, 0), 0.5))
    ]

    got = engine.call(way, [decoding, *blended], _ask_beside_a_decode)

    assert got.reductions
    assert (got.num_dropped > 0) == (way is on_true_kv)
    assert [a.output_ids for a in got.blended] == [a.output_ids for a in got.full]


def test_logprobs_of_the_prompt_are_those_of_full_prefill(start_engine: StartEngine) -> None:
    engine = start_engine(blend_on_miss="build")
    chunks = [CHUNKS[0], CHUNKS[3]]
    wanted_from = len(SYSTEM) + len(CHUNKS[0]) + 30
    prompt = rag_prompt(SYSTEM, chunks, QUESTION, logprob_start_len=wanted_from)
    prompt.params = {"sgl_blend_ratio": 0.15}

    got = engine.call(on_true_kv, [prompt])

    assert_drops_and_is_full_prefill(got)
    blended, full = got.blended[0], got.full[0]
    assert len(blended.input_logprobs) == len(full.input_logprobs) > len(QUESTION)
    assert largest_difference(blended.input_logprobs, full.input_logprobs) <= TOLERANCE
    # Rows whose logprob is wanted are computed: the choice is among the 30 before them.
    assert blended.report["recomputed_tokens"] + blended.report["reused_tokens"] == 30


# --- L2: causality ---


def _kv_of_blended(driver: Driver, prompt: Prompt, length: int) -> list[tuple[torch.Tensor, ...]]:
    from sgl_blend.radix_ext.namespaces import blend_salt

    req = driver.submit(prompt)
    salt = namespace_of(req)
    driver.run_until(req.finished)
    description = driver.runtime.describe()
    assert salt.startswith(
        blend_salt(
            description["model_fingerprint"],
            None,
            policy=BlendConfig().blend_policy,
            ratio=description["blend_recompute_ratio"],
            check_layer=description["blend_check_layer"],
            serial=None,
        )[:-1]
    )
    return driver.kv(prompt.tokens[:length], salt)


def test_l2_what_stands_later_never_changes_an_earlier_row(
    start_engine: StartEngine, served_kind: str
) -> None:
    engine = start_engine(served_kind, blend_on_miss="build", chunked_prefill_size=-1)
    chunks = [CHUNKS[i] for i in (2, 5, 1)]
    length = len(SYSTEM) + sum(len(chunk) for chunk in chunks)
    other_question = random_tokens(98, len(QUESTION))

    one = engine.call(_kv_of_blended, rag_prompt(SYSTEM, chunks, QUESTION), length)
    other = engine.call(_kv_of_blended, rag_prompt(SYSTEM, chunks, other_question), length)

    for (k1, v1), (k2, v2) in zip(one, other, strict=True):
        if has_experts(served_kind):
            # An expert multiplies all of its rows together, and rounds by how many they are. Stock
            # does so too: up to 2e-6 in these models.
            for a, b in ((k1.float(), k2.float()), (v1.float(), v2.float())):
                assert float((a - b).abs().max()) < 1e-5
        else:
            assert same_bits(k1, k2)
            assert same_bits(v1, v2)

"""The gate on SGLang's own request type; over HTTP it is in test_gate_server.py."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.errors import ConfigError, RequestError
from sgl_blend.fallback import FallbackReason
from sgl_blend.protocol.gate import RequestGate, check_preferred
from sgl_blend.protocol.separator import Separator
from sgl_blend.scheduler.intake import Intake
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.switch import BlendSwitch
from sgl_blend.settings.config import BlendConfig

VOCAB_SIZE = 384
SEP = 9
CONFIG = BlendConfig(enable_blend=True)
GATE = RequestGate(CONFIG, Separator("<sep>", SEP), vocab_size=VOCAB_SIZE, num_replicas=2)
PLAIN = [20, 21, 22]
MARKED = [20, SEP, 21, 22, SEP, 23]


def tokenized(token_ids: list[int], sampling: Any = None, **fields: Any) -> Any:
    settings: dict[str, Any] = {
        "rid": "r",
        "input_text": "",
        "input_ids": array("q", token_ids),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(**(sampling or {})),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    return TokenizedGenerateReqInput(**{**settings, **fields})


def sampled(**sampling: Any) -> tuple[str, dict[str, Any]]:
    """Return a case of sampling parameters; the field's name comes first in the message."""
    return next(iter(sampling)), {"sampling": sampling}


def scored(**fields: Any) -> tuple[str, dict[str, Any]]:
    return next(iter(fields)), {"return_logprob": True, **fields}


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs from -5": scored(logprob_start_len=-5),
    "a million likeliest": scored(top_logprobs_num=10**6),
    "fewer than no likeliest": scored(top_logprobs_num=-1),
    "logprobs of tokens that are not": scored(token_ids_logprob=[VOCAB_SIZE]),
    "logprobs of negative tokens": scored(token_ids_logprob=[-1]),
    "top_k beyond int32": sampled(top_k=1 << 31),
    "no samples": sampled(n=0),
    "stop tokens that index logits": sampled(stop_token_ids=[VOCAB_SIZE], min_new_tokens=1),
    "negative stop tokens that do": sampled(stop_token_ids=[-7], min_new_tokens=1),
    "a tiny repetition penalty": sampled(repetition_penalty=1e-300),
    "an infinite bias": sampled(logit_bias={"5": math.inf}),
    "a bias that is no number": sampled(logit_bias={"5": math.nan}),
    "a bias beyond float32": sampled(logit_bias={"5": -1e39}),
    "a replica that is not": ("routed_dp_rank", {"routed_dp_rank": 2}),
}

UNSENDABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a bool for a number": ("sampling_params.temperature", {"sampling": {"temperature": True}}),
    "half a token": ("sampling_params.max_new_tokens", {"sampling": {"max_new_tokens": 2.5}}),
    "a schema as an object": (
        "sampling_params.json_schema",
        {"sampling": {"json_schema": {"type": "object"}}},
    ),
    "text as a bias": ("sampling_params.logit_bias", {"sampling": {"logit_bias": {"5": "x"}}}),
    "text for yes": ("sampling_params.ignore_eos", {"sampling": {"ignore_eos": "yes"}}),
    "one token for a list": ("token_ids_logprob", {"token_ids_logprob": 5}),
    "text as a priority": ("priority", {"priority": "high"}),
    "a number beyond 64 bits": ("OverflowError", {"sampling": {"max_new_tokens": 1 << 70}}),
    "half a surrogate pair": ("UnicodeEncodeError", {"routing_key": "\ud800"}),
}

each_wrong = pytest.mark.parametrize("name", WRONG)
each_unsendable = pytest.mark.parametrize("name", UNSENDABLE)


@each_wrong
def test_what_ends_sglang_is_refused_by_name_beside_separators(name: str) -> None:
    field, case = WRONG[name]
    with pytest.raises(RequestError, match=rf"^{field}\b"):
        GATE.check(tokenized(MARKED, **case))


@each_unsendable
def test_what_the_scheduler_could_not_decode_is_refused_by_name(name: str) -> None:
    field, case = UNSENDABLE[name]
    with pytest.raises(RequestError, match=rf"^the request has a value of a wrong type: {field}: "):
        GATE.check(tokenized(MARKED, **case))


@each_wrong
def test_without_blending_it_is_sglangs_own_business(name: str) -> None:
    GATE.check(tokenized(PLAIN, **WRONG[name][1]))


@pytest.mark.parametrize("params", [{"sgl_blend": False}, {"sgl_blend_spans": [0, 2]}], ids=str)
def test_a_request_that_names_blending_is_one_that_uses_it(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^top_k must be at most 2147483647, got 2147483648$"):
        GATE.check(tokenized(PLAIN, {"custom_params": params, "top_k": 1 << 31}))


@pytest.mark.parametrize("wrong", [-1, -(10**9), VOCAB_SIZE, 1 << 40])
def test_tokens_outside_the_vocabulary_are_refused(wrong: int) -> None:
    with pytest.raises(RequestError, match=rf"^input_ids must hold .* 0 to 383, got {wrong}$"):
        GATE.check(tokenized([20, SEP, wrong, SEP, 21]))
    GATE.check(tokenized([20, wrong, 21]))


def test_the_separator_itself_may_lie_outside_the_vocabulary() -> None:
    # Nobody looks it up: it is taken out before the model sees the prompt. As text it is looked up.
    beyond = RequestGate(CONFIG, Separator("<sep>", 500), vocab_size=VOCAB_SIZE)
    beyond.check(tokenized([20, 500, 21, 500, 22]))
    with pytest.raises(RequestError, match=r"got 500$"):
        beyond.check(tokenized([20, 500, 21], {"custom_params": {"sgl_blend_spans": [0, 2]}}))


@pytest.mark.parametrize("token_ids", [[], [SEP, SEP]], ids=str)
def test_a_prompt_of_no_tokens_is_refused(token_ids: list[int]) -> None:
    for params in ({}, {"custom_params": {"sgl_blend": True}}):
        with pytest.raises(RequestError, match=r"^the prompt is empty"):
            GATE.check(tokenized(token_ids, params))


def test_a_session_is_not_replaced_as_a_whole() -> None:
    # SGLang takes turns out of a dictionary while it walks through it.
    turn = SessionParams(id="s", replace=True)
    with pytest.raises(RequestError, match=r"^session_params\.replace needs the rid"):
        GATE.check(tokenized(MARKED, session_params=turn))
    GATE.check(tokenized(PLAIN, session_params=turn))
    GATE.check(tokenized(MARKED, session_params=SessionParams(id="s", rid="r", replace=True)))


def test_the_largest_values_that_sglang_serves_pass() -> None:
    GATE.check(
        tokenized(
            MARKED,
            {
                "top_k": (1 << 31) - 1,
                "logit_bias": {"5": -1e30, "6": 100},
                "stop_token_ids": [VOCAB_SIZE - 1],
                "min_new_tokens": 1,
                "repetition_penalty": 0.01,
                "max_new_tokens": 1 << 62,
            },
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=VOCAB_SIZE,
            token_ids_logprob=[0, VOCAB_SIZE - 1],
            routed_dp_rank=1,
        )
    )


def test_a_stop_token_that_only_ends_the_answer_may_be_any_number() -> None:
    GATE.check(tokenized(MARKED, {"stop_token_ids": [10**6]}))


def test_positions_that_separators_shift_are_refused() -> None:
    overrides = PositionalEmbeds(embeds=torch.zeros(1, 64), positions=[2])
    with pytest.raises(RequestError, match=r"^positional_embed_overrides counts tokens that move"):
        GATE.check(tokenized(MARKED, positional_embed_overrides=overrides))
    GATE.check(tokenized(PLAIN, positional_embed_overrides=overrides))
    GATE.check(
        tokenized(
            PLAIN,
            {"custom_params": {"sgl_blend_spans": [0, 2]}},
            positional_embed_overrides=overrides,
        )
    )


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_no_client_names_a_namespace_of_ours(name: str) -> None:
    request = tokenized(PLAIN)
    if not hasattr(request, name):
        pytest.skip("SGLang 0.5.17 has no cache salts")
    setattr(request, name, "sgl-blend:c:0123:")
    with pytest.raises(RequestError, match=r"must not begin with 'sgl-blend:'$"):
        GATE.check(request)


def test_behind_the_gate_a_name_of_ours_is_served_in_full() -> None:
    model = LoadedModel("m", lambda: "0" * 32, CONFIG, TPGroup(), quality="")
    intake = Intake(
        CONFIG,
        model,
        separator_id=SEP,
        bos_token_id=1,
        switch=BlendSwitch(),
        longest=10_000,
        page_size=1,
    )
    request = tokenized([20, SEP, *range(30, 80), SEP, 21], extra_key="sgl-blend:c:0123:")
    assert intake.read(request).fallback is FallbackReason.MALFORMED


def test_what_is_echoed_has_no_separators() -> None:
    assert GATE.without_separators("a<sep>b<sep>c", None) == "abc"
    assert GATE.without_separators("a<sep>b", {"sgl_blend": True}) == "ab"


def test_beside_spans_separators_are_text_and_echoed() -> None:
    assert GATE.without_separators("a<sep>b", {"sgl_blend_spans": []}) == "a<sep>b"


@pytest.mark.parametrize(
    ("preferred", "message"),
    [
        ({"custom_params": {"sgl_blend_ratio": 2}}, "sgl_blend_ratio"),
        ('{"custom_params": {"sgl_blend_policy": "best"}}', "sgl_blend_policy"),
        ({"custom_params": {"mine": [[1]]}}, "custom_params"),
        ({"custom_params": {"sgl_blend_spans": [0, 5]}}, "must not hold sgl_blend_spans"),
    ],
    ids=str,
)
def test_malformed_preferred_parameters_are_refused(preferred: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^preferred_sampling_params.*{message}"):
        check_preferred(preferred, CONFIG)


@pytest.mark.parametrize(
    "preferred",
    [None, {}, {"temperature": 0}, '{"custom_params": {"sgl_blend_ratio": 0.3}}'],
    ids=str,
)
def test_other_preferred_parameters_pass(preferred: Any) -> None:
    check_preferred(preferred, CONFIG)

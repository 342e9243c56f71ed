"""The gate in the tokenizer process: what the scheduler could not serve becomes HTTP 400 here.

After it comes the scheduler, which serves everybody and must not see what it cannot decode. Blend
parameters are checked in every request. A request that uses blending is also checked for what ends
SGLang itself: types that its wire does not carry and numbers that index out of a tensor. One that
does not is SGLang's own business, but for a prompt of no tokens: it ends SGLang in every batch that
it is alone in, and nobody gains by it.
"""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import torch

from sgl_blend.engine.objects import Received
from sgl_blend.engine.requests import custom_params, received_class, received_ids, salt_of
from sgl_blend.engine.wire import Limits, is_turn, positional_field, read_limits, wire_error
from sgl_blend.errors import ConfigError, RequestError
from sgl_blend.protocol.request import (
    PARAM_PREFIX,
    check_salt,
    check_wire_types,
    locate_chunks,
    parse_overrides,
)
from sgl_blend.protocol.separator import Separator
from sgl_blend.settings.config import BlendConfig

_MAX_TOP_K = (1 << 31) - 1
_MAX_BIAS = 1e30
"""Divided by SGLang's smallest temperature, 1e-6, it is still a float32."""
_MIN_REPETITION_PENALTY = 1e-6


class RequestGate:
    """Checks every request of one tokenizer process.

    Args:
        config: The server's.
        separator: What marks chunks in its prompts.
        vocab_size: Token ids of the model are below it.
        num_replicas: Data-parallel schedulers.
    """

    def __init__(
        self,
        config: BlendConfig,
        separator: Separator | None,
        *,
        vocab_size: int,
        num_replicas: int = 1,
    ) -> None:
        self._config = config
        self._separator = separator
        self._separator_id = None if separator is None else separator.token_id
        self._vocab_size = vocab_size
        self._num_replicas = num_replicas

    def without_separators(self, text: str, params: Any) -> str:
        """Return a prompt as the model sees it.

        Args:
            text: As the client sent it.
            params: custom_params of its request; beside explicit spans separators are text.
        """
        spans = params.get("sgl_blend_spans") if isinstance(params, dict) else None
        if self._separator is None or spans is not None:
            return text
        return text.replace(self._separator.text, "")

    def without_separator_ids(self, token_ids: list[int], params: Any) -> list[int]:
        """Return the tokens of a prompt as the model sees them; the arguments are as above."""
        spans = params.get("sgl_blend_spans") if isinstance(params, dict) else None
        if self._separator_id is None or spans is not None:
            return token_ids
        return [token for token in token_ids if token != self._separator_id]

    def check(self, received: Received) -> None:
        """Check one request.

        Args:
            received: SGLang's TokenizedGenerateReqInput, separators included, with what the
                operator's --preferred-sampling-params add to it.

        Raises:
            RequestError: Something in it is malformed.
        """
        params = custom_params(received)
        check_wire_types(params)
        check_salt("cache_salt", salt_of(received))
        check_salt("extra_key", received_class(received))
        overrides = parse_overrides(params, self._config)
        token_ids = received_ids(received)
        if token_ids is None:
            return
        prompt = locate_chunks(token_ids, overrides.offsets, self._separator_id)
        if not prompt.token_ids and not is_turn(received):
            raise RequestError("the prompt is empty")
        has_separators = len(prompt.token_ids) < len(token_ids)
        if has_separators and (field := positional_field(received)) is not None:
            raise RequestError(
                f"{field} counts tokens that move when separators are taken out; mark the chunks "
                "by sgl_blend_spans instead"
            )
        named = any(name.startswith(PARAM_PREFIX) for name in params or ())
        if has_separators or named:
            self._check_limits(received, prompt.token_ids)

    def _check_limits(self, received: Received, token_ids: array[int]) -> None:
        """Refuse what ends the scheduler, whoever sends it."""
        if (error := wire_error(received)) is not None:
            raise RequestError(f"the request has a value of a wrong type: {error}")
        self._check_ids("input_ids", token_ids)
        limits = read_limits(received)
        if limits.logprob_start is not None:
            self._check_logprobs(limits.logprob_start, limits)
        self._check_sampling(limits)
        if limits.replaces_unnamed_turn:
            raise RequestError("session_params.replace needs the rid of the turn that is replaced")
        rank, replicas = limits.replica, self._num_replicas
        if rank is not None and replicas > 1 and not 0 <= rank < replicas:
            raise RequestError(f"routed_dp_rank must be from 0 to {replicas - 1}, got {rank}")

    def _check_logprobs(self, start: int, limits: Limits) -> None:
        top = limits.top_logprobs
        if start < -1:
            raise RequestError(f"logprob_start_len must be -1 or more, got {start}")
        if not 0 <= top <= self._vocab_size:
            raise RequestError(f"top_logprobs_num must be from 0 to {self._vocab_size}, got {top}")
        self._check_ids("token_ids_logprob", limits.logprob_ids)

    def _check_sampling(self, limits: Limits) -> None:
        if limits.top_k > _MAX_TOP_K:
            raise RequestError(f"top_k must be at most {_MAX_TOP_K}, got {limits.top_k}")
        if limits.num_samples < 1:
            raise RequestError(f"n must be at least 1, got {limits.num_samples}")
        self._check_ids("stop_token_ids", limits.stop_ids)
        if limits.repetition_penalty < _MIN_REPETITION_PENALTY:
            raise RequestError(
                f"repetition_penalty must be at least {_MIN_REPETITION_PENALTY}, "
                f"got {limits.repetition_penalty}"
            )
        for token_id, bias in limits.logit_bias.items():
            if not math.isfinite(bias) or abs(bias) > _MAX_BIAS:
                raise RequestError(
                    f"logit_bias[{token_id!r:.80}] must be a number up to {_MAX_BIAS:g} either way, "
                    f"got {bias}"
                )

    def _check_ids(self, name: str, token_ids: array[int]) -> None:
        if not token_ids:
            return
        low, high = torch.aminmax(torch.frombuffer(token_ids, dtype=torch.int64))
        if low < 0 or high >= self._vocab_size:
            wrong = int(low if low < 0 else high)
            raise RequestError(
                f"{name} must hold token ids from 0 to {self._vocab_size - 1}, got {wrong}"
            )


def check_preferred(preferred: Any, config: BlendConfig) -> None:
    """Check what --preferred-sampling-params add to every request.

    Args:
        preferred: The flag's value, parsed or as JSON; None if it is not set.
        config: The server's.

    Raises:
        ConfigError: Blend parameters in it are malformed, or it gives every prompt the same spans.
    """
    parsed = json.loads(preferred) if isinstance(preferred, str) else preferred
    params = (parsed or {}).get("custom_params")
    try:
        check_wire_types(params)
        overrides = parse_overrides(params, config)
    except RequestError as err:
        raise ConfigError(f"preferred_sampling_params: {err}") from err
    if overrides.offsets is not None:
        raise ConfigError(
            "preferred_sampling_params must not hold sgl_blend_spans: every prompt has its own"
        )

"""The real engine, asked in full and blended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from sgl_blend.commands.common.cpu import CPU_SETTINGS
from sgl_blend.commands.evaluation.distributions import FirstToken
from sgl_blend.commands.evaluation.prompts import Prompt
from sgl_blend.engine.offline import OfflineEngine
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig

CPU_DEFAULTS: dict[str, Any] = {**CPU_SETTINGS, "mem_fraction_static": 0.3}
"""Engine arguments for a machine without CUDA."""

_MOST_FLUSHES, _FLUSH_PAUSE_S = 600, 0.1

OWN_ARGS = ("model_path", "enable_blend", "blend_on_miss", "blend_check_layer")
"""Engine arguments that BlendEngine sets itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one prompt.

    Attributes:
        text: The answer, without blanks around it and without the token that ended it.
        first: The distribution of its first token.
        report: The request's ``meta_info["sgl_blend"]``.
    """

    text: str
    first: FirstToken
    report: dict[str, Any]


class BlendEngine:
    """An SGLang engine that blends; use it in a ``with`` block, from the main thread.

    Missing chunks are built first, so an answer depends on nothing that was asked before. Starting
    one ends every other child process of this process when it is closed: that is what SGLang's
    Engine does.

    Args:
        model_path: Folder or name of the model.
        check_layer: The server's ``--blend-check-layer``.
        build_prefix: The server's ``--blend-build-prefix``.
        on_miss: The server's ``--blend-on-miss``. With "compute" answers depend on what was asked.
        engine_args: Further keyword arguments of ``sglang.Engine``.
    """

    def __init__(
        self,
        model_path: str,
        *,
        check_layer: int,
        build_prefix: str,
        on_miss: str = "build",
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = {
            **({} if torch.cuda.is_available() else CPU_DEFAULTS),
            **(engine_args or {}),
            **blend_settings(check_layer, build_prefix),
            "blend_on_miss": on_miss,
            "model_path": model_path,
        }
        self._engine: OfflineEngine

    def __enter__(self) -> BlendEngine:
        """Start it.

        Raises:
            CommandError: It did not start.
        """
        try:
            self._engine = OfflineEngine(self._settings)
        except (ValueError, RuntimeError, OSError, TypeError) as err:
            reason = str(err).strip().splitlines()[0]
            raise CommandError(f"the engine did not start: {reason}") from err
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.close()

    def ask_full(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, num_top: int
    ) -> list[Answer]:
        """Answer prompts after a full prefill.

        Args:
            prompts: Sent as one batch.
            max_new_tokens: Longest answer.
            num_top: Of how many tokens, the most likely ones, the probability is told.

        Returns:
            One answer per prompt, most likely first tokens first.

        Raises:
            CommandError: A prompt is too long for the model.
        """
        outputs = self._generate(
            prompts,
            [{"sgl_blend": False} for _ in prompts],
            max_new_tokens,
            top_logprobs_num=[num_top] * len(prompts),
        )
        return [read_answer(output, "output_top_logprobs", None) for output in outputs]

    def ask(
        self,
        prompts: Sequence[Prompt],
        policy: str,
        ratios: Sequence[float],
        *,
        max_new_tokens: int,
        reference_ids: Sequence[tuple[int, ...]],
    ) -> list[Answer]:
        """Answer prompts blended.

        Args:
            prompts: Sent as one batch.
            policy: Selection policy.
            ratios: Per prompt the share of the reused tokens that is recomputed.
            max_new_tokens: Longest answer.
            reference_ids: Per prompt the tokens whose first-token probability is told, as in
                ``first.token_ids`` of a full prefill.

        Returns:
            One answer per prompt, first tokens in the order of reference_ids.

        Raises:
            CommandError: A prompt is too long for the model.
        """
        outputs = self._generate(
            prompts,
            [
                {
                    "sgl_blend_policy": policy,
                    "sgl_blend_ratio": ratio,
                    "sgl_blend_spans": list(prompt.spans),
                }
                for prompt, ratio in zip(prompts, ratios, strict=True)
            ],
            max_new_tokens,
            token_ids_logprob=[list(token_ids) for token_ids in reference_ids],
        )
        return [
            read_answer(output, "output_token_ids_logprobs", token_ids)
            for output, token_ids in zip(outputs, reference_ids, strict=True)
        ]

    def server_info(self) -> dict[str, Any]:
        """Return the plugin's settings and totals, as in ``/server_info``."""
        return self._engine.blend_info()

    def flush(self) -> None:
        """Let nothing be cached but what is in storage.

        Raises:
            CommandError: The engine does not come to rest.
        """
        for _ in range(_MOST_FLUSHES):
            if self._engine.flush():
                return
            time.sleep(_FLUSH_PAUSE_S)
        raise CommandError("the engine's cache could not be flushed")

    def _generate(
        self,
        prompts: Sequence[Prompt],
        custom_params: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        **logprobs: Any,
    ) -> list[dict[str, Any]]:
        try:
            return self._engine.generate(
                [prompt.token_ids for prompt in prompts], custom_params, max_new_tokens, logprobs
            )
        except ValueError as err:
            raise CommandError(f"the engine refuses a prompt: {err}") from None


def blend_settings(check_layer: int, build_prefix: str) -> dict[str, Any]:
    """Return the server settings that an evaluation needs.

    Raises:
        ConfigError: A value is out of range.
    """
    settings = {
        "enable_blend": True,
        "blend_on_miss": "build",
        "blend_check_layer": check_layer,
        "blend_build_prefix": build_prefix,
        "blend_eval": True,
    }
    BlendConfig.from_settings(settings)
    return settings


def read_answer(output: Mapping[str, Any], table: str, token_ids: tuple[int, ...] | None) -> Answer:
    """Read one output of Engine.generate.

    Args:
        output: What came back.
        table: Name of the logprobs that were asked for; rows of (logprob, token, text) per output
            token.
        token_ids: The order to bring them into; None for theirs.
    """
    meta = output["meta_info"]
    logprobs = {token: logprob for logprob, token, _ in meta[table][0]}
    if token_ids is None:
        token_ids = tuple(logprobs)
    (report,) = meta["sgl_blend"]
    return Answer(
        text=output["text"].strip(),
        first=FirstToken(
            chosen=meta["output_token_logprobs"][0][1],
            token_ids=token_ids,
            logprobs=np.array([logprobs[token] for token in token_ids], dtype=np.float64),
        ),
        report=report,
    )

"""SGLang's engine without a server, in this process's children: what evaluations ask."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any


class OfflineEngine:
    """An ``sglang.Engine``; start it from the main thread.

    Starting one ends every other child process of this process when it is closed: that is what
    SGLang's Engine does.

    Args:
        settings: Keyword arguments of ``sglang.Engine``.

    Raises:
        RuntimeError: The scheduler did not start; its messages are in the log.
        ValueError, OSError, TypeError: A setting is refused.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import sglang

        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_is_worth_reading)
        self._engine = sglang.Engine(**settings, custom_sigquit_handler=_raise_start_error)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        custom_params: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        logprobs: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Answer token ids greedily, as one batch.

        Args:
            prompts: Token ids of each.
            custom_params: The plugin's parameters of each.
            max_new_tokens: Longest answer.
            logprobs: Which log-probabilities are told, as keyword arguments of ``generate``.

        Returns:
            SGLang's output of each, as over HTTP.

        Raises:
            ValueError: A prompt is refused.
        """
        outputs: list[dict[str, Any]] = self._engine.generate(
            input_ids=[list(token_ids) for token_ids in prompts],
            sampling_params=[
                {"temperature": 0.0, "max_new_tokens": max_new_tokens, "custom_params": params}
                for params in custom_params
            ],
            return_logprob=True,
            **logprobs,
        )
        return outputs

    def blend_info(self) -> dict[str, Any]:
        """Return the plugin's settings and totals, as in ``/server_info``."""
        info: dict[str, Any] = self._engine.get_server_info()["internal_states"][0]["sgl_blend"]
        return info

    def flush(self) -> bool:
        """Drop all that is cached but what is in storage; return whether the engine was idle."""
        return bool(self._engine.flush_cache().success)

    def close(self) -> None:
        """End it."""
        self._engine.shutdown()


def _raise_start_error(signum: int, frame: FrameType | None) -> None:
    """Turn the signal that SGLang's scheduler sends if it cannot start into an error.

    By default SGLang would end this process with it.
    """
    raise RuntimeError("its messages above say why")


def _is_worth_reading(record: logging.LogRecord) -> bool:
    """Leave out that SGLang takes note of the handler above, which it logs as an error."""
    return "custom SIGQUIT handler" not in record.getMessage()

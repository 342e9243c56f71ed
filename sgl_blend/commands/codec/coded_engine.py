"""The real engine with a store of files behind it: what prompts answer whose chunks come from there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sgl_blend.commands.common.console import Progress
from sgl_blend.commands.evaluation.prompts import Prompt
from sgl_blend.commands.evaluation.runner import Answer, BlendEngine
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig, child_variable

BATCH = 16
STORE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_IDLE_TIMEOUT_S = 600.0
_POOL_TOKENS = 65_536
"""Of the KV pool, by default: room for a batch of long prompts, and twice as much on the host."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What is the same for all engines of a profile.

    Attributes:
        model_path: Folder or name of the model.
        page_size: Tokens of a page.
        engine_args: Further keyword arguments of ``sglang.Engine``.
        max_new_tokens: Longest answer.
    """

    model_path: str
    page_size: int
    engine_args: Mapping[str, Any]
    max_new_tokens: int = 32


class CodedEngine:
    """An engine that stores chunks in a folder of its own; use it in a ``with`` block.

    Args:
        settings: Of all engines of the profile.
        blend: Further blend settings: the profile and the level.
    """

    def __init__(self, settings: EngineSettings, blend: Mapping[str, Any]) -> None:
        self._settings = settings
        self._blend = blend
        self._stack = ExitStack()

    def __enter__(self) -> CodedEngine:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(child_variable(STORE, str(self.folder)))
            defaults = BlendConfig()
            self._engine = stack.enter_context(
                BlendEngine(
                    self._settings.model_path,
                    check_layer=defaults.blend_check_layer,
                    build_prefix=defaults.blend_build_prefix,
                    on_miss="compute",
                    engine_args={
                        "page_size": self._settings.page_size,
                        "enable_hierarchical_cache": True,
                        "max_total_tokens": _POOL_TOKENS,
                        "hicache_ratio": 2.0,
                        "hicache_storage_backend": "file",
                        **self._settings.engine_args,
                        "blend_when": "always",
                        **self._blend,
                    },
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ask_full(self, prompts: Sequence[Prompt], num_top: int) -> list[Answer]:
        """Answer prompts after a full prefill."""
        return [
            answer
            for batch in _batches(prompts)
            for answer in self._engine.ask_full(
                batch, max_new_tokens=self._settings.max_new_tokens, num_top=num_top
            )
        ]

    def build(
        self,
        prompts: Sequence[Prompt],
        watch: Progress,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Have the chunks of prompts built and stored, until it is enough."""
        for batch in _batches(prompts):
            self._ask(batch, [(0,)] * len(batch), max_new_tokens=1)
            self._wait()
            watch("building chunks", len(batch))
            if is_enough():
                break
        self._engine.flush()

    def ask_stored(
        self, prompts: Sequence[Prompt], reference_ids: Sequence[tuple[int, ...]], watch: Progress
    ) -> list[Answer]:
        """Answer prompts whose chunks are in the store alone."""
        answers: list[Answer] = []
        for prompt, known in zip(prompts, reference_ids, strict=True):
            self._engine.flush()
            answers += self._ask([prompt], [known], self._settings.max_new_tokens)
            watch("asking from the store", 1)
        return answers

    def _ask(
        self, prompts: Sequence[Prompt], ids: Sequence[tuple[int, ...]], max_new_tokens: int
    ) -> list[Answer]:
        defaults = BlendConfig()
        return self._engine.ask(
            prompts,
            defaults.blend_policy,
            [defaults.blend_recompute_ratio] * len(prompts),
            max_new_tokens=max_new_tokens,
            reference_ids=ids,
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        while True:
            info = self._engine.server_info()
            if info["chunks_pending"] + info["probes_pending"] == 0:
                return
            if time.monotonic() > deadline:
                raise CommandError(f"chunks were not built in {_IDLE_TIMEOUT_S:.0f} s")
            time.sleep(0.05)


def _batches(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    for first in range(0, len(prompts), BATCH):
        yield prompts[first : first + BATCH]

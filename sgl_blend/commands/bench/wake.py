"""Wakes a GPU before something is measured: one that has nothing to do lowers its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_blend.commands.bench.client import Client, ask_together
from sgl_blend.commands.bench.prompts import Library, to_body

if TYPE_CHECKING:
    import random

WAKING_TOKENS = 2000
"""Prefilled before each measurement on a GPU: some 50 ms at an 8B model, by an estimate."""


async def wake(
    client: Client, library: Library, num_tokens: int, draw: random.Random | None = None
) -> None:
    """Let a server prefill something new, without chunks.

    Args:
        client: Of the server.
        library: Its system prompt stands in front.
        num_tokens: After it, at most WAKING_TOKENS of them.
        draw: Source of these tokens, by default the library's.
    """
    prompt = library.prompt([], min(WAKING_TOKENS, num_tokens), draw)
    await ask_together(client, [to_body(prompt, None, 1)])

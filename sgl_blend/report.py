"""What was done for one request; the server adds it up, and the client reads it in ``meta_info``."""

from typing import Any

import msgspec

from sgl_blend.fallback import FallbackReason


class BlendReport(msgspec.Struct, kw_only=True):
    """Tokens by how their KV came about; prefix, reused, recomputed and computed add up to the prompt.

    Attributes:
        prompt_tokens: Tokens of the prompt, separators taken out.
        prefix_tokens: Exact KV from the cache.
        reused_tokens: Chunk KV, taken as it was.
        recomputed_tokens: Tokens of reused chunks that were computed in the upper layers as well.
        computed_tokens: Tokens that were prefilled as usual.
        layer_rows: Over all layers, how many rows were computed in each.
        chunk_hits: Chunks of which KV was found.
        chunk_misses: Chunks that were not stored.
        policy: Name of the selection policy.
        ratio: Share of the reused tokens to recompute.
        fallback: Why the request was not blended; None if it was.
    """

    prompt_tokens: int
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    layer_rows: int = 0
    chunk_hits: int = 0
    chunk_misses: int = 0
    policy: str
    ratio: float
    fallback: FallbackReason | None = None

    def for_client(self) -> dict[str, Any]:
        """Return it as JSON values, with the sentence of the fallback beside its code."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        told["fallback_message"] = None if self.fallback is None else self.fallback.message
        return told

"""What was done for one request; the server adds it up, and the client reads it in ``meta_info``."""

from typing import Any

import msgspec

from sgl_blend.fallback import FallbackReason


class BlendReport(msgspec.Struct, kw_only=True):
    """Tokens by how their KV came about; prefix, reused, recomputed and computed add up to the prompt.

    Attributes:
        prompt_tokens: Tokens of the prompt. Separators do not count.
        prefix_tokens: Tokens whose exact KV was in the cache.
        reused_tokens: Tokens whose chunk KV was taken as it was.
        recomputed_tokens: Tokens of reused chunks that were computed in the upper layers as well.
        computed_tokens: Tokens that were prefilled as usual.
        layer_rows: Computed tokens, added up over all layers: the true cost. A full prefill has tokens
            times layers.
        found_tokens: Tokens of chunks that were found without a mark and of which KV was used.
        chunk_hits: Chunks after the prefix of which KV was found.
        chunk_misses: Chunks after the prefix that were not stored as a whole. One of which a part was
            stored is also a hit.
        host_tokens: Tokens of chunks and of its exact prefix that were brought back from host memory.
        storage_tokens: Tokens of both that came from storage to host memory for it.
        chunk_levels: For each chunk, at which level of coding it came from storage for this request;
            null if it did not. Empty if none did.
        load_ms: Milliseconds that it waited for them.
        policy: The policy that chose the recomputed tokens.
        ratio: Share of the tokens of reused chunks that was to be recomputed.
        fallback: Code of the reason why no chunk was reused at another place; None if one was.
    """

    prompt_tokens: int
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    layer_rows: int = 0
    found_tokens: int = 0
    chunk_hits: int = 0
    chunk_misses: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    chunk_levels: list[str | None] = msgspec.field(default_factory=list)
    load_ms: float = 0.0
    policy: str
    ratio: float
    fallback: FallbackReason | None = None

    def for_client(self) -> dict[str, Any]:
        """Return it as JSON values, with the sentence of the fallback beside its code."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        told["fallback_message"] = None if self.fallback is None else self.fallback.message
        return told

"""Why a request was served without blending; every reason has a code and a sentence."""

from enum import StrEnum


class FallbackReason(StrEnum):
    """Closed set, so a dashboard can list every reason there is.

    The value is the code. Programs may compare it; it stays what it is.

    Attributes:
        message: The sentence for people; it may be rewritten.
    """

    message: str

    def __new__(cls, code: str, message: str) -> "FallbackReason":
        """Make a member that is its code."""
        reason = str.__new__(cls, code)
        reason._value_ = code
        reason.message = message
        return reason

    DISABLED = "disabled", "disabled by the request"
    NO_CHUNKS = "no_chunks", "no chunk in the prompt"
    NO_HIT = "no_hit", "no chunk of the prompt is stored"
    CACHED = "cached", "exact KV from the cache covers every chunk"
    LOGPROBS = "logprobs", "logprobs of every stored chunk token are wanted"
    NOT_FASTER = "not_faster", "blending would not be faster"
    NO_MEMORY = "no_memory", "the pool cannot hold the request beside its chunks"
    BUILD_NOT_ADMITTED = "build_not_admitted", "a missing chunk could not be built"
    MALFORMED = "malformed", "malformed blend parameters"
    MULTIMODAL = "multimodal", "prompts with embeddings or images are not blended"
    BESIDE_EMBEDDINGS = "beside_embeddings", "computed in full in one batch with embeddings"
    BEAM_SEARCH = "beam_search", "beam search is not blended"
    ABORTED = "aborted", "aborted before it was served"
    TRUNCATED = "truncated", "SGLang shortened the prompt to what the pool holds"
    CANARY = "canary", "the canary switched blending off"


def message_of(code: str) -> str:
    """Return the sentence for a code; a code of another version stands for itself."""
    return next((reason.message for reason in FallbackReason if reason == code), code)

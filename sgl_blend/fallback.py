"""Why a request was served without blending; every reason has a name and a count."""

from enum import StrEnum


class FallbackReason(StrEnum):
    """Closed set, so a dashboard can list every reason there is."""

    DISABLED = "disabled by the request"
    NO_CHUNKS = "no chunk in the prompt"
    NO_HIT = "no chunk of the prompt is stored"
    CACHED = "exact KV from the cache covers every chunk"
    LOGPROBS = "logprobs of every stored chunk token are wanted"
    NOT_FASTER = "blending would not be faster"
    NO_MEMORY = "the pool cannot hold the request beside its chunks"
    BUILD_NOT_ADMITTED = "a missing chunk could not be built"
    MALFORMED = "malformed blend parameters"
    MULTIMODAL = "prompts with embeddings or images are not blended"
    BESIDE_EMBEDDINGS = "computed in full in one batch with embeddings"
    BEAM_SEARCH = "beam search is not blended"
    ABORTED = "aborted before it was served"
    CANARY = "the canary switched blending off"

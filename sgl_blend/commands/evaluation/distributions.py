"""How far two distributions of the first answer token are apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LEAST_REST = 1e-6
"""The mass outside the known tokens is one minus a sum of float32 probabilities: no finer than this."""
_LEAST_LOGPROB = float(np.log(np.finfo(np.float64).tiny))


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What is known of the distribution of an answer's first token.

    Attributes:
        chosen: The token that was taken, the most likely one.
        token_ids: Tokens whose probability is known, [k].
        logprobs: float64 [k], their logarithms (natural).
    """

    chosen: int
    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]

    def only(self, token_ids: Sequence[int]) -> "FirstToken":
        """Return what is known of some of the tokens, in this order."""
        place = {token: index for index, token in enumerate(self.token_ids)}
        rows = [place[token] for token in token_ids]
        return FirstToken(self.chosen, tuple(token_ids), self.logprobs[rows])


def kl_divergence(full: FirstToken, blended: FirstToken, vocab_size: int) -> float:
    """Return KL(full || blended) in nats, over the tokens known of full and one bucket for the rest.

    Merging tokens into a bucket never raises KL, so this is a lower bound of the divergence over the
    whole vocabulary, and that divergence itself where all tokens are known. Both sides are
    normalised first (float32 probabilities do not add up to one), so the result is not negative.

    Args:
        full: After a full prefill.
        blended: After blending, for the same tokens in the same order.
        vocab_size: Tokens the model has.

    Raises:
        ValueError: The two are not about the same tokens.
    """
    if full.token_ids != blended.token_ids:
        raise ValueError("full and blended must hold the same tokens in the same order")
    has_rest = len(full.token_ids) < vocab_size
    log_p = _log_distribution(full.logprobs, has_rest)
    log_q = _log_distribution(blended.logprobs, has_rest)
    return max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum()))


def _log_distribution(logprobs: npt.NDArray[np.float64], has_rest: bool) -> npt.NDArray[np.float64]:
    """Return normalised logarithms: float64 [k], or [k + 1] with the rest of the mass last."""
    known = np.maximum(logprobs, _LEAST_LOGPROB)
    if has_rest:
        rest = max(_LEAST_REST, 1.0 - float(np.exp(known).sum()))
        known = np.append(known, np.log(rest))
    normalised: npt.NDArray[np.float64] = known - np.log(np.exp(known).sum())
    return normalised

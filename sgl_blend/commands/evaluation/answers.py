"""How good an answer is: exact match, token F1 and Rouge-L, the best over all accepted answers."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Make answers comparable as SQuAD does: lower case, no punctuation, no articles, single blanks.

    >>> normalise(" The  Eiffel-Tower! ")
    'eiffeltower'
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the normalised answer is one of those accepted, else 0."""
    return float(normalise(answer) in {normalise(right) for right in accepted})


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of normalised words, in [0, 1].

    Words count as often as they occur; of several accepted answers the best one counts.
    """
    return max(_f1(normalise(answer).split(), normalise(right).split()) for right in accepted)


def _f1(got: list[str], want: list[str]) -> float:
    if not got or not want:
        return float(got == want)
    common = (Counter(got) & Counter(want)).total()
    # 2PR / (P + R) with P = common / |got| and R = common / |want|
    return 2 * common / (len(got) + len(want))


def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """Return the F-measure of Rouge-L of ``rouge-score``, stemmed as CacheBlend's figures are."""
    scorer = _rouge_scorer()
    return max(float(scorer.score(right, answer)["rougeL"].fmeasure) for right in accepted)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)

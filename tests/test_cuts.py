"""Where chunks are cut for `sgl-blend verify --cuts`, and what is a loss."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.commands.evaluation.cuts import KINDS, Cut, recut, worse
from sgl_blend.commands.evaluation.prompts import Prompt
from sgl_blend.commands.evaluation.verify_command import _describe_cuts, _warned

LEAST = 8


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Draw a prompt with chunks side by side or apart."""
    at = draw(st.integers(0, 9))
    spans: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        start = at + draw(st.sampled_from([0, 0, 0, 3]))
        at = start + draw(st.integers(1, 60))
        spans += [start, at]
    return Prompt(tuple(range(at + 4)), tuple(spans))


def covered(prompt: Prompt) -> list[int]:
    pairs = zip(prompt.spans[::2], prompt.spans[1::2], strict=True)
    return [token for start, stop in pairs for token in range(start, stop)]


def lengths(prompt: Prompt) -> list[int]:
    return [stop - start for start, stop in zip(prompt.spans[::2], prompt.spans[1::2], strict=True)]


@given(prompts(), st.sampled_from(KINDS), st.integers(0, 99))
def test_only_borders_move(prompt: Prompt, kind: str, seed: int) -> None:
    cut = recut(prompt, kind, LEAST, random.Random(seed))
    assert cut.token_ids == prompt.token_ids
    assert covered(cut) == covered(prompt)
    assert all(a <= b for a, b in pairwise(cut.spans))
    assert recut(prompt, kind, LEAST, random.Random(seed)) == cut
    assert min(lengths(cut)) >= min(LEAST, *lengths(prompt))


@given(prompts(), st.integers(0, 99))
def test_random_words_make_as_many_chunks(prompt: Prompt, seed: int) -> None:
    cut = recut(prompt, "random words", LEAST, random.Random(seed))
    assert len(cut.spans) == len(prompt.spans)


@given(prompts())
def test_halves_cut_each_document_that_is_long_enough(prompt: Prompt) -> None:
    cut = recut(prompt, "halves", LEAST, random.Random(0))
    long = sum(length >= 2 * LEAST for length in lengths(prompt))
    assert len(cut.spans) == len(prompt.spans) + 2 * long


def test_random_words_are_all_over() -> None:
    prompt = Prompt(tuple(range(300)), (0, 100, 100, 200, 200, 300))
    draw = random.Random(1)
    firsts = {recut(prompt, "random words", LEAST, draw).spans[1] for _ in range(400)}
    assert min(firsts) < 20
    assert max(firsts) > 180


def test_another_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kind of cuts 'thirds'"):
        recut(Prompt((1, 2), (0, 2)), "thirds", LEAST, random.Random(0))


def cut(kind: str, more: float) -> Cut:
    return Cut(kind, 9, 0.05 + more, (0.0, 1.0), more, (0.0, 1.0), 1.0)


def test_what_is_no_number_is_a_loss() -> None:
    cuts = [cut("documents", float("nan")), cut("random words", float("nan"))]
    assert [one.kind for one in worse(cuts, 0.1)] == ["random words"]


def test_a_loss_is_told_and_recorded() -> None:
    cuts = [cut("documents", 0.0), cut("random words", 0.12), cut("halves", 0.09)]
    told = _describe_cuts(cuts, 0.1, 3)
    assert [line.split()[0] for line in told] == ["cuts", "cuts", "cuts", "warning"]
    assert "random words lose 0.12 nats more than documents, beyond 0.1" in told[-1]
    assert _warned(cuts, 0.1) == {"cuts_beyond_max_kl": ["random words"]}
    assert _warned(cuts, 0.2) == {"cuts_beyond_max_kl": []}


def test_a_loss_is_what_lies_beyond_documents() -> None:
    cuts = [cut("documents", 0.0), cut("random words", 0.12), cut("halves", 0.09)]
    assert [one.kind for one in worse(cuts, 0.1)] == ["random words"]

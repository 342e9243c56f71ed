"""Where documents are likely to begin: behind what runs began behind, and seldom anything else."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_blend.finding import seams as seams_module
from sgl_blend.finding.seams import Pairs, Seams, pairs_of
from sgl_blend.finding.spans import Span, overlapping, union

NAME, OTHER = 7, 8
"""Tokens that stand in front of documents, or of anything."""


def text(*before: int) -> Pairs:
    """Return a text of stretches of three tokens, each behind 1 and one of these tokens."""
    return pairs_of(np.array([token for one in before for token in (9, 1, one)]))


def shows(*, times: int, others: int = 5, behind: int = NAME, seams: Seams | None = None) -> Seams:
    """Show runs that begin behind a seam, and in which another one stands so many times."""
    seams = Seams() if seams is None else seams
    for _ in range(times):
        seams.count("a", text(behind, *[OTHER] * others, 6), [Span(3, 3 * (others + 2))])
    return seams


def found(seams: Seams, tenant: str = "a") -> list[int]:
    """Return behind which stretches of a new text documents are likely to begin."""
    places = seams.find(tenant, text(OTHER, NAME, OTHER, 5, NAME, 9, 9)).tolist()
    return [place // 3 - 1 for place in places]


def test_documents_begin_behind_what_others_began_behind() -> None:
    assert found(shows(times=4)) == [1, 4]


def test_few_runs_tell_nothing() -> None:
    assert found(shows(times=3)) == []


@pytest.mark.parametrize(("others", "known"), [(19, [0, 2]), (20, [])])
def test_what_seldom_stands_before_runs_is_no_seam(others: int, known: list[int]) -> None:
    # It stands before each run, and so many times in it.
    assert found(shows(times=8, others=others, behind=OTHER)) == known


def test_one_run_in_twenty_five_begins_behind_a_seam() -> None:
    seams = shows(times=4)
    for number in range(96):
        shows(times=1, behind=100 + number, seams=seams)
    assert found(seams) == [1, 4]
    shows(times=1, behind=99, seams=seams)
    assert found(seams) == []


def test_tenants_are_apart_and_forgotten() -> None:
    seams = shows(times=4)
    assert found(seams, "b") == []
    seams.forget("b")
    assert found(seams) == [1, 4]
    seams.forget("a")
    assert found(seams) == []
    shows(times=4, seams=seams).clear()
    assert found(seams) == []


def test_tenants_are_bounded() -> None:
    seams = shows(times=4, seams=Seams(most_tenants=2))
    for _ in range(60):  # more text than the first one has sent
        seams.count("b", text(NAME), [])
    assert found(seams) == [1, 4]
    seams.count("c", text(NAME), [])
    assert found(seams) == []


def test_seams_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams_module, "_MOST_SEAMS", 3)
    seams = shows(times=4)
    for number in range(2):
        shows(times=1, behind=100 + number, seams=seams)
    assert found(seams) == [1, 4]
    shows(times=1, behind=102, seams=seams)
    assert found(seams) == []
    known = seams._tenants.get("a")
    assert known is not None
    assert len(known.starts) == len(known.places) == 3


def test_late_runs_count_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams_module, "_MOST_STARTS", 40)
    seams = shows(times=8)
    shows(times=400, behind=100, seams=seams)
    assert found(seams) == []
    known = seams._tenants.get("a")
    assert known is not None
    assert known.num_starts < 40
    assert list(known.starts) == list(known.places), "what fell to nothing is forgotten"
    assert len(known.starts) == 1


@pytest.mark.parametrize("size", range(4))
def test_the_first_two_tokens_stand_behind_no_seam(size: int) -> None:
    pairs = pairs_of(np.arange(5, 5 + size))
    assert pairs.tolist() == [-1, -1, 5 << 32 | 6][:size] + [6 << 32 | 7][: max(0, size - 3)]
    seams = Seams()
    for _ in range(9):
        seams.count("a", pairs_of(np.arange(70)), [Span(0, 70), Span(1, 70)])
    assert seams.find("a", pairs).tolist() == []


spans = st.builds(
    lambda start, size: Span(start, start + size), st.integers(0, 60), st.integers(1, 12)
)


@settings(deadline=None, max_examples=200)
@given(many=st.lists(spans, max_size=12), one=spans)
def test_union_and_overlap_are_those_of_sets(many: list[Span], one: Span) -> None:
    merged = union(many)
    held = {place for span in many for place in range(*span)}
    assert {place for span in merged for place in range(*span)} == held
    assert all(a.stop < b.start for a, b in pairwise(merged))
    shared = [span for span in merged if max(span.start, one.start) < min(span.stop, one.stop)]
    assert list(overlapping(merged, one)) == shared

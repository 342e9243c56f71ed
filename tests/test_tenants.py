"""A table of tenants that is full."""

import pytest

from sgl_blend.finding import tenants as module
from sgl_blend.finding.tenants import Tenants


def table(most: int = 3) -> Tenants[list[str]]:
    known: Tenants[list[str]] = Tenants(list, most)
    known.of("a", 100).append("of a")
    return known


def test_a_flood_of_small_tenants_pushes_out_none_that_sends_more() -> None:
    known = table()
    for number in range(50):
        known.of(f"made up {number}", 5)
    assert known.get("a") == ["of a"]
    assert known.get("made up 49") == []
    assert known.num_pushed_out == 48


def test_of_equals_the_one_that_was_not_seen_for_longest_gives_way() -> None:
    known = table()
    for name in ("b", "c", "b", "d"):
        known.of(name, 0)
    assert [known.get(name) for name in "abcd"] == [["of a"], [], None, []]


def test_who_stays_away_gives_way_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HALVED_AFTER", 200)
    known = table(most=2)
    for number in range(8):
        known.of(f"new {number}", 90)
    assert known.get("a") is None
    assert known.get("new 7") == []


def test_what_is_forgotten_is_told_once() -> None:
    told: list[list[str]] = []
    known: Tenants[list[str]] = Tenants(list, 2, told.append)
    for name in "abc":
        known.of(name, 1).append(name)
    known.forget("b")
    known.forget("b")
    known.clear()
    assert told == [["a"], ["b"], ["c"]]
    assert known.num_pushed_out == 1
    assert [known.get(name) for name in "abc"] == [None] * 3

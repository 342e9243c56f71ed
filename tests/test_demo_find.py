"""What the demo without marks is judged by."""

from collections import Counter
from pathlib import Path

import pytest

from examples.demo.find import Answer, figures, make_table, shortfalls, visits
from examples.demo.material import Material, make_prompts, make_warm_up
from examples.demo.measure import TOKEN_KINDS

CHUNKS = [f"document {number}" for number in range(12)]


def answer(found: int, blend_s: float = 1.0) -> Answer:
    tokens = {"prompt_tokens": 1000, "found_tokens": found, **dict.fromkeys(TOKEN_KINDS, 0)}
    return Answer(tokens, blend_s, 3.0, 0.1)


def test_it_is_judged_by_the_later_prompts() -> None:
    told = figures({"at first": [answer(0, 9.0)], "later": [answer(900), answer(700)]})
    assert told == {"found_share": 0.8, "speedup_ttft": 3.0, "kl": pytest.approx(0.1)}
    assert shortfalls(told, any_speed=False) == []


def test_each_bound_is_held() -> None:
    little = figures({"later": [answer(740)]})
    assert len(shortfalls(little, any_speed=False)) == 1
    slow = figures({"later": [answer(900, 1.3)]})
    assert len(shortfalls(slow, any_speed=False)) == 1
    assert shortfalls(slow, any_speed=True) == []


def test_the_table_has_a_row_for_each_visit() -> None:
    assert make_table({"at first": [answer(0)], "later": [answer(900)]}).row_count == 2


@pytest.fixture
def material() -> Material:
    return Material(Path(), 0, 0, (), (), make_warm_up(CHUNKS), make_prompts(CHUNKS))


def test_every_document_is_seen_twice_before_it_counts(material: Material) -> None:
    first, second, later = visits(material).values()
    for visit in (first, second):
        assert Counter(chunk for prompt in visit for chunk in prompt.chunks) == Counter(CHUNKS)
    assert later == [*material.prompts]


def test_no_prompt_begins_like_another(material: Material) -> None:
    begins = [prompt.chunks[0] for visit in visits(material).values() for prompt in visit]
    assert len(set(begins)) == len(begins)

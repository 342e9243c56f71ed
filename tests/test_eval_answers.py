"""Accuracy, token F1 and Rouge-L against figures worked out by hand."""

import pytest

from sgl_blend.commands.evaluation.answers import exact_match, normalise, rouge_l, token_f1


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Black Sea.", "black sea"),
        ("an apple, a day", "apple day"),
        ("U.S.A.", "usa"),
        ("there's another theme", "theres another theme"),
        ("A", ""),
        ("Zürich\n", "zürich"),
    ],
)
def test_normalisation_is_squads(text: str, bare: str) -> None:
    assert normalise(text) == bare


def test_an_answer_is_right_if_it_is_any_of_those_accepted() -> None:
    assert exact_match(" the Black Sea", ["Mediterranean", "Black Sea!"]) == 1.0
    assert exact_match("Black", ["Black Sea"]) == 0.0
    assert exact_match("", ["Black Sea"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "accepted", "f1"),
    [
        ("black sea", ["the Black Sea"], 1.0),
        ("black sea coast", ["black sea"], 0.8),  # precision 2/3, recall 1
        ("sea sea", ["sea"], 2 / 3),  # a word counts as often as it is there: precision 1/2
        ("sea", ["sea sea sea"], 0.5),  # recall 1/3
        ("sea sea", ["sea sea red"], 0.8),  # precision 1, recall 2/3
        ("red", ["black sea"], 0.0),
        ("", ["black sea"], 0.0),
        ("the", ["a"], 1.0),  # both are nothing but articles
        ("black sea coast", ["red", "coast black", "black"], 0.8),  # the best one counts
    ],
)
def test_token_f1(answer: str, accepted: list[str], f1: float) -> None:
    assert token_f1(answer, accepted) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("the cat sat on the mat", ["the cat sat on the mat"], 1.0),
        # longest common subsequence "a c": precision 2/4, recall 2/3
        ("a b c d", ["a c e"], 2 * 0.5 * (2 / 3) / (0.5 + 2 / 3)),
        ("c a", ["a c"], 0.5),  # order counts, unlike in F1
        ("x", ["a c"], 0.0),
        ("walking", ["walked"], 1.0),  # stems are compared
        ("c a", ["z", "a c", "a"], 2 / 3),
    ],
)
def test_rouge_l(answer: str, accepted: list[str], expected: float) -> None:
    assert rouge_l(answer, accepted) == pytest.approx(expected)

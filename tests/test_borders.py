"""Borders as vocabularies spell them, and as they stand in a prompt."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.finding.borders import Border, Borders, strength_of


class Vocabulary:
    """A tokenizer of the test."""

    def __init__(self, *pieces: str | None, special: tuple[int, ...] = ()) -> None:
        self._pieces = list(pieces)
        self.all_special_ids = list(special)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._pieces[number] for number in ids]

    def __len__(self) -> int:
        return len(self._pieces)


@pytest.mark.parametrize(
    ("piece", "strength"),
    [
        ("word", Border.NONE),
        ("Ġword", Border.NONE),
        (None, Border.NONE),
        ("", Border.NONE),
        ("Ċword", Border.NONE),
        ("ĊĊword", Border.NONE),
        (".", Border.SENTENCE),
        ("end.", Border.SENTENCE),
        ("?Ġ", Border.SENTENCE),
        ("。", Border.SENTENCE),
        ("Ċ", Border.LINE),
        (";Ċ", Border.LINE),
        (".ĊĠĠ", Border.LINE),
        ("čĊ", Border.LINE),
        ("<0x0A>", Border.LINE),
        ("\n", Border.LINE),
        ("ĊĊ", Border.BLANK_LINE),
        (".ĊĊ", Border.BLANK_LINE),
        ("ĊĠĠĊ", Border.BLANK_LINE),
        ("čĊčĊ", Border.BLANK_LINE),
        ("▁▁Ċ", Border.LINE),
    ],
)
def test_a_token_is_judged_by_its_end(piece: str | None, strength: Border) -> None:
    assert strength_of(piece) == strength


def test_without_a_tokenizer_nothing_is_a_border() -> None:
    borders = Borders.of(None)
    assert borders.behind(np.array([0, 1, 99_999])).tolist() == [0, 0, 0]
    assert borders.before(np.array([0, 1, 2])).tolist() == [4, 0, 0]


def test_special_tokens_are_the_strongest_whoever_names_them() -> None:
    vocabulary = Vocabulary("a", "<bos>", "<header>", "<plain>", special=(1,))
    assert Borders.of(vocabulary).behind(np.arange(4)).tolist() == [0, 4, 0, 0]
    vocabulary.added_tokens_decoder = {  # type: ignore[attr-defined]
        2: SimpleNamespace(special=True),
        3: SimpleNamespace(special=False),
        9: SimpleNamespace(special=True),  # beyond the vocabulary
    }
    assert Borders.of(vocabulary).behind(np.arange(4)).tolist() == [0, 4, 4, 0]


def test_ids_beyond_the_vocabulary_are_no_border() -> None:
    borders = Borders.of(Vocabulary("Ċ"))
    assert borders.behind(np.array([0, 1, 10**9], np.int32)).tolist() == [2, 0, 0]


@given(tokens=st.lists(st.integers(0, 4), max_size=30))
def test_a_border_stands_in_front_of_the_next_token(tokens: list[int]) -> None:
    borders = Borders(np.arange(5, dtype=np.uint8))
    expected = [4, *tokens][: len(tokens)]
    for at in range(2, len(tokens)):
        if tokens[at - 2] == tokens[at - 1] == Border.LINE:
            expected[at] = Border.BLANK_LINE
    assert borders.before(np.array(tokens, np.int64)).tolist() == expected


def test_a_tokenizer_of_transformers_is_read() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    ids = {"a": 0, "Ċ": 1, "ĊĊ": 2, ".": 3, "<s>": 4}
    model = tokenizers.models.WordLevel(ids, unk_token="a")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), bos_token="<s>"
    )
    assert Borders.of(fast).behind(np.arange(5)).tolist() == [0, 2, 3, 1, 4]

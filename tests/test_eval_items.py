"""Reading items: our own format, LongBench's tasks, CacheBlend's ctxs, and broken files."""

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_blend.commands.evaluation.converters import FORMATS, read_items
from sgl_blend.commands.evaluation.items import Item
from sgl_blend.errors import CommandError

ITEM: dict[str, Any] = {
    "system": "Answer.",
    "chunks": ["Varna lies on the Black Sea.", "Capybaras swim."],
    "question": "Where is Varna?",
    "answers": ["On the Black Sea", "Black Sea"],
    "kind": "direct",
}
PASSAGES = "Passage 1:\nVarna\nOn the Black Sea.\n\nPassage 2:\nIn 1906, see passage 1: dredged.\n"


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def longbench(context: str, dataset: str | None = None) -> dict[str, Any]:
    named = {} if dataset is None else {"dataset": dataset}
    return {"input": "Where is it?", "context": context, "answers": ["There"], **named}


def test_an_item_is_read_as_it_was_written(tmp_path: Path) -> None:
    (item,) = read_items(write(tmp_path / "a.jsonl", {**ITEM, "id": 7}))

    assert item == Item(
        system="Answer.",
        chunks=("Varna lies on the Black Sea.", "Capybaras swim."),
        question="Where is Varna?",
        answers=("On the Black Sea", "Black Sea"),
        kind="direct",
    )


def test_one_answer_is_enough_and_the_system_text_may_be_left_out(tmp_path: Path) -> None:
    bare = {"chunks": ["a"], "question": "?", "answer": "yes"}
    (item,) = read_items(write(tmp_path / "a.jsonl", bare))
    assert item.answers == ("yes",)
    assert item.system == ""
    assert item.kind is None


def test_blank_lines_are_skipped_and_the_limit_counts_items(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({**ITEM, "question": str(number)}) for number in range(4)]
    path.write_text("\n\n".join(lines))

    assert [item.question for item in read_items(path, limit=3)] == ["0", "1", "2"]


def test_a_list_is_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([ITEM, ITEM], indent=1))
    assert len(read_items(path)) == 2


@pytest.mark.parametrize("name", ["longbench-2wikimqa", "longbench-musique", "longbench-multinews"])
def test_passages_become_chunks_without_their_numbers(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.jsonl", longbench(PASSAGES))

    (item,) = read_items(path, name)

    assert item.chunks == (
        "Varna\nOn the Black Sea.\n\n",
        "In 1906, see passage 1: dredged.\n\n",
    )
    assert item.answers == ("There",)
    assert item.system.endswith("\n\n")


def test_a_question_over_passages_is_asked_for_its_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", longbench(PASSAGES))
    assert read_items(path, "longbench-musique")[0].question == "Question: Where is it?\nAnswer:"
    assert read_items(path, "longbench-multinews")[0].question == "Summary:"


def test_every_example_dialogue_becomes_a_chunk(tmp_path: Path) -> None:
    examples = (
        "Dialogue: Ann: Hi\nBob: Hello\nSummary: They meet.\nDialogue: Eve: Bye\nSummary: End."
    )
    line = {**longbench(examples), "input": "Dialogue: Tom: Well?\nSummary: "}

    (item,) = read_items(write(tmp_path / "a.jsonl", line), "longbench-samsum")

    assert item.chunks == (
        "Dialogue: Ann: Hi\nBob: Hello\nSummary: They meet.\n\n",
        "Dialogue: Eve: Bye\nSummary: End.\n\n",
    )
    assert item.question == "Dialogue: Tom: Well?\nSummary: "


def test_ctxs_become_chunks_with_their_titles(tmp_path: Path) -> None:
    path = tmp_path / "musique_s.json"
    ctxs = [{"title": "Varna", "text": "a port"}, {"title": "", "text": "a sea"}]
    path.write_text(json.dumps([{"ctxs": ctxs, "question": "What?", "answers": ["port"]}]))

    (item,) = read_items(path)

    assert item.chunks == ("Varna\na port\n\n", "a sea\n\n")
    assert item.question == "Question: What?\nAnswer:"


RECORDS: dict[str, Any] = {
    "jsonl": ITEM,
    "longbench-2wikimqa": longbench(PASSAGES, "2wikimqa"),
    "longbench-musique": longbench(PASSAGES, "musique"),
    "longbench-samsum": longbench("Dialogue: A: b\nSummary: c", "samsum"),
    "longbench-multinews": longbench(PASSAGES, "multi_news"),
    "musique-ctxs": {"ctxs": [{"text": "a"}], "question": "?", "answers": ["b"]},
}


@pytest.mark.parametrize("name", RECORDS)
def test_auto_reads_as_the_right_format_does(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.jsonl", RECORDS[name])
    assert read_items(path, "auto") == read_items(path, name)


def test_every_format_is_tried_with_auto() -> None:
    assert RECORDS.keys() == FORMATS.keys()


BAD = {
    "no JSON": ('{"chunks": [', "Input data was truncated"),
    "no object": ("3", "Expected `object`, got `int`"),
    "no question": ('{"chunks": ["a"], "answer": "b"}', "missing required field `question`"),
    "number as chunk": (
        '{"chunks": ["a", 3], "question": "?", "answer": "b"}',
        r"Expected `str`, got `int` - at `\$.chunks\[1\]`",
    ),
    "no chunk": ('{"chunks": [], "question": "?", "answer": "b"}', "at least one text"),
    "empty chunk": ('{"chunks": ["a", ""], "question": "?", "answer": "b"}', "none of them empty"),
    "no answer": ('{"chunks": ["a"], "question": "?"}', "must hold an answer"),
    "blank answer": ('{"chunks": ["a"], "question": "?", "answer": " "}', "not blank"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(tmp_path: Path, name: str) -> None:
    line, sentence = BAD[name]
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(ITEM)}\n\n{line}\n")
    with pytest.raises(CommandError, match=rf"^a\.jsonl, line 3: .*{sentence}"):
        read_items(path)


def test_a_bad_item_of_a_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([ITEM, {**ITEM, "chunks": None}]))
    with pytest.raises(CommandError, match=r"^a\.json, item 2: Expected `array`"):
        read_items(path)


def test_an_unnamed_longbench_task_must_be_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", longbench(PASSAGES, "narrativeqa"))
    with pytest.raises(CommandError, match="name it with --format"):
        read_items(path)


def test_a_file_must_be_there_and_hold_something(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^cannot read .*none\.jsonl: No such file"):
        read_items(tmp_path / "none.jsonl")
    with pytest.raises(CommandError, match="Is a directory"):
        read_items(tmp_path)
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(CommandError, match=r"^empty\.jsonl holds no items"):
        read_items(empty)
    broken = tmp_path / "broken.json"
    broken.write_text("[{]")
    with pytest.raises(CommandError, match=r"^broken\.json is not a JSON list"):
        read_items(broken)

"""From the files users have to items: our own jsonl, LongBench's tasks, CacheBlend's ``ctxs``."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sgl_blend.commands.evaluation.items import Item, ItemLine, numbered_records
from sgl_blend.errors import CommandError

_ANSWER_FROM_PASSAGES = (
    "Answer the question from the passages below. Reply with the answer alone, in a few words.\n\n"
)
_SUMMARISE_DIALOGUE = (
    "Summarise the last dialogue in a few short sentences, as in the examples.\n\n"
)
_SUMMARISE_NEWS = "Write a one-page summary of all the news passages below.\n\n"

_PASSAGE = re.compile(r"^Passage \d+:\s*", re.MULTILINE)
_DIALOGUE = re.compile(r"^(?=Dialogue:)", re.MULTILINE)


class LongBenchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a LongBench task file."""

    input: str
    context: str
    answers: tuple[str, ...]


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """One retrieved text of a ``ctxs`` item."""

    text: str
    title: str = ""


class CtxsItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the files that CacheBlend's authors published, such as musique_s.json."""

    ctxs: tuple[Passage, ...]
    question: str
    answers: tuple[str, ...]


def from_passage_question(line: LongBenchLine) -> Item:
    """Make one chunk of each passage; the numbers go, because a chunk may stand anywhere."""
    return Item(
        system=_ANSWER_FROM_PASSAGES,
        chunks=_blocks(_PASSAGE, line.context),
        question=f"Question: {line.input}\nAnswer:",
        answers=line.answers,
    )


def from_dialogue_examples(line: LongBenchLine) -> Item:
    """Make one chunk of each example; the input ends where the summary is to be written."""
    return Item(
        system=_SUMMARISE_DIALOGUE,
        chunks=_blocks(_DIALOGUE, line.context),
        question=line.input,
        answers=line.answers,
    )


def from_news(line: LongBenchLine) -> Item:
    """Make one chunk of each news passage; the task has no question."""
    return Item(
        system=_SUMMARISE_NEWS,
        chunks=_blocks(_PASSAGE, line.context),
        question="Summary:",
        answers=line.answers,
    )


def from_ctxs(line: CtxsItem) -> Item:
    """Make one chunk of each text, its title on top if it has one."""
    texts = (f"{passage.title}\n{passage.text}".strip() for passage in line.ctxs)
    return Item(
        system=_ANSWER_FROM_PASSAGES,
        chunks=tuple(f"{text}\n\n" for text in texts if text),
        question=f"Question: {line.question}\nAnswer:",
        answers=line.answers,
    )


def _blocks(start: re.Pattern[str], context: str) -> tuple[str, ...]:
    blocks = (block.strip() for block in start.split(context))
    return tuple(f"{block}\n\n" for block in blocks if block)


Convert = Callable[[Any], Item]

FORMATS: dict[str, tuple[type[msgspec.Struct], Convert]] = {
    "jsonl": (ItemLine, ItemLine.to_item),
    "longbench-2wikimqa": (LongBenchLine, from_passage_question),
    "longbench-musique": (LongBenchLine, from_passage_question),
    "longbench-samsum": (LongBenchLine, from_dialogue_examples),
    "longbench-multinews": (LongBenchLine, from_news),
    "musique-ctxs": (CtxsItem, from_ctxs),
}
"""Per file format the type of a record and what makes an item of it."""

_LONGBENCH_TASKS = {
    "2wikimqa": "longbench-2wikimqa",
    "musique": "longbench-musique",
    "samsum": "longbench-samsum",
    "multi_news": "longbench-multinews",
}


class _Signs(msgspec.Struct):
    """What tells the formats apart."""

    chunks: Any = None
    ctxs: Any = None
    context: Any = None
    dataset: Any = None


def read_items(path: Path, file_format: str = "auto", limit: int | None = None) -> list[Item]:
    """Read the items of a file.

    Args:
        path: The file, one JSON object a line or one JSON list.
        file_format: A name of FORMATS, or "auto" to tell it from the first record.
        limit: Take no more than so many, from the beginning.

    Raises:
        CommandError: The file cannot be read, is empty, or a record is malformed; the message names
            its line.
    """
    items: list[Item] = []
    for place, record in numbered_records(path):
        if limit is not None and len(items) >= limit:
            break
        if file_format == "auto":
            file_format = _recognise(place, record)
        items.append(_read_record(place, record, file_format))
    if not items:
        raise CommandError(f"{path.name} holds no items")
    return items


def _recognise(place: str, record: bytes) -> str:
    try:
        signs = msgspec.json.decode(record, type=_Signs)
    except msgspec.DecodeError as err:
        raise CommandError(f"{place}: {err}") from None
    if signs.ctxs is not None:
        return "musique-ctxs"
    if signs.context is None:
        return "jsonl"
    if isinstance(signs.dataset, str) and signs.dataset in _LONGBENCH_TASKS:
        return _LONGBENCH_TASKS[signs.dataset]
    raise CommandError(f"{place}: a LongBench task that is not told; name it with --format")


def _read_record(place: str, record: bytes, file_format: str) -> Item:
    kind, convert = FORMATS[file_format]
    try:
        return convert(msgspec.json.decode(record, type=kind))
    except msgspec.DecodeError as err:
        raise CommandError(f"{place}: {err}") from None
    except ValueError as err:
        raise CommandError(f"{place}: {err}") from None

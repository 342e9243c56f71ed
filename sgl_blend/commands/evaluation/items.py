"""What is asked: items read from a file, one line each, every line checked."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from sgl_blend.errors import CommandError


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A question over text chunks and what counts as right.

    Attributes:
        system: Text before the first chunk; may be empty.
        chunks: The texts whose KV is reused, in prompt order.
        question: Text after the last chunk; may be empty.
        answers: Every accepted answer.
        kind: A label by which accuracy is broken down, or None.
    """

    system: str = ""
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    kind: str | None = None

    def __post_init__(self) -> None:
        if not self.chunks or not all(self.chunks):
            raise ValueError("`chunks` must hold at least one text, and none of them empty")
        if not any(answer.strip() for answer in self.answers):
            raise ValueError("`answers` or `answer` must hold an answer that is not blank")


class ItemLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of our own format; names it does not know are ignored."""

    system: str = ""
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...] = ()
    answer: str | None = None
    kind: str | None = None

    def to_item(self) -> Item:
        """Make the item.

        Raises:
            ValueError: It has no chunk or no answer.
        """
        return Item(
            system=self.system,
            chunks=self.chunks,
            question=self.question,
            answers=self.answers if self.answer is None else (self.answer, *self.answers),
            kind=self.kind,
        )


def numbered_records(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every record of a jsonl file, or of one JSON list, with its place for messages.

    Yields:
        (place such as "a.jsonl, line 3", the record as JSON); blank lines are skipped.

    Raises:
        CommandError: The file cannot be read, or is a list that is no JSON.
    """
    content = read_file(path)
    if content.lstrip().startswith(b"["):
        try:
            records = msgspec.json.decode(content, type=list[msgspec.Raw])
        except msgspec.DecodeError as err:
            raise CommandError(f"{path.name} is not a JSON list: {err}") from None
        for number, record in enumerate(records, 1):
            yield f"{path.name}, item {number}", bytes(record)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"{path.name}, line {number}", line


def read_file(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        CommandError: It cannot be read; the message says why.
    """
    try:
        return path.read_bytes()
    except OSError as err:
        raise CommandError(f"cannot read {path}: {err.strerror}") from None

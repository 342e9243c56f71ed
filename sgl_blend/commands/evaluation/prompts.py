"""From items to prompts: templates, tokens, and where the chunks stand."""

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sgl_blend.commands.evaluation.items import Item, read_file
from sgl_blend.errors import CommandError

TEMPLATE_FILE = "sgl_blend_templates.json"
"""A model folder may hold its own templates under this name."""

Encode = Callable[[str, bool], list[int]]
"""(text, whether the tokenizer adds its special tokens) -> token ids."""


class Templates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the parts of an item become text: format strings, each with the name of its part."""

    system_template: str = "{system}"
    chunk_template: str = "{chunk}"
    question_template: str = "{question}"

    def __post_init__(self) -> None:
        _check_template("system_template", self.system_template, "system", optional=True)
        _check_template("chunk_template", self.chunk_template, "chunk")
        _check_template("question_template", self.question_template, "question")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads.

    Attributes:
        token_ids: The whole prompt.
        spans: Where the chunks are: start and stop in turn, [start0, stop0, start1, stop1, ...].
    """

    token_ids: tuple[int, ...]
    spans: tuple[int, ...]


def find_templates(model_path: str, **flags: str | None) -> Templates:
    """Return the templates of a model: its own, else the plain ones, flags before either.

    Args:
        model_path: Folder of the model; its TEMPLATE_FILE is read if it is there.
        flags: Templates by field name; None where a flag was not given.

    Raises:
        CommandError: The file is malformed, or a template has a placeholder that is not its own.
    """
    found: dict[str, str] = {}
    path = Path(model_path) / TEMPLATE_FILE
    if path.is_file():
        try:
            found = msgspec.json.decode(read_file(path), type=dict[str, str])
        except msgspec.DecodeError as err:
            raise CommandError(f"{path}: {err}") from None
    given = {name: text for name, text in flags.items() if text is not None}
    try:
        return msgspec.convert({**found, **given}, type=Templates)
    except msgspec.ValidationError as err:
        if isinstance(err.__cause__, CommandError):
            raise err.__cause__ from None
        raise CommandError(f"{path}: {err}") from None


def _check_template(name: str, template: str, part: str, *, optional: bool = False) -> None:
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template)} - {None}
    except ValueError as err:
        raise CommandError(f"{name} {template!r} is not a format string: {err}") from None
    if strange := sorted(str(field) for field in fields - {part}):
        raise CommandError(
            f"{name} {template!r} has the unknown placeholder {{{strange[0]}}}; "
            f"expected {{{part}}} alone"
        )
    if not fields and not optional:
        raise CommandError(f"{name} {template!r} must have the placeholder {{{part}}}")


def make_prompt(item: Item, templates: Templates, encode: Encode) -> Prompt:
    """Tokenise an item part by part, so that a chunk's tokens are the same in every prompt.

    The tokenizer adds its special tokens, such as BOS, to the first part only. A chunk of no tokens
    is left out.
    """
    token_ids = encode(templates.system_template.format(system=item.system), True)
    spans: list[int] = []
    for chunk in item.chunks:
        tokens = encode(templates.chunk_template.format(chunk=chunk), False)
        if tokens:
            spans += [len(token_ids), len(token_ids) + len(tokens)]
            token_ids = token_ids + tokens
    question = encode(templates.question_template.format(question=item.question), False)
    return Prompt(tuple(token_ids + question), tuple(spans))


def load_encoder(tokenizer_path: str, *, trust_remote_code: bool = False) -> Encode:
    """Load a tokenizer.

    Raises:
        CommandError: There is none.
    """
    return _encoder(_load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code))


def _encoder(tokenizer: Any) -> Encode:
    def encode(text: str, special: bool) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
        return token_ids

    return encode


def unknown_share(tokenizer_path: str, items: Iterable[Item], templates: Templates) -> float:
    """Return the share of the items' tokens that a tokenizer has no token for.

    Raises:
        CommandError: There is no tokenizer.
    """
    tokenizer = _load_tokenizer(tokenizer_path, trust_remote_code=False)
    encode = _encoder(tokenizer)
    tokens = [token for item in items for token in make_prompt(item, templates, encode).token_ids]
    return tokens.count(tokenizer.unk_token_id) / max(1, len(tokens))


def _load_tokenizer(tokenizer_path: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise CommandError(f"no tokenizer in {tokenizer_path}: {reason}") from None

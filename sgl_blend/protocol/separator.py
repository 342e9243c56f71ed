"""The separator: a special token that marks chunk boundaries in text and that the model never sees."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sgl_blend.errors import ConfigError

_PREFERRED = ("reserved", "unused", "extra", "control", "pad")
"""Words in the names of special tokens that models leave alone, most idle first.

Code models put their other fill-in-the-middle, repository and file tokens into prompts.
"""


_BLANK = "\u2581"
"""How SentencePiece writes a blank in a token."""


@dataclass(frozen=True, slots=True)
class Separator:
    """A special token: its text, which clients put between chunks, and its id."""

    text: str
    token_id: int


def find_separator(tokenizer: Any, wanted: str | None) -> Separator | None:
    """Return the separator of a tokenizer.

    Special tokens are cut out of a text before anything else is tokenised, so a chunk between two
    of them has the same tokens wherever it stands.

    Args:
        tokenizer: A Hugging Face tokenizer, or None (``--skip-tokenizer-init``).
        wanted: The operator's choice, or None to choose one the model has no use for.

    A separator must be found wherever its text stands, must be made by no other text, and must leave
    what stands beside it alone. How the tokenizer treats it is written in its flags, and a token that
    fails is not chosen, or refused if the operator names it.

    Returns:
        The separator, or None if there is no tokenizer or no idle special token that separates
        cleanly; chunks are then marked by ``sgl_blend_spans`` only.

    Raises:
        ConfigError: The operator's choice is not a special token, one that the model needs, or one
            that does not separate cleanly.
    """
    if tokenizer is None:
        if wanted is not None:
            raise ConfigError("blend_separator needs a tokenizer, but skip_tokenizer_init is set")
        return None
    special = _special_tokens(tokenizer)
    if wanted is not None:
        if wanted not in special:
            raise ConfigError(
                f"blend_separator {wanted!r} is not a special token of the vocabulary; it has "
                f"{_listing(special)}"
            )
        if _is_in_use(tokenizer, wanted, special[wanted]):
            raise ConfigError(
                f"blend_separator {wanted!r} is a token that the model needs itself: BOS, EOS, "
                "padding, unknown, or part of the chat template"
            )
        if (fault := _fault(tokenizer, special[wanted])) is not None:
            raise ConfigError(f"blend_separator {wanted!r} {fault}; name another special token")
        return Separator(wanted, special[wanted])
    idle = sorted(
        (rank, token_id, text)
        for text, token_id in special.items()
        if (rank := _rank(text)) is not None
        and not _is_in_use(tokenizer, text, token_id)
        and _fault(tokenizer, token_id) is None
    )
    return Separator(idle[0][2], idle[0][1]) if idle else None


def seam_warning(tokenizer: Any, separator: Separator | None) -> str | None:
    """Say what the tokenizer adds to a prompt at every separator, or None if it adds nothing.

    SentencePiece tokenizers may put a blank in front of text after a special token. Every chunk
    gets the same one wherever it stands, so reuse is right; the prompt has a few blanks more.
    """
    if separator is None:
        return None
    ids = tokenizer.encode(f"a{separator.text}b", add_special_tokens=False)
    following = ids[ids.index(separator.token_id) + 1 :]
    if not following or not str(tokenizer.convert_ids_to_tokens(following[0])).startswith(_BLANK):
        return None
    return (
        f"the tokenizer puts a blank in front of text after separator {separator.text!r}, so a prompt "
        "with separators has more blanks than one without; begin chunks and questions at word starts"
    )


def _fault(tokenizer: Any, token_id: int) -> str | None:
    """Say why a special token does not separate cleanly, or None if it does."""
    token = tokenizer.added_tokens_decoder.get(token_id)
    if token is None:
        return None
    if token.lstrip or token.rstrip:
        return "takes the blanks beside it out of the prompt (lstrip or rstrip)"
    if token.single_word:
        return "is not found inside a word (single_word)"
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if token.normalized and normalizer is not None:
        return "is looked for in normalized text, which other text may turn into (normalized)"
    return None


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    added = {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {**named, **added}


def _rank(text: str) -> int | None:
    for rank, word in enumerate(_PREFERRED):
        if re.search(word, text, re.IGNORECASE):
            return rank
    return None


def _is_in_use(tokenizer: Any, text: str, token_id: int) -> bool:
    used = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    )
    return token_id in used or text in str(getattr(tokenizer, "chat_template", None) or "")


def _listing(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")

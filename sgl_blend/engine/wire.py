"""How SGLang spells what its tokenizer process sends to the scheduler."""

import re
from typing import Any

import msgspec

_PATH = re.compile(r" - at `\$\[(\d+)\](?:\[(\d+)\])?.*")
_BULK = ("input_ids", "input_text", "input_embeds", "mm_inputs", "time_stats")
"""Made by SGLang itself or checked apart; they would only make the trip longer."""
_POSITIONAL = (
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
)


def wire_error(tokenized: Any) -> str | None:
    """Send a request to ourselves and say what the scheduler could not decode, or None.

    SGLang decodes by type in the scheduler's receive loop, where nothing catches what goes wrong.

    Args:
        tokenized: SGLang's TokenizedGenerateReqInput; its tokens and text are left out.
    """
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    without = {name: None for name in _BULK if name in tokenized.__struct_fields__}
    try:
        msgpack_decode(msgpack_encode(msgspec.structs.replace(tokenized, **without)))
    except msgspec.ValidationError as err:
        return _named(str(err), tokenized)
    except (OverflowError, TypeError, ValueError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def positional_field(tokenized: Any) -> str | None:
    """Return the name of a field that counts tokens of the prompt as the client wrote it, or None."""
    for name in _POSITIONAL:
        if getattr(tokenized, name, None) is not None:
            return name
    return None


def _named(message: str, tokenized: Any) -> str:
    """Put a field's name where msgspec says at which place of its array it is."""
    found = _PATH.search(message)
    if found is None:
        return message
    place = int(found[1]) - (type(tokenized).__struct_config__.tag is not None)
    names = [tokenized.__struct_fields__[place]]
    inner = getattr(tokenized, names[0])
    if found[2] is not None and isinstance(inner, msgspec.Struct):
        names.append(inner.__struct_fields__[int(found[2])])
    return f"{'.'.join(names)}: {_PATH.sub('', message)}"

"""How SGLang spells what its tokenizer process sends to the scheduler."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_blend.engine.objects import Received

_PATH = re.compile(r" - at `\$\[(\d+)\](?:\[(\d+)\])?.*")
_BULK = ("input_ids", "input_text", "input_embeds", "mm_inputs", "time_stats")
"""Made by SGLang itself or checked apart; they would only make the trip longer."""
_POSITIONAL = (
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Values of a request that index tensors or divide logits, as the client set them.

    Attributes:
        logprob_start: From which token on logprobs are wanted; None if none are.
        top_logprobs: How many of the likeliest tokens each comes with.
        logprob_ids: Token ids that each comes with.
        top_k: Likeliest tokens that sampling chooses from.
        num_samples: Answers that are wanted.
        stop_ids: Token ids that index a row of logits; none unless a least length is set.
        repetition_penalty: What logits of repeated tokens are divided by.
        logit_bias: What is added to the logits of some tokens, by token id.
        replaces_unnamed_turn: Whether it replaces a turn of its session and does not say which.
        replica: The data-parallel scheduler that it asks for; None for any.
    """

    logprob_start: int | None
    top_logprobs: int
    logprob_ids: array[int]
    top_k: int
    num_samples: int
    stop_ids: array[int]
    repetition_penalty: float
    logit_bias: dict[str, float]
    replaces_unnamed_turn: bool
    replica: int | None


def read_limits(received: Received) -> Limits:
    """Read a request whose values have the types that they must have (see wire_error)."""
    sampling: Any = received.sampling_params
    turn = received.session_params
    wants_logprobs = received.return_logprob
    return Limits(
        logprob_start=received.logprob_start_len if wants_logprobs else None,
        top_logprobs=received.top_logprobs_num,
        logprob_ids=array("q", (received.token_ids_logprob or ()) if wants_logprobs else ()),
        top_k=sampling.top_k,
        num_samples=sampling.n,
        stop_ids=array("q", (sampling.stop_token_ids or ()) if sampling.min_new_tokens > 0 else ()),
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or {},
        replaces_unnamed_turn=turn is not None and turn.replace and turn.rid is None,
        replica=getattr(received, "routed_dp_rank", None),
    )


def is_turn(received: Received) -> bool:
    """Tell whether a request belongs to a session, whose earlier turns go before its prompt."""
    return received.session_params is not None


def wire_error(received: Any) -> str | None:
    """Send a request to ourselves and say what the scheduler could not decode, or None.

    SGLang decodes by type in the scheduler's receive loop, where nothing catches what goes wrong.

    Args:
        received: SGLang's TokenizedGenerateReqInput; its tokens and text are left out.
    """
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    without = {name: None for name in _BULK if name in received.__struct_fields__}
    try:
        msgpack_decode(msgpack_encode(msgspec.structs.replace(received, **without)))
    except msgspec.ValidationError as err:
        return _named(str(err), received)
    except (OverflowError, TypeError, ValueError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def positional_field(received: Received) -> str | None:
    """Return the name of a field that counts tokens of the prompt as the client wrote it, or None."""
    for name in _POSITIONAL:
        if getattr(received, name, None) is not None:
            return name
    return None


def _named(message: str, received: Any) -> str:
    """Put a field's name where msgspec says at which place of its array it is."""
    found = _PATH.search(message)
    if found is None:
        return message
    place = int(found[1]) - (type(received).__struct_config__.tag is not None)
    names = [received.__struct_fields__[place]]
    inner = getattr(received, names[0])
    if found[2] is not None and isinstance(inner, msgspec.Struct):
        names.append(inner.__struct_fields__[int(found[2])])
    return f"{'.'.join(names)}: {_PATH.sub('', message)}"

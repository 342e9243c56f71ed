"""What a request says about its chunks: separators, spans and overrides, checked and made one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_blend.errors import RequestError
from sgl_blend.policies import POLICIES
from sgl_blend.settings.config import (
    FIND,
    BlendConfig,
    check_milliseconds,
    check_policy,
    check_ratio,
)

PARAM_PREFIX = "sgl_blend"
RESERVED_SALT = "sgl-blend:"
"""Cache salts and extra keys of clients must not begin like this: our own namespaces do."""

PARAMS = {
    "sgl_blend": "false serves this request in full; true is the default.",
    "sgl_blend_ratio": "A number from 0 to 1, in place of --blend-recompute-ratio.",
    "sgl_blend_policy": "A policy by name, in place of --blend-policy.",
    "sgl_blend_slo_ms": "Milliseconds in which the first token is wanted, a positive number, in place "
    "of --blend-ttft-slo-ms. Chunks come from storage at the finest level that is there in time.",
    "sgl_blend_find": "marks, known or learned, in place of --blend-find. It may ask for less than the "
    "server does, not for more.",
    "sgl_blend_spans": "Chunks by token offsets, a flat list [start0, end0, start1, end1, ...]. Spans "
    "ascend, hold a token at least and do not overlap. Separators then mark nothing.",
}
"""What a client may put into ``custom_params``."""
_SCALAR = (str, int, float, bool, type(None))
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk's place in the prompt: token positions [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Overrides:
    """What one request asks for; server settings where it is silent.

    The ratio is the policy's own where it has a fixed one.
    """

    enabled: bool
    ratio: float
    policy: str
    offsets: tuple[int, ...] | None
    find: str = "marks"
    slo_ms: float | None = None

    @property
    def slo_s(self) -> float | None:
        """In how many seconds the first token is wanted."""
        return None if self.slo_ms is None else self.slo_ms / 1000


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A prompt without markers and its chunks.

    Attributes:
        token_ids: The tokens the model sees.
        spans: Every marked chunk, in prompt order, disjoint and not empty.
    """

    token_ids: array[int]
    spans: tuple[Span, ...]


def parse_overrides(custom_params: Mapping[str, Any] | None, config: BlendConfig) -> Overrides:
    """Read the ``sgl_blend*`` entries of ``custom_params``.

    Raises:
        RequestError: A name is unknown or a value malformed.
    """
    params = custom_params or {}
    for name in params:
        if name.startswith(PARAM_PREFIX) and name not in PARAMS:
            raise RequestError(f"{name:.80} is not known; expected one of {', '.join(PARAMS)}")
    enabled = params.get("sgl_blend", True)
    if not isinstance(enabled, bool):
        raise RequestError(f"sgl_blend must be true or false, got {enabled!r:.80}")
    ratio = params.get("sgl_blend_ratio", config.blend_recompute_ratio)
    check_ratio("sgl_blend_ratio", ratio, RequestError)
    policy = params.get("sgl_blend_policy", config.blend_policy)
    check_policy("sgl_blend_policy", policy, RequestError, evaluation=config.blend_eval)
    fixed_ratio = POLICIES[policy].fixed_ratio
    offsets = params.get("sgl_blend_spans")
    if offsets is not None:
        offsets = _check_offsets(offsets)
    find = params.get("sgl_blend_find", config.blend_find)
    _check_find(find, config.blend_find)
    slo_ms = params.get("sgl_blend_slo_ms", config.blend_ttft_slo_ms)
    if slo_ms is not None:
        check_milliseconds("sgl_blend_slo_ms", slo_ms, RequestError)
        slo_ms = float(slo_ms)
    return Overrides(
        enabled=enabled,
        ratio=float(ratio) if fixed_ratio is None else fixed_ratio,
        policy=policy,
        offsets=offsets,
        find=find,
        slo_ms=slo_ms,
    )


def _check_find(find: Any, offered: str) -> None:
    if not isinstance(find, str) or find not in FIND:
        raise RequestError(f"sgl_blend_find must be one of {', '.join(FIND)}, got {find!r:.80}")
    if FIND.index(find) > FIND.index(offered):
        raise RequestError(
            f"sgl_blend_find {find} needs a server that was started with --blend-find {find}"
        )


def _check_offsets(offsets: Any) -> tuple[int, ...]:
    if not isinstance(offsets, list | tuple) or len(offsets) % 2:
        raise RequestError(
            "sgl_blend_spans must be a flat list [start0, end0, start1, end1, ...] of token offsets"
        )
    if not all(type(offset) is int for offset in offsets):
        raise RequestError("sgl_blend_spans must hold integers only")
    return tuple(offsets)


def locate_chunks(
    token_ids: array[int], offsets: Sequence[int] | None, separator_id: int | None
) -> ChunkedPrompt:
    """Find the chunks of a prompt and take the separators out of it.

    With separators, the text before the first and after the last one is not a chunk; every piece
    between two is. Pieces may be empty, so ``SEP chunk SEP SEP chunk SEP`` is fine.

    With explicit offsets separators mark nothing: the prompt is taken as it is, and the model sees a
    separator like any other token. Otherwise the author of a document could end the request by
    writing one into it.

    Args:
        token_ids: The prompt as tokenised.
        offsets: Explicit chunk boundaries, start and end in turn, or None.
        separator_id: Token that separates chunks, or None if the server has none.

    Raises:
        RequestError: Spans overlap, are empty or leave the prompt; or the prompt has nothing but
            separators.
    """
    if offsets is not None:
        return ChunkedPrompt(token_ids, _spans_from_offsets(offsets, len(token_ids)))
    if separator_id is None or separator_id not in token_ids:
        return ChunkedPrompt(token_ids, ())
    prompt = _split(token_ids, separator_id)
    if not prompt.token_ids:
        raise RequestError("the prompt is empty without its separators")
    return prompt


def _spans_from_offsets(offsets: Sequence[int], num_tokens: int) -> tuple[Span, ...]:
    if len(offsets) > 2 * num_tokens:
        raise RequestError(
            f"sgl_blend_spans has {len(offsets) // 2} spans for a prompt of {num_tokens} tokens"
        )
    spans = []
    previous = 0
    for start, stop in zip(offsets[0::2], offsets[1::2], strict=True):
        if not previous <= start < stop <= num_tokens:
            raise RequestError(
                f"sgl_blend_spans must ascend without overlap inside the prompt's {num_tokens} "
                f"tokens, got [{start}, {stop}) after {previous}"
            )
        spans.append(Span(start, stop))
        previous = stop
    return tuple(spans)


def _split(token_ids: array[int], separator_id: int) -> ChunkedPrompt:
    pieces: list[array[int]] = []
    start = 0
    while True:
        try:
            stop = token_ids.index(separator_id, start)
        except ValueError:
            break
        pieces.append(token_ids[start:stop])
        start = stop + 1
    pieces.append(token_ids[start:])
    stripped: array[int] = array(token_ids.typecode)
    spans = []
    for number, piece in enumerate(pieces):
        if piece and 0 < number < len(pieces) - 1:
            spans.append(Span(len(stripped), len(stripped) + len(piece)))
        stripped.extend(piece)
    return ChunkedPrompt(stripped, tuple(spans))


def check_wire_types(custom_params: Any) -> None:
    """Refuse ``custom_params`` that SGLang's scheduler could not decode.

    Its wire type is dict[str, scalar | list of scalars | dict of scalars]; anything deeper raises in
    the scheduler's receive loop, where nothing catches it, and ends the server.

    Raises:
        RequestError: A value is nested too deep, or an integer does not fit 64 bits.
    """
    if custom_params is None:
        return
    if not isinstance(custom_params, dict):
        raise RequestError(f"custom_params must be an object, got {type(custom_params).__name__}")
    for name, value in custom_params.items():
        if not _is_wire_text(name):
            raise RequestError("custom_params must have text keys")
        if isinstance(value, list | tuple):
            scalars: Sequence[Any] = value
        elif isinstance(value, dict):
            if not all(_is_wire_text(key) for key in value):
                raise RequestError(f"custom_params[{name!r:.80}] must have text keys")
            scalars = list(value.values())
        else:
            scalars = [value]
        if not all(_is_wire_scalar(scalar) for scalar in scalars):
            raise RequestError(
                f"custom_params[{name!r:.80}] must be a scalar, a flat list or a flat object of "
                "finite numbers, text, true, false and null"
            )


def _is_wire_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return False
    if isinstance(value, str):
        return _is_wire_text(value)
    return isinstance(value, _SCALAR)


def _is_wire_text(value: Any) -> bool:
    """Tell whether a value is text that UTF-8 can hold; lone surrogates from JSON are not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_salt(name: str, salt: str | None) -> None:
    """Refuse a client's cache salt or extra key that would reach into a namespace of ours.

    Args:
        name: Of the field, for the message.
        salt: Its value.

    Raises:
        RequestError: The value begins with the reserved prefix.
    """
    if isinstance(salt, str) and salt.startswith(RESERVED_SALT):
        raise RequestError(f"{name} must not begin with {RESERVED_SALT!r}")

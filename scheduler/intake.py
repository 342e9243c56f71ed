"""Intake: what the scheduler does with a request when it arrives, before SGLang looks at it."""

import itertools
from array import array

from sgl_blend.engine.objects import Received
from sgl_blend.engine.requests import (
    custom_params,
    received_class,
    received_ids,
    request_class,
    salt_of,
    set_received_ids,
    set_salt,
)
from sgl_blend.errors import RequestError
from sgl_blend.fallback import FallbackReason
from sgl_blend.protocol.request import (
    ChunkedPrompt,
    Overrides,
    Span,
    check_salt,
    locate_chunks,
    parse_overrides,
)
from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.radix_ext.namespaces import rejected_salt
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.scheduler.switch import BlendSwitch
from sgl_blend.settings.config import BlendConfig

_NUM_SINKS = 4
"""Tokens in front of a chunk that take the attention sink and are thrown away (EPIC's LegoLink-0)."""


class Intake:
    """Reads chunks and overrides of arriving requests and moves blended ones to their namespace.

    Args:
        config: The server's settings.
        model: Whose namespaces they are.
        separator_id: Token that separates chunks, if there is one.
        bos_token_id: What prompts of the model begin with, if there is one.
        switch: Whether requests are blended at present.
        longest: Tokens of the longest path that the model can prefill.
    """

    def __init__(
        self,
        config: BlendConfig,
        model: LoadedModel,
        *,
        separator_id: int | None,
        bos_token_id: int | None,
        switch: BlendSwitch,
        longest: int,
    ) -> None:
        self._config = config
        self._model = model
        self._separator_id = separator_id
        self._bos_token_id = bos_token_id
        self._switch = switch
        self._longest = longest
        self._serials = itertools.count()

    def read(self, received: Received) -> RequestState:
        """Take the markers out of a request and say what can be reused of it.

        Args:
            received: SGLang's TokenizedGenerateReqInput. Separators are removed from its tokens,
                and if it has chunks its cache salt becomes a blended namespace.

        Returns:
            The state to put on the request.
        """
        self._model.settle()
        token_ids = received_ids(received)
        if token_ids is None:
            return self._plain(received, 0, FallbackReason.MULTIMODAL)
        try:
            check_salt("cache_salt", salt_of(received))
            check_salt("extra_key", received_class(received))
            overrides = parse_overrides(custom_params(received), self._config)
            prompt = locate_chunks(token_ids, overrides.offsets, self._separator_id)
        except RequestError:
            # The tokenizer process answers these with 400. A request that came another way is
            # served in full, in a namespace that it shares with nothing but its like; ending the
            # scheduler would end everybody's requests.
            set_salt(received, rejected_salt(salt_of(received)))
            return self._plain(received, len(token_ids), FallbackReason.MALFORMED)
        set_received_ids(received, prompt.token_ids)
        spans = self._reusable(prompt)
        reason = _why_plain(overrides, spans)
        if reason is None and not self._switch.is_on:
            reason = FallbackReason.CANARY
        if reason is not None:
            return self._plain(received, len(prompt.token_ids), reason)
        return self._blended(received, prompt, spans, overrides)

    def _reusable(self, prompt: ChunkedPrompt) -> tuple[Span, ...]:
        """Return the chunks that are long enough to be reused, and short enough to be built."""
        if not prompt.spans:
            return ()
        prefix = len(self._build_prefix(prompt)) // prompt.token_ids.itemsize
        least, most = self._config.blend_min_chunk_tokens, self._longest - prefix
        return tuple(span for span in prompt.spans if least <= len(span) <= most)

    def _blended(
        self,
        received: Received,
        prompt: ChunkedPrompt,
        spans: tuple[Span, ...],
        overrides: Overrides,
    ) -> RequestState:
        client_salt = salt_of(received)
        prefix = self._build_prefix(prompt)
        salt = self._model.chunk_namespace(client_salt)
        keys = tuple(
            ChunkKey(
                salt=salt,
                extra_key=request_class(received),
                prefix=prefix,
                tokens=prompt.token_ids[span.start : span.stop].tobytes(),
            )
            for span in spans
        )
        state = RequestState(
            num_tokens=len(prompt.token_ids),
            spans=spans,
            keys=keys,
            client_salt=client_salt,
            policy=overrides.policy,
            ratio=overrides.ratio,
            slo_s=None if overrides.slo_ms is None else overrides.slo_ms / 1000,
            serial=next(self._serials) if self._config.blend_on_miss == "build" else None,
            model=self._model.fingerprint,
        )
        set_salt(received, state.blended_namespace(self._model))
        return state

    def _build_prefix(self, prompt: ChunkedPrompt) -> bytes:
        """Return what the prompt's chunks are built after."""
        first = prompt.token_ids[: prompt.spans[0].start]
        kind = self._config.blend_build_prefix
        if kind == "first" and len(first) <= self._config.blend_max_build_prefix:
            return first.tobytes()
        if kind == "none" or self._bos_token_id is None:
            return b""
        repeats = _NUM_SINKS if kind == "sinks" else 1
        return array(first.typecode, [self._bos_token_id] * repeats).tobytes()

    def _plain(self, received: Received, num_tokens: int, reason: FallbackReason) -> RequestState:
        return RequestState(
            num_tokens=num_tokens,
            spans=(),
            keys=(),
            client_salt=salt_of(received),
            policy=self._config.blend_policy,
            ratio=self._config.blend_recompute_ratio,
            fallback=reason,
        )


def _why_plain(overrides: Overrides, spans: tuple[Span, ...]) -> FallbackReason | None:
    if not overrides.enabled:
        return FallbackReason.DISABLED
    return None if spans else FallbackReason.NO_CHUNKS

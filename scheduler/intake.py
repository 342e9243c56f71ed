"""Intake: what the scheduler does with a request when it arrives, before SGLang looks at it."""

from __future__ import annotations

import hashlib
import itertools
import logging
from array import array
from collections.abc import Callable

from sgl_blend.engine.objects import Received
from sgl_blend.engine.requests import (
    brings_images,
    custom_params,
    received_class,
    received_ids,
    request_class,
    salt_of,
    set_received_ids,
    set_salt,
    take_out,
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
from sgl_blend.scheduler.finder import Finder, Search
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.scheduler.switch import BlendSwitch
from sgl_blend.settings.config import BlendConfig

logger = logging.getLogger(__name__)

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
        finder: Finds chunks in text without marks; None if only marks count.
        pretends: Tells whether a request for the base model has the class of one for an adapter.
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
        page_size: int,
        finder: Finder | None = None,
        pretends: Callable[[Received], bool] = lambda received: False,
    ) -> None:
        self._finder = finder
        self._pretends = pretends
        self._config = config
        self._model = model
        self._separator_id = separator_id
        self._bos_token_id = bos_token_id
        self._switch = switch
        self._longest = longest
        self._page_size = page_size
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
            if self._pretends(received):
                raise RequestError("extra_key ends with the id of an adapter")
            overrides = parse_overrides(custom_params(received), self._config)
            if brings_images(received):
                if overrides.offsets is None and self._separator_id is not None:
                    take_out(received, self._separator_id)
                num_tokens = len(received_ids(received) or ())
                return self._plain(received, num_tokens, FallbackReason.MULTIMODAL, overrides)
            prompt = locate_chunks(token_ids, overrides.offsets, self._separator_id)
        except RequestError:
            # The tokenizer process answers these with 400. A request that came another way is
            # served in full, in a namespace that it shares with nothing but its like; ending the
            # scheduler would end everybody's requests.
            set_salt(received, rejected_salt(salt_of(received)))
            return self._plain(received, len(token_ids), FallbackReason.MALFORMED)
        set_received_ids(received, prompt.token_ids)
        finder = self._finder
        if finder is not None and finder.is_on and self._switch.is_on and _searches(overrides):
            searched = self._search(finder, received, prompt, overrides)
            if searched is not None:
                return self._searched(finder, received, prompt, overrides, *searched)
        spans = self._reusable(prompt, self._build_prefix(prompt))
        reason = _why_plain(overrides, spans)
        if reason is None and not self._switch.is_on:
            reason = FallbackReason.CANARY
        if reason is not None:
            return self._plain(received, len(prompt.token_ids), reason, overrides)
        home = self._home(received, self._build_prefix(prompt))
        return self._blended(received, prompt, spans, overrides, home)

    def _reusable(self, prompt: ChunkedPrompt, prefix: bytes) -> tuple[Span, ...]:
        """Return the chunks that are long enough to be reused, and short enough to be built.

        Of one that fills no page after its build prefix nothing can be stored: it is text.
        """
        before = len(prefix) // prompt.token_ids.itemsize
        fills_a_page = self._page_size - before % self._page_size
        least = max(self._config.blend_min_chunk_tokens, fills_a_page)
        most = self._longest - before
        return tuple(span for span in prompt.spans if least <= len(span) <= most)

    def _home(self, received: Received, prefix: bytes) -> ChunkKey:
        """Return where chunks of a request are stored, as a chunk of no tokens."""
        salt = self._model.chunk_namespace(salt_of(received))
        return ChunkKey(salt, request_class(received), prefix, b"")

    def _search(
        self, finder: Finder, received: Received, prompt: ChunkedPrompt, overrides: Overrides
    ) -> tuple[Search, list[Span]] | None:
        """Look for chunks in text without marks; None where that failed."""
        try:
            return self._find(finder, received, prompt, learns=overrides.find == "learned")
        except Exception:  # a bug of ours must not end a server
            logger.exception("sgl-blend: finding chunks failed, and is off from now on")
            finder.num_failures += 1
            return None

    def _find(
        self, finder: Finder, received: Received, prompt: ChunkedPrompt, *, learns: bool
    ) -> tuple[Search, list[Span]]:
        tokens, marks = prompt.token_ids, prompt.spans
        tenant = _tenant_of(received)
        prefix = self._build_prefix(prompt)
        if self._config.blend_build_prefix == "first":
            if marks:
                finder.name_head(tenant, tokens[: marks[0].start])
            else:
                prefix = finder.head(tenant, tokens).tobytes() or prefix
        home = self._home(received, prefix)
        most = self._longest - home.prefix_length
        found = [span for span in finder.find(home, tokens, marks) if len(span) <= most]
        return Search(tenant, home, len(tokens), learns), found

    def _searched(
        self,
        finder: Finder,
        received: Received,
        prompt: ChunkedPrompt,
        overrides: Overrides,
        search: Search,
        found: list[Span],
    ) -> RequestState:
        """Return the state of a request whose text without marks was searched, too."""
        marked = self._reusable(prompt, search.home.prefix)
        spans = tuple(sorted([*marked, *found], key=lambda span: span.start))
        if spans:
            state = self._blended(received, prompt, spans, overrides, search.home)
        else:
            reason = FallbackReason.NO_CHUNKS
            state = self._plain(received, search.num_tokens, reason, overrides)
            self._follow_namespace(finder, received, state, prompt.token_ids)
        state.search = search
        numbers = {span.start: number for number, span in enumerate(spans)}
        state.found = frozenset(numbers[span.start] for span in found)
        return state

    def _follow_namespace(
        self, finder: Finder, received: Received, state: RequestState, tokens: array[int]
    ) -> None:
        """Leave a prompt without chunks where more of it is stored.

        A conversation that was blended once has its KV in the blended namespace. A later turn of which
        nothing is found goes on there.
        """
        extra_key, blended = request_class(received), state.blended_namespace(self._model)
        there = finder.stored_prefix(tokens, blended, extra_key)
        if there > 0 and there > finder.stored_prefix(tokens, salt_of(received), extra_key):
            state.model = self._model.fingerprint
            set_salt(received, blended)

    def _blended(
        self,
        received: Received,
        prompt: ChunkedPrompt,
        spans: tuple[Span, ...],
        overrides: Overrides,
        home: ChunkKey,
    ) -> RequestState:
        client_salt = salt_of(received)
        keys = tuple(
            ChunkKey(
                salt=home.salt,
                extra_key=home.extra_key,
                prefix=home.prefix,
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
            slo_s=overrides.slo_s,
            serial=next(self._serials) if self._config.blend_on_miss == "build" else None,
            model=self._model.fingerprint,
        )
        set_salt(received, state.blended_namespace(self._model))
        return state

    def _build_prefix(self, prompt: ChunkedPrompt) -> bytes:
        """Return what the prompt's chunks are built after."""
        tokens = prompt.token_ids
        if prompt.spans and self._config.blend_build_prefix == "first":
            first = tokens[: prompt.spans[0].start]
            if len(first) <= self._config.blend_max_build_prefix:
                return first.tobytes()
        return self._short_prefix(tokens.typecode)

    def _short_prefix(self, typecode: str) -> bytes:
        """Return what stands before chunks where no text of the prompt does."""
        kind = self._config.blend_build_prefix
        if kind == "none" or self._bos_token_id is None:
            return b""
        repeats = _NUM_SINKS if kind == "sinks" else 1
        return array(typecode, [self._bos_token_id] * repeats).tobytes()

    def _plain(
        self,
        received: Received,
        num_tokens: int,
        reason: FallbackReason,
        overrides: Overrides | None = None,
    ) -> RequestState:
        """Return the state of a request that reuses nothing; without overrides by the server's own."""
        asked = parse_overrides(None, self._config) if overrides is None else overrides
        return RequestState(
            num_tokens=num_tokens,
            spans=(),
            keys=(),
            client_salt=salt_of(received),
            policy=asked.policy,
            ratio=asked.ratio,
            fallback=reason,
        )


def _tenant_of(received: Received) -> str:
    """Return a short name for cache salt and class of a request; clients choose how long they are."""
    told = f"{salt_of(received)!r} {request_class(received)!r}"
    return hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _searches(overrides: Overrides) -> bool:
    return overrides.enabled and overrides.find != "marks"


def _why_plain(overrides: Overrides, spans: tuple[Span, ...]) -> FallbackReason | None:
    if not overrides.enabled:
        return FallbackReason.DISABLED
    return None if spans else FallbackReason.NO_CHUNKS

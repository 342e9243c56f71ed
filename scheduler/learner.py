"""Learning: text that comes again becomes a chunk.

When the prefill of a request is done, its prompt is compared with earlier ones of its tenant. What an
earlier one held is built in the background, and found from then on. Tokens and counts decide, no clock,
so all ranks of a model learn alike.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict

import msgspec

from sgl_blend.finding.borders import Borders
from sgl_blend.finding.lessons import Lessons, Prompt
from sgl_blend.finding.sightings import Sightings
from sgl_blend.finding.spans import Span as Piece
from sgl_blend.radix_ext.chunk_store import ChunkKey
from sgl_blend.scheduler.builds import ChunkBuilder
from sgl_blend.scheduler.credit import Credit
from sgl_blend.scheduler.finder import Finder, Search, beginning, ids_of
from sgl_blend.scheduler.request_state import RequestState

logger = logging.getLogger(__name__)

_MOST_COMING = 4_096


class Learner:
    """Makes chunks of text that comes again; owned by the scheduler thread.

    Args:
        sightings: Earlier prompts.
        lessons: Chooses chunks.
        borders: Of the tokenizer.
        builder: Builds them.
        finder: Finds them.
        credit: Pays for what is built.

    Attributes:
        num_chunks: Chunks that were given to the builder.
        num_tokens: Their tokens.
        num_hits: Pieces of such chunks that were found and used.
        num_hit_tokens: Their tokens.
        num_unpaid: Chunks that were not built, because their tenant had asked too little.
        num_failures: Errors of the learner. After the first it learns no more.
    """

    def __init__(
        self,
        sightings: Sightings,
        lessons: Lessons,
        borders: Borders,
        builder: ChunkBuilder,
        finder: Finder,
        credit: Credit,
    ) -> None:
        self._sightings = sightings
        self._lessons = lessons
        self._borders = borders
        self.builder = builder
        self._finder = finder
        self.credit = credit
        # Chunks that were paid for, and build prefixes, as chunks of no tokens.
        self._coming: OrderedDict[ChunkKey, None] = OrderedDict()
        self.num_chunks = self.num_tokens = self.num_hits = self.num_hit_tokens = 0
        self.num_unpaid = self.num_failures = 0

    @property
    def is_on(self) -> bool:
        """Whether nothing went wrong so far."""
        return self.num_failures == 0

    def finished(self, state: RequestState, tokens: array[int]) -> None:
        """Learn from a request whose prefill is done.

        Whatever goes wrong is logged once and ends the learning, not the server.

        Args:
            state: Of the request.
            tokens: Its prompt.
        """
        if not self.is_on:
            return
        search = state.search
        try:
            self._count_hits(state)
            if search is None:
                return
            # Of all tokens: an agent whose history is an exact prefix computes little, and must learn.
            self.credit.earn(search.tenant, state.report.prompt_tokens)
            if search.learns and search.num_tokens == len(tokens):
                self._learn(search, state, tokens)
        except Exception:  # a bug of ours must not end a server
            self.num_failures += 1
            logger.exception("sgl-blend: learning failed, and is off from now on")

    def built(self, key: ChunkKey) -> None:
        """Note that a chunk is stored which was learned."""
        self._coming.pop(key, None)
        self._coming.pop(key.prefix_only, None)
        self._finder.built(key, learned=True)

    def clear(self) -> None:
        """Forget all prompts, and what was to be built."""
        self._sightings.clear()
        self._lessons.clear()
        self._coming.clear()

    def describe(self) -> dict[str, int]:
        """Return totals and sizes for /server_info."""
        return {
            "learned_chunks": self.num_chunks,
            "learned_tokens": self.num_tokens,
            "learned_hits": self.num_hits,
            "learned_hit_tokens": self.num_hit_tokens,
            "unpaid_chunks": self.num_unpaid,
            "prompts_remembered": len(self._sightings),
            "prompt_log_bytes": self._sightings.num_bytes,
            "prompts_forgotten": self._sightings.num_forgotten,
            "learn_failures": self.num_failures,
        }

    def _count_hits(self, state: RequestState) -> None:
        hits = [
            state.keys[number]
            for number in state.found
            if state.spans[number].start in state.hit_starts
        ]
        if hits:
            learned = [
                key.length
                for key, is_learned in zip(hits, self._finder.are_learned(hits), strict=True)
                if is_learned
            ]
            self.num_hits += len(learned)
            self.num_hit_tokens += sum(learned)

    def _learn(self, search: Search, state: RequestState, tokens: array[int]) -> None:
        ids, home = ids_of(tokens), search.home
        start = max(beginning(home, tokens), state.report.prefix_tokens)
        sample = self._sightings.sample(search.tenant, ids)
        runs = self._sightings.find(sample, start)
        prompt = Prompt(
            tenant=search.tenant,
            tokens=ids,
            strengths=self._borders.before(ids),
            start=start,
            served=[
                Piece(span.start, span.stop)
                for span in state.spans
                if span.start in state.hit_starts
            ],
            runs=[run.span for run in runs],
            came_again=self._sightings.come_again(runs),
        )
        lesson = self._lessons.study(prompt)
        self._sightings.add(sample, lesson.new, start)
        if not lesson.chunks:
            return
        # Late text first, where not all can be paid: conversations drop their early messages first.
        # The chunk that is paid for first pays for the build prefix too, unless that is there.
        unpaid = 0 if home in self._coming else self._finder.missing_prefix(home)
        for chunk in reversed(lesson.chunks):
            learned = tokens[chunk.start : chunk.stop].tobytes()
            if self._build(search.tenant, msgspec.structs.replace(home, tokens=learned), unpaid):
                unpaid = 0

    def _build(self, tenant: str, key: ChunkKey, prefix_tokens: int) -> bool:
        """Have a chunk built if its tenant can pay for it and for these tokens of its build prefix."""
        if key in self._coming:
            if self._finder.is_stored(key):
                self.built(key)  # for another reason, or nobody knows any more how it begins
                return True
            self._coming.move_to_end(key)
        elif self.credit.spend(tenant, prefix_tokens + key.length):
            self.num_chunks += 1
            self.num_tokens += key.length
            self._note_coming(key)
            if prefix_tokens:
                self._note_coming(key.prefix_only)
        else:
            self.num_unpaid += 1
            return False
        self.builder.enqueue([key])
        return True

    def _note_coming(self, key: ChunkKey) -> None:
        self._coming[key] = None
        if len(self._coming) > _MOST_COMING:
            self._coming.popitem(last=False)

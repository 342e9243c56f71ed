"""Probes: stored chunks are prefilled once more after made-up texts, to learn which tokens deviate.

    build       [build prefix][chunk ..........]                  its KV is what is reused
    probe 0     [build prefix][a made-up text][chunk ..........]  layers up to the check layer
    probe 1     [build prefix][another one   ][chunk ..........]

How far a token's V in the check layer is from the stored one is remembered: the largest distance over
all probes. A policy that trusts it drops rows before the first layer.

The texts are the same for every chunk and every tenant, so the memory depends on the chunk, its build
prefix, the model and the settings alone. Probes run like builds: in the background, step by step, in a
namespace of their own. What they leave in the tree is evicted before anything else.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from sgl_blend.engine.objects import ForwardBatch, ModelOutput
from sgl_blend.engine.tree import TreeLock
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.memory import Probed
from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.chunk_store import ChunkHit, ChunkKey, ChunkStore
from sgl_blend.radix_ext.namespaces import is_built_by, probe_salt_of
from sgl_blend.scheduler.build_steps import BuildStep, StepPlanner
from sgl_blend.scheduler.loaded_model import LoadedModel

NUM_PROBES = 2
PROBE_TOKENS = 256
_SEED = 2405


class ProbeKey(ChunkKey, frozen=True, cache_hash=True, gc=False):
    """Identity of a chunk after a made-up text.

    Attributes:
        chunk: The chunk itself.
        number: Which text.
    """

    chunk: ChunkKey
    number: int


def made_up_texts(vocab_size: int) -> list[bytes]:
    """Draw the texts that probes put before a chunk: int64 token ids, always the same ones."""
    draw = random.Random(_SEED)
    return [
        array("q", [draw.randrange(vocab_size) for _ in range(PROBE_TOKENS)]).tobytes()
        for _ in range(NUM_PROBES)
    ]


@dataclass(slots=True)
class _Entry:
    """Where the memory of a chunk is.

    Attributes:
        place: Of its first token.
        length: Tokens.
        probes: Which probes have run, a bit each.
    """

    place: int
    length: int
    probes: int = 0


class Memories:
    """Knows of which chunks there is a memory, and where; owned by the scheduler thread.

    A memory belongs to a chunk after its build prefix, and not to the slots of its KV. Chunks that
    begin alike share slots. And KV that was evicted is built again, the same bit for bit. A chunk that
    came from storage in few bits has a memory of its own, which sees what rounding did to it. The
    places are a ring: what was remembered first makes room.

    Args:
        store: Where chunks are found.
        vocab_size: Token ids of the model.
        num_tokens: Places.
        longest: Tokens of the longest path that the model can prefill. A chunk whose probes would be
            longer has no memory.
    """

    def __init__(self, store: ChunkStore, vocab_size: int, num_tokens: int, longest: int) -> None:
        self._longest = longest
        self._store = store
        self._texts = tuple(made_up_texts(vocab_size))
        self._entries: OrderedDict[ChunkKey, _Entry] = OrderedDict()
        self._num_tokens = num_tokens
        self._next = 0

    @property
    def num_chunks(self) -> int:
        """Chunks that have a memory, or a part of one."""
        return len(self._entries)

    def can_probe(self, chunk: ChunkKey) -> bool:
        """Tell whether the model's context holds a probe of a chunk."""
        return chunk.prefix_length + PROBE_TOKENS + chunk.length <= self._longest

    def keys_of(self, chunks: Iterable[ChunkKey]) -> list[ProbeKey]:
        """Return the probes of chunks that can be probed, all of a chunk one after the other."""
        return [
            ProbeKey(
                probe_salt_of(chunk.salt),
                chunk.extra_key,
                prefix,
                chunk.tokens,
                chunk,
                number,
            )
            for chunk in filter(self.can_probe, chunks)
            for number, prefix in enumerate(_texts_after(chunk.prefix, self._texts))
        ]

    def place_of(self, hit: ChunkHit) -> int | None:
        """Return where a stored chunk's memory is; None unless all of its probes have run."""
        entry = self._entries.get(hit.stored_key)
        if entry is None or entry.probes != (1 << len(self._texts)) - 1:
            return None
        return entry.place

    def lacks(self, key: ProbeKey) -> bool:
        """Tell whether a probe has not run yet, whether its chunk is stored or not."""
        entry = self._entries.get(key.chunk)
        return entry is None or not entry.probes >> key.number & 1

    def wants(self, key: ProbeKey) -> ChunkHit | None:
        """Return the stored chunk of a probe that has not run yet, else None."""
        if not self.lacks(key):
            return None
        hit = self._store.find(key.chunk, Span(0, key.chunk.length))
        return hit if hit is not None and hit.complete and not hit.is_rounded else None

    def probed(self, key: ProbeKey) -> Probed | None:
        """Note that a probe runs to its end now; return what it finds out, None if that is nothing."""
        hit = self.wants(key)
        if hit is None:
            return None
        entry = self._entries.get(key.chunk)
        if entry is None:
            entry = self._entries[key.chunk] = self._make_room(hit.num_tokens)
        first, entry.probes = not entry.probes, entry.probes | 1 << key.number
        slots = hit.match.take(hit.prefix_length, hit.prefix_length + hit.num_tokens)
        return Probed(slots, begin=key.prefix_length, place=entry.place, first=first)

    def clear(self) -> None:
        """Forget all, because the tree did."""
        self._entries.clear()
        self._next = 0

    def _make_room(self, length: int) -> _Entry:
        """Return the next places of the ring; forgets what they were."""
        begin = self._next
        if begin + length > self._num_tokens:
            self._forget_while(lambda entry: entry.place >= begin)
            begin = 0
        stop = begin + length
        self._forget_while(lambda entry: begin < entry.place + entry.length and entry.place < stop)
        self._next = stop
        return _Entry(begin, length)

    def _forget_while(self, is_in_the_way: Callable[[_Entry], bool]) -> None:
        while self._entries and is_in_the_way(next(iter(self._entries.values()))):
            self._entries.popitem(last=False)


@lru_cache(maxsize=64)
def _texts_after(prefix: bytes, texts: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the build prefixes of probes; a prompt asks for the same ones with every chunk."""
    return tuple(prefix + text for text in texts)


class ProbeSteps(StepPlanner):
    """Cuts probes into steps; the last one is run once more if its KV outlived what it was for."""

    def __init__(
        self, store: ChunkStore, step_tokens: int, model: LoadedModel, memories: Memories
    ) -> None:
        super().__init__(store, step_tokens, model)
        self._memories = memories

    def hold(self, key: ChunkKey) -> TreeLock | None:
        """Keep the chunk of a probe in place: it is compared with the KV that it has now."""
        hit = self._memories.wants(key) if isinstance(key, ProbeKey) else None
        return None if hit is None else self.store.lock(hit.match)

    def next_step(self, key: ChunkKey) -> BuildStep | None:
        """Return the next step of a probe, None if it has run or its chunk is not stored."""
        assert isinstance(key, ProbeKey), "only probes are cut here"
        if self._memories.wants(key) is None or not is_built_by(key.salt, self.model.fingerprint):
            return None
        step = super().next_step(key)
        if step is not None:
            return step
        begin, stop = self.whole_pages(key.prefix_length), len(key.path)
        done = begin + (stop - begin - 1) // self.step_tokens * self.step_tokens
        return BuildStep(key, done, stop, is_last=True)

    def _ends_at(self, stop: int, end: int) -> bool:
        """Tell whether a probe has run once a step ends at stop: it needs all tokens of its chunk."""
        return stop == end


def run_probe(
    fusor: Fusor, memories: Memories, batch: ForwardBatch, step: BuildStep
) -> ModelOutput:
    """Run the forward of one step of a probe."""
    if isinstance(step.key, ProbeKey) and step.is_last:
        return fusor.probe(batch, memories.probed(step.key))
    return fusor.probe(batch, None)

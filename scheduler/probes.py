"""Probes: stored chunks are prefilled once more after made-up texts, to learn which tokens deviate.

    build       [build prefix][chunk ..........]                  its KV is what is reused
    probe 0     [build prefix][a made-up text][chunk ..........]  layers up to the check layer
    probe 1     [build prefix][another one   ][chunk ..........]

How far a token's V in the check layer is from the stored one is remembered beside the slots: the
largest distance over all probes. A policy that trusts it drops rows before the first layer.

The texts are the same for every chunk and every tenant, so the memory depends on the chunk, its build
prefix, the model and the settings alone. Probes run like builds: in the background, step by step, in a
namespace of their own. What they leave in the tree is evicted before anything else.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from sgl_blend.engine.objects import ForwardBatch, ModelOutput
from sgl_blend.engine.tree import TreeLock, node_number
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.memory import Probed
from sgl_blend.protocol.request import Span
from sgl_blend.radix_ext.chunk_store import ChunkHit, ChunkKey, ChunkStore
from sgl_blend.radix_ext.namespaces import probe_salt_of
from sgl_blend.scheduler.build_steps import BuildStep, StepPlanner

NUM_PROBES = 2
PROBE_TOKENS = 256
_SEED = 2405
_MAX_REMEMBERED = 65_536
"""Chunks that are known to have a memory; a number each."""


@dataclass(frozen=True, slots=True)
class ProbeKey(ChunkKey):
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


class Memories:
    """Knows which stored chunks have a memory; owned by the scheduler thread.

    A memory belongs to slots. While the node at the end of a chunk's path is the same, its slots are:
    a tree evicts from the ends of its paths.

    Args:
        store: Where chunks are found.
        vocab_size: Token ids of the model.
    """

    def __init__(self, store: ChunkStore, vocab_size: int) -> None:
        self._store = store
        self._texts = made_up_texts(vocab_size)
        self._probed: OrderedDict[int, tuple[int, int]] = OrderedDict()

    @property
    def num_chunks(self) -> int:
        """Chunks that have been probed and not been found to be gone."""
        return len(self._probed)

    def keys_of(self, chunks: Iterable[ChunkKey]) -> list[ProbeKey]:
        """Return the probes of chunks, all probes of a chunk one after the other."""
        return [
            ProbeKey(
                probe_salt_of(chunk.salt),
                chunk.extra_key,
                chunk.prefix + text,
                chunk.tokens,
                chunk,
                number,
            )
            for chunk in chunks
            for number, text in enumerate(self._texts)
        ]

    def holds(self, hit: ChunkHit) -> bool:
        """Tell whether all probes of what is stored of a chunk have run."""
        return self._mask_of(hit) == (1 << len(self._texts)) - 1

    def wants(self, key: ProbeKey) -> ChunkHit | None:
        """Return the stored chunk of a probe that has not run yet, else None."""
        hit = self._store.find(key.chunk, Span(0, key.chunk.length))
        if hit is None or not hit.complete or self._mask_of(hit) >> key.number & 1:
            return None
        return hit

    def probed(self, key: ProbeKey) -> Probed | None:
        """Note that a probe runs to its end now; return what it finds out, None if that is nothing."""
        hit = self.wants(key)
        if hit is None:
            return None
        mask, node = self._mask_of(hit), node_number(hit.match)
        self._probed[node] = hit.prefix_length, mask | 1 << key.number
        self._probed.move_to_end(node)
        if len(self._probed) > _MAX_REMEMBERED:
            self._probed.popitem(last=False)
        slots = hit.match.take(hit.prefix_length, hit.prefix_length + hit.num_tokens)
        return Probed(stored_slots=slots, begin=key.prefix_length, first=mask == 0)

    def clear(self) -> None:
        """Forget all, because the tree did."""
        self._probed.clear()

    def _mask_of(self, hit: ChunkHit) -> int:
        """Return which probes have run, a bit each."""
        prefix_length, mask = self._probed.get(node_number(hit.match), (0, 0))
        return mask if hit.complete and prefix_length == hit.prefix_length else 0


class ProbeSteps(StepPlanner):
    """Cuts probes into steps; the last one is run once more if its KV outlived what it was for."""

    def __init__(self, store: ChunkStore, step_tokens: int, memories: Memories) -> None:
        super().__init__(store, step_tokens)
        self._memories = memories

    def hold(self, key: ChunkKey) -> TreeLock | None:
        """Keep the chunk of a probe in place: its memory belongs to the slots that it has now."""
        hit = self._memories.wants(key) if isinstance(key, ProbeKey) else None
        return None if hit is None else self.store.lock(hit.match)

    def next_step(self, key: ChunkKey) -> BuildStep | None:
        """Return the next step of a probe, None if it has run or its chunk is not stored."""
        assert isinstance(key, ProbeKey), "only probes are cut here"
        if self._memories.wants(key) is None:
            return None
        step = super().next_step(key)
        if step is not None:
            return step
        begin, stop = self.whole_pages(key.prefix_length), len(key.path)
        stored = self.whole_pages(stop)
        done = begin + max(0, stored - begin - 1) // self.step_tokens * self.step_tokens
        return BuildStep(key, done, stop)


def run_probe(
    fusor: Fusor, memories: Memories, batch: ForwardBatch, step: BuildStep
) -> ModelOutput:
    """Run the forward of one step of a probe."""
    if isinstance(step.key, ProbeKey) and step.is_last:
        return fusor.probe(batch, memories.probed(step.key))
    return fusor.probe(batch, None)

"""What finds chunks in text without marks, and what makes them of text that comes again."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_blend.engine.facts import ServerFacts
from sgl_blend.engine.prefetch import has_storage
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.finding.borders import Borders
from sgl_blend.finding.fingerprints import WindowHash
from sgl_blend.finding.heads import Heads
from sgl_blend.finding.lessons import SHORTEST, Lessons
from sgl_blend.finding.sightings import Sightings
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.start_index import StartIndex
from sgl_blend.scheduler.builds import ChunkBuilder
from sgl_blend.scheduler.credit import Credit
from sgl_blend.scheduler.finder import Finder
from sgl_blend.scheduler.learner import Learner
from sgl_blend.settings.config import BlendConfig

_LOG_MEGABYTES = 64
_LONGEST_HEAD = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """The parts that only --blend-find known and learned need.

    Attributes:
        finder: Finds chunks.
        windows: Makes its fingerprints.
        borders: Of the tokenizer.
    """

    finder: Finder
    windows: WindowHash
    borders: Borders


def make_finding(
    config: BlendConfig, facts: ServerFacts, store: ChunkStore, tp_group: TPGroup
) -> Finding | None:
    """Put together what finds chunks; None with --blend-find marks."""
    if config.blend_find == "marks":
        return None
    high, low = tp_group.agree([float(secrets.randbits(32)) for _ in range(2)])
    windows = WindowHash(int(high) << 32 | int(low))
    borders = Borders.of(facts.tokenizer)
    capacity = facts.capacity + store.free_host_tokens if store.has_host_tier else facts.capacity
    finder = Finder(
        store,
        windows,
        StartIndex(capacity),
        Heads(borders, limit=min(_LONGEST_HEAD, config.blend_max_build_prefix)),
        least=config.blend_min_chunk_tokens,
        asks_storage=has_storage(facts.tree),
    )
    return Finding(finder, windows, borders)


def make_learner(
    config: BlendConfig,
    facts: ServerFacts,
    finding: Finding | None,
    make_builder: Callable[[Sequence[Callable[[ChunkKey], None]]], ChunkBuilder],
    on_built: Sequence[Callable[[ChunkKey], None]],
) -> Learner | None:
    """Put together what makes chunks; None unless with --blend-find learned.

    Args:
        config: The server's settings.
        facts: What it serves.
        finding: What finds them.
        make_builder: Makes what builds them, from what it tells of every chunk that is stored.
        on_built: What is to be told.
    """
    if finding is None or config.blend_find != "learned":
        return None
    told = [*on_built]
    learner = Learner(
        Sightings(finding.windows, _LOG_MEGABYTES),
        Lessons(least=max(SHORTEST, facts.page_size)),
        finding.borders,
        make_builder(told),
        finding.finder,
        Credit(config.blend_learn_share),
    )
    told.append(learner.built)
    return learner

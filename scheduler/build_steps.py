"""Where a build is cut: a pure function of lengths, of the step's length and of what is stored."""

from dataclasses import dataclass

from sgl_blend.engine.tree import TreeLock
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.radix_ext.namespaces import is_built_by
from sgl_blend.scheduler.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class BuildStep:
    """One step of a build.

    Attributes:
        key: What is built: a chunk, or a build prefix as a chunk of no tokens.
        done: Tokens of the key's path that are there; the step computes all after them.
        stop: Where it ends.
        is_last: Whether the chunk is built when this step ends.
    """

    key: ChunkKey
    done: int
    stop: int
    is_last: bool


class StepPlanner:
    """Cuts builds into steps of at most step_tokens.

    Cuts lie at multiples of the step's length, counted from where build prefix or chunk begin (at a
    page, since the tree holds whole pages). KV that ends between two cuts was computed for another
    chunk which begins alike, and is computed again.

    Args:
        store: The tree.
        step_tokens: Most tokens of a step.
        model: Whose chunks are built. A request that arrived under other weights may still ask for
            chunks in a namespace of those; nothing is built there.
    """

    def __init__(self, store: ChunkStore, step_tokens: int, model: LoadedModel) -> None:
        self.store = store
        self.step_tokens = step_tokens
        self.model = model

    def next_step(self, key: ChunkKey) -> BuildStep | None:
        """Return the next step: first of the build prefix, then of the chunk; None if none is due.

        That is so if all is stored, or if it was to be stored for other weights.
        """
        if not is_built_by(key.salt, self.model.fingerprint):
            return None
        path = key.path
        stored = self.store.stored_tokens(path, salt=key.salt, extra_key=key.extra_key)
        begin = self.store.whole_pages(key.prefix_length)
        if stored < begin:
            key, begin, end = key.prefix_only, 0, key.prefix_length
        elif stored < self.store.whole_pages(len(path)):
            end = len(path)
        else:
            return None
        done = begin + (stored - begin) // self.step_tokens * self.step_tokens
        stop = min(done + self.step_tokens, end)
        return BuildStep(key, done, stop, key.length > 0 and self._ends_at(stop, end))

    def _ends_at(self, stop: int, end: int) -> bool:
        """Tell whether a path of so many tokens is stored once a step ends at stop: whole pages are."""
        return stop >= self.store.whole_pages(end)

    def hold(self, key: ChunkKey) -> TreeLock | None:
        """Keep in place what a step of key reads beside its own path; None if that is nothing."""
        return None

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many of so many tokens the tree can hold."""
        return self.store.whole_pages(num_tokens)

    def count(self, key: ChunkKey) -> int:
        """Return how many steps a chunk and its build prefix take if nothing is stored."""
        return -(-key.prefix_length // self.step_tokens) + -(-key.length // self.step_tokens)

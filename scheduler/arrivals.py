"""A request whose KV was asked for from storage, and what of it is on its way."""

from __future__ import annotations

import time
from array import array
from collections.abc import Set
from dataclasses import dataclass, field

from sgl_blend.engine.objects import Req, Tree
from sgl_blend.engine.prefetch import (
    Prefetch,
    drop_prefetch,
    is_being_read,
    is_on_its_way,
    take_loaded,
    tokens_read,
)
from sgl_blend.engine.requests import prompt_ids
from sgl_blend.radix_ext.chunk_store import ChunkKey, ChunkStore
from sgl_blend.scheduler.loading_controller import Patience
from sgl_blend.scheduler.request_state import RequestState
from sgl_blend.storage.codec.streams import RequestStream


@dataclass(slots=True, eq=False)
class Arrival:
    """A request whose KV was asked for.

    Attributes:
        req: The request.
        state: Its state.
        patience: How long it waits.
        since_s: When it was first seen in a round; None before.
        coming: What is on its way, each with the chunk that it is a part of, if it is.
        next_keys: Chunks to ask for once their build prefix is there.
        is_awaited: Whether the request still waits for it.
        num_come: Tokens that have come, of what is over.
        in_pieces: Whether what stands before the chunks that come is prefilled meanwhile.
        stream: Chooses the level of each chunk; None if nothing is lost.
        exact: Tokens up to the end of the first chunk if its KV is exact there; else 0.
        prefilled: Tokens of the prompt for which that is done.
        client: What was asked for in the client's exact namespace and is not over yet; None if nothing.
    """

    req: Req
    state: RequestState
    patience: Patience
    in_pieces: bool
    stream: RequestStream | None = None
    exact: int = 0
    prefilled: int = 0
    client: Prefetch | None = None
    since_s: float | None = None
    coming: dict[Prefetch, ChunkKey | None] = field(default_factory=dict)
    next_keys: tuple[ChunkKey, ...] = ()
    is_awaited: bool = True
    num_come: int = 0

    def stop_waiting(self, waited_s: float) -> None:
        """Let the request wait no longer.

        Args:
            waited_s: How long it did.
        """
        self.is_awaited = False
        self.state.load_s += waited_s
        if self.stream is not None:
            self.state.came_s = time.monotonic()

    def take_over(self, tree: Tree) -> list[ChunkKey]:
        """Take what is over off what is on its way; return the chunks of which something came."""
        came: list[ChunkKey] = []
        for prefetch in [one for one in self.coming if not is_on_its_way(tree, one)]:
            key, loaded = self.coming.pop(prefetch), take_loaded(tree, prefetch)
            self.state.storage_tokens += loaded
            self.num_come += loaded
            if key is None or not loaded:
                continue
            came.append(key)
            if prefetch.chunk is not None and (level := prefetch.chunk.level) is not None:
                self.state.levels[key] = level
        return came

    def progress(self, tree: Tree) -> tuple[int, int]:
        """Return the tokens that have come to this rank, and those that may still come."""
        read = sum(tokens_read(tree, prefetch) for prefetch in self.coming)
        asked = sum(prefetch.num_tokens for prefetch in self.coming)
        later = sum(key.length for key in self.next_keys)
        return self.num_come + read, asked + later - read

    def is_being_read(self, tree: Tree) -> bool:
        """Tell whether all that is on its way goes on while the scheduler computes."""
        return all(is_being_read(tree, prefetch) for prefetch in self.coming)

    def give_up(self, tree: Tree, keys: Set[ChunkKey] | None = None) -> None:
        """Give up some chunks that are on their way, or everything."""
        for prefetch, key in list(self.coming.items()):
            if keys is None or key in keys:
                drop_prefetch(tree, prefetch)
                del self.coming[prefetch]
        if keys is None:
            self.next_keys = ()

    def give_up_covered(self, tree: Tree, store: ChunkStore) -> None:
        """Read no chunks where exact KV of an earlier prompt of the client has come."""
        self.client, state = None, self.state
        covered = exact_reach(store, self.req, state)
        pairs = list(zip(state.keys, state.spans, strict=True))
        beyond = {key for key, span in pairs if span.stop > covered}
        within = {key for key, _ in pairs} - beyond
        self.give_up(tree, within)
        self.next_keys = tuple(key for key in self.next_keys if key not in within)

    def drop(self, tree: Tree, now_s: float) -> None:
        """Give everything up before an order is carried out; the request waited until now.

        How long its prefill takes after that says nothing: the order comes between.
        """
        if self.is_awaited and self.since_s is not None:
            self.state.load_s += now_s - self.since_s
        self.give_up(tree)


def exact_reach(store: ChunkStore, req: Req, state: RequestState) -> int:
    """Return how many tokens, from the first on, the client's earlier prompts have here, exactly."""
    extra_key = state.keys[0].extra_key
    return store.reach(prompt_ids(req), salt=state.client_salt, extra_key=extra_key)


def exact_head(key: ChunkKey, tokens: array[int]) -> int:
    """Return how many tokens of a prompt have exact KV if the first chunk's path is loaded.

    Its build prefix and itself, where the prompt begins with just these; else none.

    Args:
        key: Of the first chunk.
        tokens: Of the prompt.
    """
    path = key.path
    return len(path) if tokens[: len(path)] == path else 0

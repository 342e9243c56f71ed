"""What was seen before: a bounded log of past prompts, and the runs that a new prompt shares with them.

About every 17th fingerprint of a prompt is remembered with its place in the log. A new prompt's
sampled fingerprints are looked up, the tokens behind are compared, and the run is extended to both
sides as far as the texts agree. Which fingerprints are sampled depends on the text alone, so the same
text gives the same. Text whose period is at most 8 tokens has no samples and is never found.

Each token of the log has a label: which kind of new text it is, 0 for text that had come before. When
new text comes again for the first time, its tokens are counted by their labels, which end with that. So
it is known which kinds of new text come again.

A tenant's name is mixed into its fingerprints, and every place knows whose it is. Tokens of one
tenant are never compared with another's.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_blend.finding.fingerprints import WINDOW, Fingerprints, WindowHash, sample_offsets
from sgl_blend.finding.spans import Span

Tokens = NDArray[np.int32]
Indices = NDArray[np.intp]

_WAYS = 8
"""Places of a bucket of the table."""
_OCCURRENCES = 2
"""Places remembered for a fingerprint."""
_TOKENS_PER_BUCKET = 32
"""So a bucket of 8 holds two samples in the middle, and a bucket that is full is rare."""
_TOKENS_PER_PROMPT = 256
"""Of shorter prompts the log holds no more than of prompts of that length."""
_BYTES_PER_PROMPT = 256
"""What Python keeps for a prompt."""
_BYTES_PER_TOKEN = 6 + 16 * _WAYS / _TOKENS_PER_BUCKET + _BYTES_PER_PROMPT / _TOKENS_PER_PROMPT
_NOWHERE = -1
MOST_LABELS = np.iinfo(np.uint16).max
"""The largest label of a kind of new text."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its sampled fingerprints.

    Attributes:
        tenant: Whose prompt it is.
        tokens: int32 [n].
        offsets: intp [m], where the sampled windows begin, ascending.
        fingerprints: uint64 [m], with the tenant mixed in.
    """

    tenant: str
    tokens: Tokens
    offsets: Indices
    fingerprints: Fingerprints


class NewText(NamedTuple):
    """A stretch of a prompt that no earlier one holds.

    Attributes:
        span: In the prompt.
        label: Of its kind, from 1 to MOST_LABELS.
    """

    span: Span
    label: int


class Run(NamedTuple):
    """A stretch of a prompt that an earlier one holds.

    Attributes:
        span: In the prompt.
        place: Where its first token stands on the log's endless count of tokens.
    """

    span: Span
    place: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt in the log: whose it is, and its span on the log's endless count of tokens."""

    tenant: str
    span: Span


class Sightings:
    """The log of all tenants; owned by the scheduler thread.

    Args:
        windows: Makes fingerprints.
        megabytes: Of memory, in units of 10^6 bytes. The oldest prompts are forgotten beyond it.
        least: Tokens of the shortest run worth finding.

    Attributes:
        num_forgotten: Prompts that had to make room.

    Raises:
        ValueError: The memory does not hold a single prompt.
    """

    def __init__(self, windows: WindowHash, megabytes: float, *, least: int = 64) -> None:
        capacity = int(megabytes * 1e6 / _BYTES_PER_TOKEN)
        if capacity < _TOKENS_PER_PROMPT:
            raise ValueError(f"the log of prompts needs more memory than {megabytes} MB")
        self._windows = windows
        self._least = least
        self._capacity = capacity
        self._most_prompts = capacity // _TOKENS_PER_PROMPT
        self._tokens = np.zeros(capacity, np.int32)
        self._labels = np.zeros(capacity, np.uint16)
        num_buckets = max(1, capacity // _TOKENS_PER_BUCKET)
        self._known = np.zeros((num_buckets, _WAYS), np.uint64)
        self._places = np.full((num_buckets, _WAYS), _NOWHERE, np.int64)
        self.num_forgotten = 0
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        tables = (self._tokens, self._labels, self._known, self._places)
        return sum(table.nbytes for table in tables)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts in the log."""
        return self._held

    def clear(self) -> None:
        """Forget everything, tokens included."""
        self._tokens[:] = 0
        self._labels[:] = 0
        self._known[:] = 0
        self._places[:] = _NOWHERE
        self._prompts: list[_Prompt] = []
        self._begins: list[int] = []
        self._next = self._held = 0

    def forget(self, tenant: str) -> None:
        """Forget all prompts of a tenant, tokens included."""
        kept = [prompt for prompt in self._prompts if prompt.tenant != tenant]
        for prompt in self._prompts:
            if prompt.tenant == tenant:
                self._read(prompt.span)[:] = 0
                self._labels_of(prompt.span)[:] = 0
        self._prompts = kept
        self._begins = [prompt.span.start for prompt in kept]
        self._held = sum(prompt.span.num_tokens for prompt in kept)

    def sample(self, tenant: str, tokens: NDArray[np.integer[Any]]) -> Sample:
        """Choose the fingerprints by which a prompt is found and remembered.

        Args:
            tenant: Whose prompt it is.
            tokens: Integers [n], ids below 2^31.
        """
        salt = self._windows.salt(b"tenant", tenant.encode())
        fingerprints = self._windows.salted(self._windows.windows(tokens), salt)
        offsets = sample_offsets(fingerprints)
        return Sample(tenant, tokens.astype(np.int32), offsets, fingerprints[offsets])

    def find(self, sample: Sample, start: int = 0) -> list[Run]:
        """Find what a prompt shares with earlier ones of its tenant.

        Args:
            sample: Of a prompt that is not in the log yet.
            start: Tokens in front that do not matter.

        Returns:
            Disjoint runs, ascending, of at least ``least`` tokens each. A run goes as far to both
            sides as the earlier prompt agrees, or to where the run before it ends.
        """
        bucket = self._bucket(sample.fingerprints)
        row, way = np.nonzero(self._known[bucket] == sample.fingerprints[:, None])
        places = self._places[bucket[row], way]
        runs: list[Run] = []
        done, best, best_offset = start, _no_run(start), -1
        too_short: dict[int, int] = {}  # how far a copy that is moved so far goes
        for offset, place in zip(sample.offsets[row].tolist(), places.tolist(), strict=True):
            if offset < done:
                continue
            if offset != best_offset:
                if best.span.num_tokens >= self._least:
                    runs.append(best)
                    done = best.span.stop
                best, best_offset = _no_run(done), offset
                if offset < done:
                    continue
            if offset < too_short.get(place - offset, 0):
                continue
            run = self._extend(sample, offset, place, done)
            if run.span.num_tokens < self._least:
                too_short[place - offset] = run.span.stop
            # Of copies that go equally far the last one: it bears the labels of what came as a prefix.
            if (run.span.num_tokens, run.place) > (best.span.num_tokens, best.place):
                best = run
        if best.span.num_tokens >= self._least:
            runs.append(best)
        return runs

    def come_again(self, runs: Iterable[Run]) -> Counter[int]:
        """Count new text that these runs show for the first time since; it is not new any more.

        Args:
            runs: As find() gave them; nothing was added since.

        Returns:
            Tokens by their label.
        """
        counts: Counter[int] = Counter()
        for run in runs:
            labels = self._labels_of(Span(run.place, run.place + run.span.num_tokens))
            kinds, sizes = np.unique(labels[labels > 0], return_counts=True)
            counts.update(dict(zip(kinds.tolist(), sizes.tolist(), strict=True)))
            labels[:] = 0
        return counts

    def add(self, sample: Sample, new: Iterable[NewText] = (), start: int = 0) -> None:
        """Remember a prompt. Of one that is longer than the log, the beginning.

        Args:
            sample: Of the prompt.
            new: What of it no earlier prompt holds.
            start: Tokens in front that an earlier prompt began with as well. They did not come again
                but go on: what was new of them stays new.
        """
        tokens = sample.tokens[: self._capacity]
        if len(tokens) < self._least:
            return
        moved = self._move_labels(sample, start)
        begin = self._next
        if begin % self._capacity + len(tokens) > self._capacity:
            begin += self._capacity - begin % self._capacity  # a prompt stands in one piece
        self._next = begin + len(tokens)
        self._make_room()
        span = Span(begin, self._next)
        self._prompts.append(_Prompt(sample.tenant, span))
        self._begins.append(begin)
        self._held += len(tokens)
        self._read(span)[:] = tokens
        labels = self._labels_of(span)
        labels[:] = 0
        for part, its_labels in moved:
            labels[part.start : part.stop] = its_labels[: max(0, len(labels) - part.start)]
        for text in new:
            labels[text.span.start : text.span.stop] = text.label
        # Of a window that comes again in one prompt, the first: most can follow it.
        inside = sample.offsets < len(tokens)
        new, first = np.unique(sample.fingerprints[inside], return_index=True)
        self._insert(new, sample.offsets[inside][first] + begin)

    def _move_labels(self, sample: Sample, start: int) -> list[tuple[Span, NDArray[np.uint16]]]:
        """Take the labels off earlier copies of a prompt's first tokens; return what they were."""
        inside = sample.offsets <= start - WINDOW
        first = Sample(
            sample.tenant,
            sample.tokens[:start],
            sample.offsets[inside],
            sample.fingerprints[inside],
        )
        moved = []
        for run in self.find(first):
            labels = self._labels_of(Span(run.place, run.place + run.span.num_tokens))
            moved.append((run.span, labels.copy()))
            labels[:] = 0
        return moved

    def _make_room(self) -> None:
        """Forget what the prompt up to ``_next`` overwrites."""
        oldest = self._next - self._capacity
        count = bisect_right(self._begins, oldest - 1)
        count = max(count, len(self._prompts) + 1 - self._most_prompts)
        self._held -= sum(prompt.span.num_tokens for prompt in self._prompts[:count])
        del self._prompts[:count], self._begins[:count]
        self.num_forgotten += count

    def _insert(self, new: Fingerprints, places: NDArray[np.int64]) -> None:
        """Put fingerprints, each of which comes once, where the oldest of a bucket stood."""
        while len(new):
            bucket, first = np.unique(self._bucket(new), return_index=True)
            fingerprints = new[first]
            age = self._places[bucket]
            same = self._known[bucket] == fingerprints[:, None]
            # One that has all its occurrences loses its own oldest.
            is_full = same.sum(axis=1) >= _OCCURRENCES
            age[is_full[:, None] & ~same] = np.iinfo(np.int64).max
            way = age.argmin(axis=1)
            self._known[bucket, way] = fingerprints
            self._places[bucket, way] = places[first]
            rest = np.ones(len(new), bool)
            rest[first] = False
            new, places = new[rest], places[rest]

    def _bucket(self, fingerprints: Fingerprints) -> Indices:
        return ((fingerprints >> np.uint64(16)) % np.uint64(len(self._known))).astype(np.intp)

    def _read(self, span: Span) -> Tokens:
        """Return a view of tokens in the log."""
        first = span.start % self._capacity
        return self._tokens[first : first + span.num_tokens]

    def _labels_of(self, span: Span) -> NDArray[np.uint16]:
        """Return a view of labels in the log."""
        first = span.start % self._capacity
        return self._labels[first : first + span.num_tokens]

    def _extend(self, sample: Sample, offset: int, place: int, done: int) -> Run:
        """Return the run around an offset that a place of the log may hold; empty if it does not."""
        number = bisect_right(self._begins, place) - 1
        if number < 0:
            return _no_run(offset)
        earlier = self._prompts[number]
        if earlier.tenant != sample.tenant or place >= earlier.span.stop:
            return _no_run(offset)
        tokens = sample.tokens
        right = _count_equal(self._read(Span(place, earlier.span.stop)), tokens[offset:])
        reach = min(place - earlier.span.start, offset - done)
        left = _count_equal(
            self._read(Span(place - reach, place))[::-1], tokens[offset - reach : offset][::-1]
        )
        if not right:
            return _no_run(offset)
        return Run(Span(offset - left, offset + right), place - left)

    def check(self) -> None:
        """Hold what must always be true.

        Raises:
            AssertionError: It is not: a bug.
        """
        spans = [prompt.span for prompt in self._prompts]
        assert self._begins == [span.start for span in spans]
        assert self._held == sum(span.num_tokens for span in spans) <= self._capacity
        assert len(spans) <= self._most_prompts
        assert all(one.stop <= two.start for one, two in pairwise(spans))
        assert not spans or spans[0].start >= self._next - self._capacity
        held = Counter(self._known[self._places >= 0].tolist())
        assert max(held.values(), default=0) <= _OCCURRENCES


def _no_run(offset: int) -> Run:
    return Run(Span(offset, offset), _NOWHERE)


def _count_equal(one: Tokens, other: Tokens) -> int:
    """Return how many tokens are equal from the beginning on; most texts part soon."""
    size = min(len(one), len(other))
    begin, step = 0, 64
    while begin < size:
        end = min(begin + step, size)
        parted = one[begin:end] != other[begin:end]
        at = int(parted.argmax())
        if parted[at]:
            return begin + at
        begin, step = end, 8 * step
    return size

"""Which text becomes a chunk: runs that were seen before, and messages of a role that comes again.

A run is learned unless one piece served it already. It begins at the strongest border among its first
tokens, because what stands before it differs from prompt to prompt. It is split where messages begin,
and then by length.

Some messages come back as a whole, files that an agent has read for example. For each header of
messages it is counted how many of the last ones had been seen from their start. Where at least half
had, messages with that header are learned at first sight.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_blend.finding.borders import HEADER, Border, Strengths
from sgl_blend.finding.spans import Span, num_shared

_SNAP = 16
"""Tokens at the beginning of a run among which it may begin."""
_COUNTED = 64
"""Last messages of a role that are counted."""
_FEWEST_COUNTED = 16


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a prompt.

    Attributes:
        span: From behind the special token that ends its header to the next message's header.
        header: Bytes of the tokens that say whose message it is.
    """

    span: Span
    header: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to learn from.

    Attributes:
        tenant: Whose it is.
        tokens: Integers [n].
        strengths: uint8 [n], the border in front of each token.
        start: Tokens in front that an exact prefix served.
        served: Pieces that were served by chunks, ascending and disjoint.
        runs: What an earlier prompt of the tenant holds, ascending and disjoint.
    """

    tenant: str
    tokens: NDArray[np.integer[Any]]
    strengths: Strengths
    start: int
    served: Sequence[Span]
    runs: Sequence[Span]


class Lessons:
    """Chooses what to learn; owned by the scheduler thread.

    Args:
        least: Tokens of the shortest chunk.
        most: Tokens of the longest one.
        most_roles: Headers that are counted, of all tenants; what was not seen for longest goes first.
    """

    def __init__(self, *, least: int = 64, most: int = 1_024, most_roles: int = 4_096) -> None:
        self._least = least
        self._most = most
        self._most_roles = most_roles
        self._roles: OrderedDict[tuple[str, bytes], deque[bool]] = OrderedDict()

    def choose(self, prompt: Prompt) -> list[Span]:
        """Choose the chunks to learn from a prompt, and count its messages.

        Returns:
            Disjoint, ascending, of ``least`` to ``most`` tokens each.
        """
        whole = self._at_first_sight(prompt)
        chunks = [chunk for span in whole for chunk in self.split(span, prompt.strengths)]
        learned = list(chunks)
        for run in prompt.runs:
            for chunk in self.split(run, prompt.strengths):
                # A message that is learned as a whole serves its parts too.
                if any(num_shared(chunk, other) for other in chunks):
                    continue
                if not is_served(chunk, prompt.served, self._least):
                    learned.append(chunk)
        return sorted(learned)

    def split(self, span: Span, strengths: Strengths) -> list[Span]:
        """Cut a stretch of text into chunks.

        Args:
            span: In the prompt.
            strengths: uint8 [n], the border in front of each token of the prompt.

        Returns:
            Disjoint, ascending, of ``least`` to ``most`` tokens. Crumbs are left out.
        """
        if span.num_tokens < self._least:
            return []
        start = self._snap(span, strengths)
        chunks = []
        for cut in _message_starts(strengths, Span(start, span.stop)):
            if cut == start or span.stop - cut < self._least:
                continue
            if cut - start >= self._least:
                chunks += self._split_by_length(Span(start, cut), strengths)
            start = cut
        chunks += self._split_by_length(Span(start, span.stop), strengths)
        return chunks

    def forget(self, tenant: str) -> None:
        """Forget the counts of a tenant."""
        for role in [role for role in self._roles if role[0] == tenant]:
            del self._roles[role]

    def clear(self) -> None:
        """Forget everything."""
        self._roles.clear()

    def _snap(self, span: Span, strengths: Strengths) -> int:
        last = min(span.start + _SNAP, span.stop - self._least + 1)
        first_tokens = strengths[span.start : last]
        strongest = int(first_tokens.argmax())
        return span.start + (strongest if first_tokens[strongest] >= Border.LINE else 0)

    def _split_by_length(self, span: Span, strengths: Strengths) -> list[Span]:
        chunks = []
        start = span.start
        while span.stop - start > self._most:
            # The last of the strongest borders in the second half.
            half = start + self._most // 2 + 1
            second_half = strengths[half : start + self._most + 1][::-1]
            cut = start + self._most - int(second_half.argmax())
            chunks.append(Span(start, cut))
            start = cut
        if span.stop - start >= self._least:
            chunks.append(Span(start, span.stop))
        return chunks

    def _at_first_sight(self, prompt: Prompt) -> list[Span]:
        """Count the messages; return those that are learned though they were not seen before."""
        seen = [*prompt.served, *prompt.runs]
        chosen = []
        for message in find_messages(prompt.tokens, prompt.strengths, self._least):
            if message.span.start < prompt.start:
                continue
            came = _was_seen(message.span, seen)
            last = self._last(prompt.tenant, message.header)
            is_likely = len(last) >= _FEWEST_COUNTED and 2 * sum(last) >= len(last)
            if is_likely and not came:
                chosen.append(message.span)
            last.append(came)
        return chosen

    def _last(self, tenant: str, header: bytes) -> deque[bool]:
        role = tenant, header
        if role not in self._roles and len(self._roles) == self._most_roles:
            self._roles.popitem(last=False)
        last = self._roles.setdefault(role, deque(maxlen=_COUNTED))
        self._roles.move_to_end(role)
        return last


def is_served(chunk: Span, pieces: Iterable[Span], least: int) -> bool:
    """Return whether a chunk would bring too little: what is missing is short, and a piece is long.

    Long is a third of the chunk. With a half, a tenth more is built for pieces hardly longer.

    Args:
        chunk: What might be learned.
        pieces: Disjoint pieces that were served.
        least: Tokens below which a rest is not worth a chunk.
    """
    shared = [num_shared(chunk, piece) for piece in pieces]
    rest = chunk.num_tokens - sum(shared)
    return rest < least and 3 * max(shared, default=0) >= chunk.num_tokens


def find_messages(
    tokens: NDArray[np.integer[Any]], strengths: Strengths, least: int
) -> list[Message]:
    """Find the messages of a prompt by its special tokens.

    Args:
        tokens: Integers [n].
        strengths: uint8 [n], the border in front of each token.
        least: Tokens of the shortest message that counts.
    """
    special = np.flatnonzero(strengths == Border.SPECIAL).tolist()
    messages = []
    for number, (start, stop) in enumerate(pairwise([*special, len(tokens)])):
        if stop - start < least:
            continue
        first = _header_start(special[: number + 1])
        last = start + _end_of_name(strengths[start : start + HEADER])
        messages.append(Message(Span(start, stop), tokens[first:last].tobytes()))
    return messages


def _header_start(special: Sequence[int]) -> int:
    """Return where the header begins that ends at the last of these borders, as <start>user<end>."""
    first = special[-1]
    for border in reversed(special[:-1]):
        if first - border > HEADER:
            break
        first = border
    return max(first - 1, special[-1] - HEADER, 0)


def _end_of_name(strengths: Strengths) -> int:
    """Return the tokens of a first line so short that it names the role, as in <start>user."""
    lines = np.flatnonzero(strengths[1:] >= Border.LINE)
    return int(lines[0]) + 1 if len(lines) else 0


def _message_starts(strengths: Strengths, span: Span) -> list[int]:
    """Return where messages begin in a stretch: behind special tokens with more than a header's."""
    special = (
        np.flatnonzero(strengths[span.start : span.stop] == Border.SPECIAL) + span.start
    ).tolist()
    return [
        start for start, following in pairwise([*special, span.stop]) if following - start > HEADER
    ]


def _was_seen(message: Span, seen: Iterable[Span]) -> bool:
    """Return whether at least half of a message was seen, from its start on."""
    return any(
        run.start <= message.start + _SNAP and 2 * num_shared(run, message) >= message.num_tokens
        for run in seen
    )

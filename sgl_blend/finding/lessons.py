"""Which text becomes a chunk: runs that were seen before, and new text where most comes again.

A run is learned unless one piece served it already. It begins at the strongest border among its first
tokens, because what stands before it differs from prompt to prompt. It is split where messages begin,
and then by length.

Most text of some messages comes back, such as documents that were retrieved. Where at least half of a
role's new text came again later, its new text is learned at first sight. It is split where documents
are likely to begin, because they may come again in another order.

Some messages come back as a whole, such as files that an agent has read. Where at least half of a
role's last messages did, one that did not is learned as a whole.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_blend.finding.borders import HEADER, Border, Strengths
from sgl_blend.finding.roles import Role, Roles
from sgl_blend.finding.seams import Seams, pairs_of
from sgl_blend.finding.sightings import NewText
from sgl_blend.finding.spans import Span, num_shared, overlapping, union

_SNAP = 16
"""Tokens at the beginning of a run among which it may begin."""


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
        came_again: Tokens of the runs that were new when they came last, by the label of their role.
    """

    tenant: str
    tokens: NDArray[np.integer[Any]]
    strengths: Strengths
    start: int
    served: Sequence[Span]
    runs: Sequence[Span]
    came_again: Counter[int]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a prompt teaches.

    Attributes:
        chunks: What to learn: disjoint, ascending.
        new: What no earlier prompt of the tenant holds, ascending, with the label of its role.
    """

    chunks: list[Span]
    new: list[NewText]


SHORTEST = 64
"""Tokens of the shortest chunk that is learned, unless a page is longer."""


class Lessons:
    """Chooses what to learn; owned by the scheduler thread.

    Args:
        least: Tokens of the shortest chunk.
        most: Tokens of the longest one.
        roles: What is known of headers of messages; all is new by default.
    """

    def __init__(
        self, *, least: int = SHORTEST, most: int = 1_024, roles: Roles | None = None
    ) -> None:
        self._least = least
        self._most = most
        self._roles = Roles() if roles is None else roles
        self._seams = Seams()

    def study(self, prompt: Prompt) -> Lesson:
        """Choose the chunks to learn from a prompt, and count what was new and what came again.

        Returns:
            Chunks of ``least`` to ``most`` tokens, and the new text.
        """
        tenant, tokens, strengths = prompt.tenant, prompt.tokens, prompt.strengths
        messages = find_messages(tokens, strengths, self._least)
        new = self._find_new(prompt, messages)
        self._roles.count_again(tenant, prompt.came_again)
        begun = [Span(self._snap(run, strengths), run.stop) for run in prompt.runs]
        pairs = pairs_of(tokens)
        self._seams.count(tenant, pairs, begun)
        seams = self._seams.find(tenant, pairs)
        whole = self._whole(prompt, messages)
        chunks = [chunk for span in whole for chunk in self.split(span, strengths)]
        for run in prompt.runs:
            for chunk in self.split(run, strengths):
                # A message that is learned as a whole serves its parts too.
                served = overlapping(prompt.served, chunk)
                if not overlapping(whole, chunk) and not is_served(chunk, served, self._least):
                    chunks.append(chunk)
        for text in new:
            role = self._roles.labelled(text.label, tenant)
            if role is not None and role.comes_again and not overlapping(whole, text.span):
                first, last = np.searchsorted(seams, text.span)
                chunks += self.split(text.span, strengths, seams[first:last].tolist())
        self._roles.count_new(tenant, new)
        return Lesson(sorted(chunks), new)

    def split(self, span: Span, strengths: Strengths, seams: Sequence[int] = ()) -> list[Span]:
        """Cut a stretch of text into chunks.

        Args:
            span: In the prompt.
            strengths: uint8 [n], the border in front of each token of the prompt.
            seams: Where to cut besides, ascending. A cut that would leave a crumb is not made.

        Returns:
            Disjoint, ascending, of ``least`` to ``most`` tokens. Messages too short are left out.
        """
        if span.num_tokens < self._least:
            return []
        start = self._snap(span, strengths)
        begins = [
            begin
            for begin in _message_starts(strengths, Span(start, span.stop))
            if start < begin <= span.stop - self._least
        ]
        return [
            chunk
            for message in starmap(Span, pairwise([start, *begins, span.stop]))
            for part in self._split_at(message, seams)
            for chunk in self._split_by_length(part, strengths)
        ]

    def _split_at(self, span: Span, seams: Iterable[int]) -> list[Span]:
        """Cut behind seams so that no part is too short.

        What is too short for a part of its own goes to the part before it, because a part is found from
        its beginning on. What stands in front of the first part is left out.
        """
        inside = [seam for seam in seams if span.start < seam <= span.stop - self._least]
        begins = [span.start]
        for seam, following in pairwise([*inside, span.stop]):
            if seam - begins[-1] >= self._least:
                begins.append(seam)
            elif following - seam >= self._least:
                begins[-1] = seam
        return list(starmap(Span, pairwise([*begins, span.stop])))

    def forget(self, tenant: str) -> None:
        """Forget the counts of a tenant."""
        self._roles.forget(tenant)
        self._seams.forget(tenant)

    def clear(self) -> None:
        """Forget everything."""
        self._roles.clear()
        self._seams.clear()

    def _snap(self, span: Span, strengths: Strengths) -> int:
        last = min(span.start + _SNAP, span.stop - self._least + 1)
        first_tokens = strengths[span.start : last]
        strongest = int(first_tokens.argmax())
        return span.start + (strongest if first_tokens[strongest] >= Border.LINE else 0)

    def _split_by_length(self, span: Span, strengths: Strengths) -> list[Span]:
        if span.num_tokens < self._least:
            return []
        chunks = []
        start = span.start
        while span.stop - start > self._most:
            # The last of the strongest borders in the second half, unless it leaves a crumb.
            half = start + self._most // 2 + 1
            last = min(start + self._most, span.stop - self._least)
            cut = last - int(strengths[half : last + 1][::-1].argmax())
            chunks.append(Span(start, cut))
            start = cut
        chunks.append(Span(start, span.stop))
        return chunks

    def _find_new(self, prompt: Prompt, messages: Iterable[Message]) -> list[NewText]:
        seen = union([*prompt.served, *prompt.runs])
        found = []
        for message in messages:
            begin = max(message.span.start, prompt.start)
            gaps = gaps_between(seen, Span(begin, message.span.stop), self._least)
            if gaps:
                label = self._role(prompt, message).label
                found += [NewText(gap, label) for gap in gaps]
        return found

    def _role(self, prompt: Prompt, message: Message) -> Role:
        return self._roles.of(prompt.tenant, message.header, message.span.num_tokens)

    def _whole(self, prompt: Prompt, messages: Iterable[Message]) -> list[Span]:
        """Count which messages had come before; return those that did not, though most of a role do."""
        chosen = []
        for message in messages:
            if message.span.start < prompt.start:
                continue
            came = any(
                _had_come(message.span, overlapping(seen, message.span))
                for seen in (prompt.served, prompt.runs)
            )
            role = self._role(prompt, message)
            if role.comes_as_a_whole and not came:
                chosen.append(message.span)
            role.last.append(came)
        return chosen


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


def gaps_between(seen: Sequence[Span], span: Span, least: int) -> list[Span]:
    """Return what of a span lies in none of these stretches.

    Args:
        seen: Ascending and disjoint.
        span: Where to look.
        least: Tokens of the shortest gap that counts.
    """
    gaps = []
    begin = span.start
    for stretch in overlapping(seen, span):
        if stretch.start - begin >= least:
            gaps.append(Span(begin, stretch.start))
        begin = stretch.stop
    if span.stop - begin >= least:
        gaps.append(Span(begin, span.stop))
    return gaps


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
        # A header is short, and so is the search for its beginning.
        first = _header_start(special[max(0, number - HEADER) : number + 1])
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


def _had_come(message: Span, seen: Iterable[Span]) -> bool:
    """Return whether at least half of a message was seen, from its start on."""
    return any(
        run.start <= message.start + _SNAP and 2 * num_shared(run, message) >= message.num_tokens
        for run in seen
    )

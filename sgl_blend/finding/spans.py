"""A stretch of a prompt."""

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of a prompt, counted from its first token."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Return how many tokens it has."""
        return self.stop - self.start


def num_shared(one: Span, other: Span) -> int:
    """Return how many tokens lie in both."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))

"""What is known of tenants, of so many at most: strangers who send little push nobody out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_HALVED_AFTER = 1 << 20
"""After so many tokens of all tenants, what each has sent counts half: who stays away gives way."""


class Tenants(Generic[T]):
    """A table of tenants; owned by the scheduler thread.

    Where it is full, the tenant gives way that has sent the fewest tokens lately. Were it the one that
    was not seen for longest, tiny prompts under names that are made up would push out everyone.

    Args:
        make: Makes what is known of a new tenant.
        most: Tenants at most, at least 1.
        on_forget: Called with what was known of a tenant that is forgotten.

    Attributes:
        num_pushed_out: Tenants that had to make room.
    """

    def __init__(
        self, make: Callable[[], T], most: int, on_forget: Callable[[T], None] | None = None
    ) -> None:
        self._make = make
        self._most = most
        self._on_forget = on_forget
        self._known: OrderedDict[str, T] = OrderedDict()
        self._sent: dict[str, float] = {}
        self._sent_by_all = 0
        self.num_pushed_out = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: str) -> T | None:
        """Return what is known of a tenant, None if nothing is."""
        return self._known.get(name)

    def of(self, name: str, num_tokens: int) -> T:
        """Return what is known of a tenant that sends so many tokens; a new one is made room for."""
        if name not in self._known:
            if len(self._known) == self._most:
                self.forget(min(self._known, key=self._sent.__getitem__))  # of equals the oldest
                self.num_pushed_out += 1
            self._known[name], self._sent[name] = self._make(), 0
        self._known.move_to_end(name)
        self._note(name, num_tokens)
        return self._known[name]

    def _note(self, name: str, num_tokens: int) -> None:
        self._sent[name] += num_tokens
        self._sent_by_all += num_tokens
        if self._sent_by_all >= _HALVED_AFTER:
            self._sent_by_all = 0
            self._sent = {one: sent / 2 for one, sent in self._sent.items()}

    def forget(self, name: str) -> None:
        """Forget a tenant, if anything is known of it."""
        if name in self._known:
            del self._sent[name]
            known = self._known.pop(name)
            if self._on_forget is not None:
                self._on_forget(known)

    def clear(self) -> None:
        """Forget everything."""
        for name in list(self._known):
            self.forget(name)

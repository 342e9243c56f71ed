"""What becomes of the text of messages, by their headers: does it come again, and as a whole?

A role is a header of one tenant's messages. Of its text that was new, it is counted how much came again
later. Both sums fade, so that late prompts count more than early ones. And of its last messages it is
counted how many had come before, from their start on.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_blend.finding.sightings import MOST_LABELS, NewText
from sgl_blend.finding.tenants import Tenants

_FADES = 1 - 1 / 64
"""What is left of a role's sums with each prompt that has new text of it."""
_FEWEST_NEW = 4_096
"""Tokens of new text below which a role is not judged."""
_COUNTED = 64
"""Last messages of a role that are counted."""
_FEWEST_COUNTED = 16


@dataclass(slots=True)
class Role:
    """A header of a tenant's messages, and what becomes of text under it.

    Attributes:
        tenant: Whose it is.
        label: Of its new text in the log of prompts.
        new: Tokens that were new; a sum that fades.
        came_again: Those of them that came again; it fades as well.
        last: Whether each of the last messages had come before.
    """

    tenant: str
    label: int
    new: float = 0.0
    came_again: float = 0.0
    last: deque[bool] = field(default_factory=lambda: deque(maxlen=_COUNTED))

    @property
    def comes_again(self) -> bool:
        """Return whether at least half of its new text comes again."""
        return self.new >= _FEWEST_NEW and 2 * self.came_again >= self.new

    @property
    def comes_as_a_whole(self) -> bool:
        """Return whether at least half of its messages come again as a whole."""
        return len(self.last) >= _FEWEST_COUNTED and 2 * sum(self.last) >= len(self.last)


class Roles:
    """Roles of all tenants; owned by the scheduler thread.

    Args:
        most: Roles of a tenant. The one that was not seen for longest is forgotten beyond them.
        most_tenants: See Tenants. All their roles together are fewer than MOST_LABELS.
    """

    def __init__(self, most: int = 64, most_tenants: int = 256) -> None:
        self._most = most
        self._tenants: Tenants[OrderedDict[bytes, Role]] = Tenants(
            OrderedDict, most_tenants, self._drop_labels
        )
        self._by_label: dict[int, Role] = {}
        self._last_label = 0

    def of(self, tenant: str, header: bytes, num_tokens: int) -> Role:
        """Return the role of a message of so many tokens, a new one if it is not known."""
        roles = self._tenants.of(tenant, num_tokens)
        if header not in roles:
            if len(roles) == self._most:
                del self._by_label[roles.popitem(last=False)[1].label]
            role = Role(tenant, self._free_label())
            roles[header] = self._by_label[role.label] = role
        roles.move_to_end(header)
        return roles[header]

    def labelled(self, label: int, tenant: str) -> Role | None:
        """Return the role of a label; None if it was dropped, and the label is another tenant's now."""
        role = self._by_label.get(label)
        return role if role is not None and role.tenant == tenant else None

    def count_again(self, tenant: str, came_again: Counter[int]) -> None:
        """Count new text that came again, as tokens by their labels."""
        for label, num_tokens in came_again.items():
            role = self.labelled(label, tenant)
            if role is not None:
                role.came_again += num_tokens

    def count_new(self, tenant: str, new: Iterable[NewText]) -> None:
        """Count the new text of a prompt."""
        sizes: Counter[int] = Counter()
        for text in new:
            sizes[text.label] += text.span.num_tokens
        for label, num_tokens in sizes.items():
            role = self.labelled(label, tenant)
            if role is not None:  # one prompt may have more roles than are counted
                role.new = _FADES * role.new + num_tokens
                role.came_again *= _FADES

    def forget(self, tenant: str) -> None:
        """Forget the roles of a tenant."""
        self._tenants.forget(tenant)

    def clear(self) -> None:
        """Forget everything."""
        self._tenants.clear()

    def _drop_labels(self, roles: OrderedDict[bytes, Role]) -> None:
        for role in roles.values():
            del self._by_label[role.label]

    def _free_label(self) -> int:
        """Return the label that was not used for longest: old text may bear those of dropped roles."""
        while True:
            self._last_label = self._last_label % MOST_LABELS + 1
            if self._last_label not in self._by_label:
                return self._last_label

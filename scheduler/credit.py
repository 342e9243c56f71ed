"""What may be built of text that nobody marked: each tenant pays with the tokens of its own prompts."""

from collections import OrderedDict

_MOST = 16_384
"""Tokens that a tenant can save up."""
_MOST_TENANTS = 16_384


class Credit:
    """Tokens that may be built; owned by the scheduler thread.

    A tenant earns a share of the tokens of its prompts. Besides, there is one start for all tenants
    together: if each had its own, a client that makes up tenants would be paid for that.

    Args:
        share: Tokens that may be built per token of a prompt; 0 pays for nothing.
        start: Tokens that may be built beyond that, once, by all tenants together.

    Attributes:
        start: What is left of it.
    """

    def __init__(self, share: float, start: int = _MOST) -> None:
        self._share = share
        self.start = float(start if share else 0)
        self._saved: OrderedDict[str, float] = OrderedDict()

    def saved(self, tenant: str) -> float:
        """Return the tokens that a tenant has earned and not spent."""
        return self._saved.get(tenant, 0.0)

    def earn(self, tenant: str, num_tokens: int) -> None:
        """Note the tokens of a prompt."""
        self._saved[tenant] = min(_MOST, self.saved(tenant) + self._share * num_tokens)
        self._saved.move_to_end(tenant)
        if len(self._saved) > _MOST_TENANTS:
            self._saved.popitem(last=False)

    def spend(self, tenant: str, num_tokens: int) -> bool:
        """Pay for tokens that are built, or return that it is too much."""
        own = min(self.saved(tenant), num_tokens)
        from_start = num_tokens - own
        if from_start > self.start:
            return False
        if own:
            self._saved[tenant] -= own
        self.start -= from_start
        return True

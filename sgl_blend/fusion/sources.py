"""Where the KV of a reused span lies.

The forward copies from slots of the pool. Whoever holds KV in another place answers with slots too, and
brings it there before the forward runs.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch


class KVSource(Protocol):
    """The stored KV of a path of tokens; never changed once it is made."""

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return int64 [stop - start], pool slots of a part of the path, on the pool's device."""


class PoolSlots(msgspec.Struct, eq=False, gc=False):
    """KV in slots of the pool that somebody else keeps.

    Attributes:
        slots: int64 [n], the slots of a path from its beginning.
    """

    slots: torch.Tensor

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return int64 [stop - start], pool slots of a part of the path, on the pool's device."""
        return self.slots[start:stop]
